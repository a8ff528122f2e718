"""The counts and the lengths of a prepared corpus, as numbers and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastbert import json_file
from fastbert.data.markup import MARKUP
from fastbert.data.prepared.manifest import Manifest
from fastbert.jobs.prepare_piece import EDGES, PieceRecord
from fastbert.picture import picture

SUMMARY, CHART = "summary.json", "lengths.png"
COUNTS = (
    *("files", "bytes", "shards", "documents", "sentences", "tokens", "vocabulary"),
    "documents_without_passage",
)
MEANS = ("tokens_per_sentence", "tokens_per_document")


def summarise(manifest: Manifest, records: Sequence[PieceRecord]) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    Args:
        manifest: The manifest of the corpus.
        records: The `PieceRecord` of each piece.

    Returns:
        A dict with the counts of the corpus, the number of lines that were left out for each
        reason, and the numbers of removed tags and parts of markup. For sentences and for
        documents, the dict also has the mean length in tokens and the number in each class of
        lengths. The name of a class is its smallest length.
    """
    counts = {part: manifest.count(part) for part in ("documents", "sentences", "tokens")}
    dropped: Counter[str] = Counter()
    for record in records:
        dropped.update(record.dropped)
    read = sum(record.read for record in records)
    return {
        "files": manifest.source["files"],
        "bytes": manifest.source["bytes"],
        "shards": len(records),
        **counts,
        "documents_without_passage": read - counts["documents"],
        "markup_left_out": {name: dropped.pop(name, 0) for name in MARKUP},
        "lines_left_out": dict(sorted(dropped.items())),
        "vocabulary": manifest.vocabulary["size"],
        "tokens_per_sentence": counts["tokens"] / counts["sentences"],
        "tokens_per_document": counts["tokens"] / counts["documents"],
        "lengths": {part: _classes(records, part) for part in ("sentences", "documents")},
    }


def _classes(records: Sequence[PieceRecord], part: str) -> dict[str, int]:
    counts = np.sum([record.lengths[part] for record in records], axis=0)
    first, last = np.flatnonzero(counts)[[0, -1]]
    return {str(EDGES[i]): int(counts[i]) for i in range(first, last + 1)}


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json``, and check its numbers.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged. The message names the file.
    """
    summary = json_file.read(path)
    numbers = {name: summary.get(name) for name in COUNTS + MEANS}
    numbers |= markup if isinstance(markup := summary.get("markup_left_out"), dict) else {}
    numbers |= left if isinstance(left := summary.get("lines_left_out"), dict) else {"": left}
    for name, value in numbers.items():
        if type(value) not in ((int, float) if name in MEANS else (int,)):
            raise ValueError(
                f"{path}: {name or 'lines_left_out'}: got {value!r:.100}, allowed: a number; "
                "--overwrite prepares the corpus again"
            )
    return summary


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw the lengths of sentences and documents as a PNG file."""
    with picture(path, 11, 3.5) as figure:
        for axes, part in zip(figure.subplots(1, 2), ("sentences", "documents"), strict=True):
            classes = summary["lengths"][part]
            starts = [int(start) for start in classes]
            ends = [EDGES[EDGES.index(start) + 1] for start in starts]
            widths = [end - start for start, end in zip(starts, ends, strict=True)]
            axes.bar(starts, list(classes.values()), widths, align="edge", edgecolor="white")
            mean = summary[f"tokens_per_{part[:-1]}"]
            axes.axvline(mean, color="gray", linestyle=":", label=f"mean {mean:,.1f}")
            title = f"{summary[part]:,} {part}"
            axes.set(xscale="log", title=title, xlabel="tokens", ylabel="number")
            axes.grid(alpha=0.3)
            axes.legend()
