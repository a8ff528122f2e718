"""The results of a run: a JSON file and a Markdown page per section, and a plot per contest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu import accuracy, arrivals, breakdown, tasks, tiles
from fastbert import json_file
from fastbert.bench.plots import plot_matches
from fastbert.machine import Machine

CONTESTS = (*tasks.TASKS, "minilm", "bert-base", "training")
ORDER = (*CONTESTS, "arrivals", "tiles", "breakdown", "int8")


def write(folder: Path, content: Mapping[str, Any], machine: Machine) -> None:
    """Write the files of a section: its JSON file, its page and, for a contest, its plot."""
    section = content["section"]
    json_file.write(folder / f"{section}.json", content, json_file.record)
    if section in CONTESTS:
        try:
            plot_matches(folder / f"{section}.png", content["rows"], machine)
        except ImportError as error:
            print(f"There is no plot: {error}")
    (folder / f"{section}.md").write_text("\n".join(page(content)) + "\n", encoding="utf-8")


def page(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section's page: the machine and the versions, then the figures."""
    section = content["section"]
    yield f"# {section}: fastbert and its peers on the CPU"
    yield ""
    for text in content["header"]:
        yield f"- {text}"
    if section in CONTESTS:
        yield from contest_lines(content["rows"])
    elif section == "arrivals":
        yield from arrivals.lines(content["rows"])
    elif section == "breakdown":
        yield from breakdown.lines(content["rows"])
    elif section == "tiles":
        yield from tiles.lines(content)
    else:
        yield ""
        yield from accuracy.lines(content["result"])


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
    columns = [c for c in COLUMNS if not c.optional or any(c.has(row) for row in rows)]
    yield f"| shape | engine | {' | '.join(column.head for column in columns)} | note |"
    yield f"|---|---{'|---' * len(columns)}|---|"
    absent = _absent(rows)
    for row in rows:
        if row["contender"] not in absent:
            yield _row(row, columns)
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


class Column(NamedTuple):
    """A column of the table: its head, the fields of a row that it shows, and their text.

    An optional column is left out if no row can fill it.
    """

    head: str
    fields: tuple[str, ...]
    text: Callable[..., str]
    optional: bool = False

    def has(self, row: Mapping[str, Any]) -> bool:
        return "seconds" in row and all(row.get(key) is not None for key in self.fields)


COLUMNS = (
    Column("median ms", ("seconds",), lambda seconds: f"{1e3 * seconds:.2f}"),
    Column("p10–p90 ms", ("p10", "p90"), lambda low, high: f"{1e3 * low:.2f}–{1e3 * high:.2f}"),
    Column("samples", ("samples",), str),
    Column("rate", ("rate", "unit"), lambda rate, unit: f"{rate:,.4g} {unit}"),
    Column("TFLOP/s", ("tflops",), "{:.3f}".format),
    Column("share of the limit", ("of_measured_floor",), lambda share: f"{100 * share:.0f} %"),
    Column("ratio", ("ratio",), "{:.2f}".format),
    Column("ratio to the best peer", ("best_ratio",), "{:.2f}".format),
    Column("ratio to stock fp32", ("stock_ratio",), "{:.2f}".format, optional=True),
    Column("peak MiB", ("peak_bytes",), lambda peak: f"{peak / 2**20:,.0f}"),
    Column("largest error of an embedding", ("embedding_error",), "{:.1e}".format, optional=True),
    Column("rank correlation", ("rank_correlation",), "{:.5f}".format, optional=True),
    Column("same nearest", ("same_nearest",), "{:.1%}".format, optional=True),
    Column("largest error of a score", ("score_error",), "{:.1e}".format, optional=True),
    Column("largest error of a loss", ("loss_error",), "{:.1e}".format, optional=True),
)


def _row(row: Mapping[str, Any], columns: Sequence[Column]) -> str:
    label = f"{row['label']}, {row['dtype']}" if row["direction"] == "training" else row["label"]
    start = f"| {label} | {row['contender']} |"
    if "seconds" not in row:
        return f"{start}{' |' * len(columns)} {row.get('refused', '')} |"
    cells = [
        column.text(*(row[key] for key in column.fields)) if column.has(row) else ""
        for column in columns
    ]
    return f"{start} {' | '.join(cells)} | {row.get('note', '')} |"
