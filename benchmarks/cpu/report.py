"""The results of a run: a JSON file per section, a plot per contest, and one Markdown page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import accuracy, breakdown, tiles
from fastbert import json_file
from fastbert.bench.plots import plot_matches
from fastbert.machine import Machine

PAGE = "cpu.md"
CONTESTS = ("bert-base", "minilm", "training")
ORDER = ("tiles", *CONTESTS, "breakdown", "int8")


def write(folder: Path, content: Mapping[str, Any], machine: Machine) -> None:
    """Add a section to the folder; the page also has the sections of earlier runs."""
    section = content["section"]
    json_file.write(folder / f"{section}.json", content, json_file.record)
    if section in CONTESTS:
        try:
            plot_matches(folder / f"{section}.png", content["rows"], machine)
        except ImportError as error:
            print(f"There is no plot: {error}")
    (folder / PAGE).write_text("\n".join(page(folder)) + "\n", encoding="utf-8")


def page(folder: Path) -> Iterator[str]:
    """Yield the lines of all sections in the folder.

    The page begins with the header of the first section. A section has its own header only if it
    differs.
    """
    yield "# fastbert and its peers on the CPU"
    paths = [path for section in ORDER if (path := folder / f"{section}.json").exists()]
    contents = [json.loads(path.read_text("utf-8")) for path in paths]
    yield from _header(contents[0])
    for content in contents:
        section = content["section"]
        yield ""
        yield f"## {section}"
        if content["header"] != contents[0]["header"]:
            yield from _header(content)
        if section in CONTESTS:
            yield from contest_lines(content["rows"])
        elif section == "breakdown":
            yield from breakdown.lines(content["rows"])
        elif section == "tiles":
            yield from tiles.lines(content)
        else:
            yield ""
            yield from accuracy.lines(content["result"])


def _header(content: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    for text in content["header"]:
        yield f"- {text}"


def contest_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of floors and goals, then the table of all implementations at all shapes.

    An implementation that was refused at every shape for the same reason is not in the tables. It
    has one line below them.
    """
    claims = [row for row in rows if row["ours"] and "ratio_floor" in row]
    if claims:
        yield ""
        yield "| shape | ours | ratio | against | floor | goal |"
        yield "|---|---|---|---|---|---|"
        for row in claims:
            ratio, against = row.get("ratio"), row.get("against", "no peer was timed")
            shown = "–" if ratio is None else f"{ratio:.2f}"
            yield (
                f"| {row['label']} | {row['contender']} | {shown} | {against} | "
                f"{_met(ratio, row['ratio_floor'])} | {_met(ratio, row.get('ratio_goal'))} |"
            )
    yield ""
    yield (
        "| shape | engine | median ms | p10–p90 ms | samples | rate | TFLOP/s | "
        "share of the limit | ratio | ratio to the best peer | peak MiB | "
        "largest error of an embedding | rank correlation | same nearest | note |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    absent = _absent(rows)
    for row in rows:
        if row["contender"] not in absent:
            yield _row(row)
    if absent:
        yield ""
        for engine, reason in absent.items():
            yield f"- {engine}: {reason}"


def _absent(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the reason of each implementation that was refused at all shapes for one reason."""
    reasons: dict[str, set[str | None]] = {}
    for row in rows:
        reasons.setdefault(row["contender"], set()).add(row.get("refused"))
    return {
        engine: reason
        for engine, found in reasons.items()
        if len(found) == 1 and (reason := next(iter(found))) is not None
    }


def _met(ratio: float | None, wanted: float | None) -> str:
    if wanted is None:
        return ""
    return f"{wanted:g}: {'met' if ratio is not None and ratio >= wanted else '**not met**'}"


def _row(row: Mapping[str, Any]) -> str:
    label = f"{row['label']}, {row['dtype']}" if row["direction"] == "training" else row["label"]
    start = f"| {label} | {row['contender']} |"
    if "seconds" not in row:
        return f"{start} | | | | | | | | | | | | {row.get('refused', '')} |"

    def shown(key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    def size(key: str) -> str:
        return f"{row[key] / 2**20:,.0f}" if row.get(key) is not None else ""

    return (
        f"{start} {1e3 * row['seconds']:.2f} | {1e3 * row['p10']:.2f}–{1e3 * row['p90']:.2f} | "
        f"{row['samples']} | {row['rate']:,.4g} {row['unit']} | {row['tflops']:.3f} | "
        f"{100 * row['of_measured_floor']:.0f} % | {shown('ratio', '.2f')} | "
        f"{shown('best_ratio', '.2f')} | {size('peak_bytes')} | "
        f"{shown('embedding_error', '.1e')} | {shown('rank_correlation', '.5f')} | "
        f"{shown('same_nearest', '.1%')} | "
        f"{row.get('note', '')} |"
    )
