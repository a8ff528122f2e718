"""The speed figures as bars: one panel per shape, fastbert beside its peers, losses included."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from fastbert.testing.bench import FORWARD, OpRow
from fastbert.testing.bench_encoder import EncoderRow
from fastbert.testing.machine import Machine

OURS, THEIRS = "#2a6fbb", "#b0b0b0"


def plot_bench(
    path: Path, operations: Sequence[OpRow], encoder: Sequence[EncoderRow], machine: Machine
) -> None:
    """Draws the timed rows into ``path`` (PNG, SVG or PDF by its suffix).

    Left: the encoder in real tokens per second. Right: speedup of each operation's forward pass
    over stock PyTorch. Raises ImportError naming the extra when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'fastbert[train]'") from error

    panels = [panel for panel in (_encoder_bars(encoder), _operation_bars(operations)) if panel]
    tallest = max((len(bars) for _, _, bars in panels), default=1)
    figure = Figure(figsize=(7.5 * max(1, len(panels)), 1.6 + 0.27 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, unit, bars) in zip(
        figure.subplots(1, max(1, len(panels)), squeeze=False).flat, panels, strict=False
    ):
        _draw(axes, title, unit, bars)
    width = 95 * max(1, len(panels))  # characters of the header's font in one line
    header = [piece for line in machine.lines() for piece in textwrap.wrap(line, width)]
    figure.suptitle("\n".join(header), fontsize=8, color="dimgray")
    figure.savefig(path, dpi=130)


Bar = tuple[str, float, str]  # label, length, what is written at its end


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
    title = "encoder, real tokens/s (× the fastest transformers path)"
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
    axes.set_yticks(range(len(bars)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, max(lengths) * 1.25)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if unit == "×":
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
