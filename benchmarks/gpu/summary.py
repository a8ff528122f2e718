"""The summary of a run: ``summary.json``, and a table that is printed last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.contest import GpuRow, line
from fastbert import json_file
from fastbert.bench.contest import fastest
from fastbert.bench.limits import CROSS_ENTROPY_MEMORY, VARLEN_OVERHEAD
from fastbert.machine import describe

NAME = "summary.json"
# The rows of each match, by the match's series and label.
Matches = Mapping[tuple[str, str], Sequence[GpuRow]]


def write(folder: Path, results: Sequence[Mapping[str, object]]) -> None:
    """Add sections to the summary of the folder; sections of earlier runs remain in the summary."""
    path = folder / NAME
    known: dict[str, Any] = {}
    if path.exists():
        known = {s["section"]: s for s in json.loads(path.read_text("utf-8"))["sections"]}
    for result in results:
        section = str(result["section"])
        known[section] = {**result, "table": list(lines_of(folder, section))}
    content = {"machine": asdict(describe()), "sections": list(known.values())}
    json_file.write(path, content, json_file.record)


def lines_of(folder: Path, section: str) -> Iterator[str]:
    """Yield a line for each shape of a section, with fastbert, the best peer, ratio and goal.

    The rows of a section that was ended early are read from the log of the section.
    """
    path, log = folder / f"{section}.json", folder / f"{section}.log"
    if not section.startswith("bench-"):
        return
    if path.exists():
        yield from lines_of_rows(rows_of(json.loads(path.read_text("utf-8"))["rows"]))
    elif log.exists():
        lines = log.read_text("utf-8").splitlines()
        yield from lines_of_rows(rows_of(filter(None, map(row_of, lines))))


def row_of(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line of output, or None if the line has no JSON object."""
    try:
        content = json.loads(line)
    except json.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None


def rows_of(records: Iterable[Mapping[str, Any]]) -> list[GpuRow]:
    """Return the rows among JSON objects, which are the objects with a contender."""
    return [GpuRow(**record) for record in records if "contender" in record]


def lines_of_rows(rows: Sequence[GpuRow]) -> Iterator[str]:
    """Yield a line per shape, then lines of packing overhead, memory, variants and refusals."""
    matches: dict[tuple[str, str], list[GpuRow]] = {}
    for row in rows:
        matches.setdefault((row.series, row.label), []).append(row)
    yield from map(line, matches.values())
    yield from _varlen_lines(matches)
    yield from _memory_lines(rows)
    yield from _variant_lines(matches)
    refused = {(row.contender, row.refused) for row in rows if row.refused}
    yield from (f"not timed: {name}: {reason[:90]}" for name, reason in sorted(refused))


def _varlen_lines(matches: Matches) -> Iterator[str]:
    """Yield by how many percent packed attention of equal lengths takes longer than dense."""
    for (series, label), rows in matches.items():
        dense = fastest(row for row in rows if row.contender.endswith("layout=dense"))
        packed = fastest(row for row in rows if row.contender.endswith("*"))
        if dense and dense.seconds and packed and packed.seconds:
            over = packed.seconds / dense.seconds - 1
            comparison = "within" if over <= VARLEN_OVERHEAD else "OVER"
            yield f"varlen over dense: {series} {label}: {100 * over:+.1f} %, {comparison} 3 %"


def _memory_lines(rows: Sequence[GpuRow]) -> Iterator[str]:
    """Yield the peak memory of each loss, and its share of the peak of eager PyTorch."""
    eager = {
        (row.series, row.label): row.peak_bytes for row in rows if row.contender == "torch eager"
    }
    for row in rows:
        if not row.peak_bytes:
            continue
        all_logits = eager.get((row.series, row.label))
        share = f", {row.peak_bytes / all_logits:.2f} of torch eager's" if all_logits else ""
        wanted = f" (goal {CROSS_ENTROPY_MEMORY})" if row.ours else ""
        mib = row.peak_bytes / 2**20
        yield f"peak: {row.label} {row.contender}: {mib:,.0f} MiB{share}{wanted}"


def _variant_lines(matches: Matches) -> Iterator[str]:
    """Yield the times of the forced variants, which show the best choice for each shape."""
    for (series, label), rows in matches.items():
        forced = [
            f"{row.contender} {row.seconds * 1e6:.1f} µs"
            for row in rows
            if row.seconds and "path=" in row.contender
        ]
        if len(forced) > 1:
            yield f"variants: {series} {label}: {', '.join(forced)}"


def print_table(folder: Path, results: Sequence[Mapping[str, object]]) -> None:
    for result in results:
        for text in lines_of(folder, str(result["section"])):
            print(text)
    print(f"{'section':<18} {'result':<22} seconds")
    for result in results:
        outcome = "ok" if result["status"] == 0 else f"FAILED, exit status {result['status']}"
        print(f"{result['section']:<18} {outcome:<22} {result['seconds']}")
