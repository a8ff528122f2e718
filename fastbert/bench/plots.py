"""Plots of the speed: bars of ``fastbert bench``, and lines of a section of ``benchmarks/``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastbert.bench.encoder import EncoderRow
from fastbert.bench.limits import FORWARD
from fastbert.bench.operations import OpRow
from fastbert.machine import Machine
from fastbert.picture import literal, picture

OURS, THEIRS = "#2a6fbb", "#b0b0b0"


def plot_bench(
    path: Path, operations: Sequence[OpRow], encoder: Sequence[EncoderRow], machine: Machine
) -> None:
    """Draw the timed rows into ``path``, a PNG, SVG or PDF by its suffix.

    The left panel has the encoder in real tokens per second. The right panel has the speed of the
    forward pass of each operation over stock PyTorch.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    panels = [panel for panel in (_encoder_bars(encoder), _operation_bars(operations)) if panel]
    tallest = max((len(bars) for _, _, bars in panels), default=1)
    with _picture(path, 7.5 * max(1, len(panels)), 1.6 + 0.27 * tallest, 130) as figure:
        for axes, (title, unit, bars) in zip(
            figure.subplots(1, max(1, len(panels)), squeeze=False).flat, panels, strict=False
        ):
            _draw(axes, title, unit, bars)
        _head(figure, machine, 95 * max(1, len(panels)))


def plot_matches(path: Path, rows: Sequence[Mapping[str, Any]], machine: Machine) -> None:
    """Draw the rows of a benchmark section: a panel per series, and a line per engine.

    The rows are records of ``contest.to_dict``. Rows without a time are left out. The x-axis has
    the shapes, and a dash marks the goal.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("rate") is not None:
            panels.setdefault(f"{row['series']}, {row['unit']}", []).append(row)
    columns = 2 if len(panels) > 1 else 1
    lines = -(-max(1, len(panels)) // columns)
    with _picture(path, 8.5 * columns, 1.0 + 3.4 * lines, 100) as figure:
        grid = figure.subplots(lines, columns, squeeze=False).flat
        for axes, (title, found) in zip(grid, panels.items(), strict=False):
            _draw_lines(axes, title, found)
        for axes in list(grid)[len(panels) :]:
            axes.set_visible(False)
        _head(figure, machine, 110 * columns)


def _draw_lines(axes, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib import colormaps

    labels = list(dict.fromkeys(row["label"] for row in rows))
    engines = list(dict.fromkeys(row["contender"] for row in rows))
    # The default cycle has too few colours for all engines. Strong colours of tab20 come first.
    strong_first = [*range(0, 20, 2), *range(1, 20, 2)]
    axes.set_prop_cycle(color=colormaps["tab20"](strong_first))
    for engine in engines:
        found = [row for row in rows if row["contender"] == engine]
        is_ours = found[0]["ours"]
        axes.plot(
            [labels.index(row["label"]) for row in found],
            [row["rate"] for row in found],
            marker="o" if is_ours else "x",
            linewidth=2.0 if is_ours else 1.0,
            label=literal(engine),
        )
    goals = {labels.index(row["label"]): row["goal"] for row in rows if row.get("goal")}
    if goals:
        axes.scatter(
            list(goals), list(goals.values()), marker="_", s=400, color="black", label="goal"
        )
    wrapped = ["\n".join(map(literal, textwrap.wrap(label, 14))) for label in labels]
    axes.set_xticks(range(len(labels)), wrapped, fontsize=6)
    axes.set_ylim(bottom=0)
    axes.set_title(literal(title), fontsize=9)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _picture(path: Path, width: float, height: float, dpi: int) -> AbstractContextManager[Any]:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'fastbert[train]'") from error
    return picture(path, width, height, dpi=dpi)


def _head(figure: Any, machine: Machine, width: int) -> None:
    """Write the machine above the panels, in lines of ``width`` characters."""
    header = [piece for line in machine.lines() for piece in textwrap.wrap(line, width)]
    figure.suptitle("\n".join(map(literal, header)), fontsize=8, color="dimgray")


Bar = tuple[str, float, str]  # label, length, text at the end of the bar


def _encoder_bars(rows: Sequence[EncoderRow]) -> tuple[str, str, list[Bar]] | None:
    bars = [
        (
            f"{row.shape}, {row.dtype}: {row.engine}",
            row.tokens_per_second,
            f"{row.tokens_per_second:,.0f}" + (f" ({row.speedup:.2f}×)" if row.speedup else ""),
        )
        for row in rows
        if row.tokens_per_second
    ]
    title = "encoder, real tokens/s (× = speed over the fastest transformers path)"
    return (title, "tokens/s", bars) if bars else None


def _operation_bars(rows: Sequence[OpRow]) -> tuple[str, str, list[Bar]] | None:
    bars = [
        (f"{row.op} {row.case}, {row.dtype}: {row.engine}", row.speedup, f"{row.speedup:.2f}×")
        for row in rows
        if row.speedup and row.direction == FORWARD and row.engine.startswith("fastbert")
    ]
    return ("operations, forward: speed over stock PyTorch", "×", bars) if bars else None


def _draw(axes, title: str, unit: str, bars: Sequence[Bar]) -> None:
    labels, lengths, notes = zip(*bars, strict=True)
    colors = [OURS if ": fastbert" in label else THEIRS for label in labels]
    drawn = axes.barh(range(len(bars)), lengths, color=colors)
    axes.bar_label(drawn, notes, padding=3, fontsize=7)
    axes.set_yticks(range(len(bars)), list(map(literal, labels)), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, max(lengths) * 1.25)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if unit == "×":
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
