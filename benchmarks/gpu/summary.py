"""The summary of a run: ``summary.json``, and a table that is printed last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.contest import is_variant
from fastbert.bench.limits import CROSS_ENTROPY_MEMORY, VARLEN_OVERHEAD
from fastbert.bench.machine import describe

NAME = "summary.json"
# Series and label → the rows of one match.
Matches = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def write(folder: Path, results: Sequence[Mapping[str, object]]) -> None:
    """Add these sections to the summary of the folder, which keeps those of earlier runs."""
    path = folder / NAME
    known: dict[str, Any] = {}
    if path.exists():
        known = {s["section"]: s for s in json.loads(path.read_text("utf-8"))["sections"]}
    for result in results:
        section = str(result["section"])
        known[section] = {**result, "table": list(lines_of(folder, section))}
    content = {"machine": asdict(describe()), "sections": list(known.values())}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lines_of(folder: Path, section: str) -> Iterator[str]:
    """Yield a line per shape of a benchmark section: fastbert, the best peer, ratio and goal."""
    path = folder / f"{section}.json"
    if not section.startswith("bench-") or not path.exists():
        return
    content = json.loads(path.read_text("utf-8"))
    rows = content["rows"]
    matches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        matches.setdefault((row["series"], row["label"]), []).append(row)
    for (series, label), found in matches.items():
        yield _line(series, label, found)
    yield from _varlen_lines(matches)
    yield from _memory_lines(rows)
    yield from _variant_lines(matches)
    refused = {(r["contender"], r["refused"]) for r in rows if "refused" in r}
    yield from (f"not timed: {name}: {reason[:90]}" for name, reason in sorted(refused))


def _line(series: str, label: str, rows: Sequence[Mapping[str, Any]]) -> str:
    ours = best(r for r in rows if r["ours"] and not is_variant(r["contender"]))
    theirs = best(r for r in rows if not r["ours"] and r["same_function"])
    text = f"{series[:30]:<30} {label[:28]:<28}"
    if ours is None:
        return f"{text} no contender of fastbert was timed"
    text += f" {ours['seconds'] * 1e6:>9.1f} µs {ours['rate']:>10,.4g} {ours['unit']:<11}"
    if theirs is not None:
        ratio = theirs["seconds"] / ours["seconds"]
        wanted = f" of {ours['ratio_goal']:g}" if "ratio_goal" in ours else ""
        text += f" {ratio:>5.2f}×{wanted} {theirs['contender']}"
    if "of_floor" in ours:
        text += f", {100 * ours['of_floor']:.0f} % of the limit"
    if "of_goal" in ours:
        text += f", {100 * ours['of_goal']:.0f} % of the goal"
    return text


def best(rows: Iterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    timed = [row for row in rows if row.get("seconds") is not None]
    return min(timed, key=lambda row: row["seconds"], default=None)


def _varlen_lines(matches: Matches) -> Iterator[str]:
    """Yield the time of packed attention of equal lengths over that of dense attention."""
    for (series, label), rows in matches.items():
        dense = best(r for r in rows if r["contender"].endswith("layout=dense"))
        packed = best(r for r in rows if r["contender"].endswith("*"))
        if dense and packed:
            over = packed["seconds"] / dense["seconds"] - 1
            verdict = "within" if over <= VARLEN_OVERHEAD else "OVER"
            yield f"varlen over dense: {series} {label}: {100 * over:+.1f} %, {verdict} 3 %"


def _memory_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the peak memory of the loss, beside that of PyTorch with the logits of all tokens."""
    for row in rows:
        if not row.get("peak_bytes"):
            continue
        eager = next(
            (
                r["peak_bytes"]
                for r in rows
                if r["label"] == row["label"] and r["contender"] == "torch eager"
                and r["series"] == row["series"] and r.get("peak_bytes")
            ),
            None,
        )  # fmt: skip
        share = f", {row['peak_bytes'] / eager:.2f} of torch eager's" if eager else ""
        wanted = f" (goal {CROSS_ENTROPY_MEMORY})" if row["ours"] else ""
        mib = row["peak_bytes"] / 2**20
        yield f"peak: {row['label']} {row['contender']}: {mib:,.0f} MiB{share}{wanted}"


def _variant_lines(matches: Matches) -> Iterator[str]:
    """Yield the times of the forced variants, from which the heuristics should choose."""
    for (series, label), rows in matches.items():
        forced = [r for r in rows if r.get("seconds") and "path=" in r["contender"]]
        if len(forced) > 1:
            text = ", ".join(f"{r['contender']} {r['seconds'] * 1e6:.1f} µs" for r in forced)
            yield f"variants: {series} {label}: {text}"


def print_table(folder: Path, results: Sequence[Mapping[str, object]]) -> None:
    for result in results:
        for text in lines_of(folder, str(result["section"])):
            print(text)
    print(f"{'section':<18} {'verdict':<22} seconds")
    for result in results:
        verdict = "ok" if result["status"] == 0 else f"FAILED, exit status {result['status']}"
        print(f"{result['section']:<18} {verdict:<22} {result['seconds']}")
