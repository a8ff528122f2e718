"""Plots of the speeds that ``fastbert bench`` or a section of ``benchmarks/`` has measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastbert.bench.contest import is_as_exact
from fastbert.bench.encoder import EncoderRow
from fastbert.bench.limits import FORWARD
from fastbert.bench.operations import OpRow
from fastbert.machine import Machine
from fastbert.picture import literal, picture

OURS, PEERS = "#2a6fbb", "#b0b0b0"


def plot_bench(
    path: Path, operations: Sequence[OpRow], encoder: Sequence[EncoderRow], machine: Machine
) -> None:
    """Draw the timed rows into ``path``, a PNG, SVG or PDF by its suffix.

    The left panel has the encoder in real tokens per second. The right panel has the speedup of
    each operation's forward pass over stock PyTorch.

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
    """Draw the rows of a benchmark section: a panel per series, and two bars per row of fastbert.

    The rows come from ``contest.to_dict``. Rows without a time are left out. The first bar is the
    rate of fastbert, with the quotient of this rate and the rate of the second bar. The second bar
    is the peer with the highest rate among the peers whose dtype is at least as exact. Dots are the
    other peers. A line across the first bar marks the goal, if the row has the entry "goal".

    Raises:
        ImportError: If matplotlib is not installed.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("rate") is not None:
            panels.setdefault(f"{row['series']}, {row['unit']}", []).append(row)
    heights = [0.5 + 0.36 * sum(row["ours"] for row in panel) for panel in panels.values()]
    head = 1.1
    with _picture(path, 8.5, head + sum(heights, 0.7 * len(heights)), 110) as figure:
        if panels:
            grid = figure.subplots(
                len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
            )
            for axes, (title, panel) in zip(grid.flat, panels.items(), strict=True):
                _draw_pairs(axes, title, panel)
        _head(figure, machine, 110)


def _peers_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the peers of a row whose dtype is at least as exact, the fastest peer first."""
    peers = [
        peer
        for peer in rows
        if not peer["ours"]
        and peer["label"] == row["label"]
        and is_as_exact(peer["dtype"], than=row["dtype"])
    ]
    return sorted(peers, key=lambda peer: peer["seconds"])


def _draw_pairs(axes: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    ours = [row for row in rows if row["ours"]]
    longest = max(row["rate"] for row in rows)
    for place, row in enumerate(ours):
        axes.barh(place - 0.17, row["rate"], height=0.36, color=OURS)
        peers, note = _peers_of(row, rows), f"{row['rate']:,.4g}"
        if peers:
            note = f"{peers[0]['seconds'] / row['seconds']:.2f} ×"
            best = peers[0]["rate"]
            axes.barh(place + 0.19, best, height=0.28, color=PEERS)
            name = literal(peers[0]["contender"])
            axes.annotate(
                name, (best, place + 0.19), (4, 0), textcoords="offset points", va="center",
                fontsize=7, color="dimgray",
            )  # fmt: skip
            rates = [peer["rate"] for peer in peers[1:]]
            axes.scatter(rates, [place + 0.19] * len(rates), s=9, color="white", zorder=3)
        axes.annotate(
            note, (row["rate"], place - 0.17), (4, 0), textcoords="offset points", va="center",
            fontsize=8, weight="bold", color=OURS,
        )  # fmt: skip
        if row.get("goal"):
            axes.plot([row["goal"]] * 2, [place - 0.4, place + 0.06], color="black", linewidth=1.5)
    series = f"{rows[0]['series']} "
    engines = [row["contender"].removeprefix("fastbert ") for row in ours]
    labels = [row["label"].removeprefix(series) for row in ours]
    names = [f"{label}, {engine}" for label, engine in zip(labels, engines, strict=True)]
    axes.set_yticks(range(len(ours)), list(map(literal, names)), fontsize=8)
    axes.set_ylim(len(ours) - 0.5, -0.6)
    axes.set_xlim(0, 1.22 * longest)
    key = "blue: fastbert; grey: the fastest peer; white dots: other peers"
    axes.set_title(f"{literal(title)} ({key})", fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _picture(path: Path, width: float, height: float, dpi: int) -> AbstractContextManager[Any]:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'fastbert[train]'") from error
    return picture(path, width, height, dpi=dpi)


def _head(figure: Any, machine: Machine, width: int) -> None:
    """Write the description of the machine above the panels, in lines of ``width`` characters."""
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
    colors = [OURS if ": fastbert" in label else PEERS for label in labels]
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
