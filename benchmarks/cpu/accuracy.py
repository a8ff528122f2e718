"""Errors of int8 and bf16 in sentence embeddings: the real MiniLM checkpoint on real sentences."""

from __future__ import annotations

from typing import Any

from fastbert.bench.encoder import Notify
from fastbert.bench.quantized_accuracy import measure, real_sentences

MOST = 256


def run(notify: Notify, most: int = MOST) -> dict[str, Any]:
    """Return the measured errors, or the reason if the checkpoint is missing."""
    try:
        sentences = real_sentences(most)
    except ModuleNotFoundError as error:
        return {"refused": str(error)}
    notify(f"{len(sentences)} real sentences")
    result = {"sentences": len(sentences), "rows": measure(sentences)}
    for text in lines(result):
        notify(text)
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of the errors that `run` returned."""
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
