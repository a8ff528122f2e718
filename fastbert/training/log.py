"""The record of a run: a JSONL log, and the curves drawn from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LogRow = dict[str, Any]


class RunLog:
    """Writes one JSON object per line to ``path``, at once, and keeps the rows.

    When a write raises OSError, as on a full disk, the next one continues where it ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[LogRow] = []
        self._file = path.open("wb", buffering=0)
        self._unwritten = b""

    def write(self, **row: Any) -> None:
        self.rows.append(row)
        self._unwritten += json.dumps(row).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def read_log(path: str | os.PathLike[str]) -> list[LogRow]:
    """The rows of a log written by :class:`RunLog`."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def plot_curves(rows: list[LogRow], path: Path) -> None:
    """Draws losses, accuracies and learning rate against the step into the PNG ``path``."""
    # The object interface with Agg needs no display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {
        "mlm_loss": "masked-LM loss (nats)",
        "mlm_accuracy": "masked-LM accuracy",
        "nsp_loss": "next-sentence loss (nats)",
        "nsp_accuracy": "next-sentence accuracy",
    }
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for event, style in (("train", "-"), ("evaluation", "o--")):
            points = [(row["step"], row[name]) for row in rows if row["event"] == event]
            if points:
                label = "training" if event == "train" else "held-out"
                axes.plot(*zip(*points, strict=True), style, label=label)
        baselines = [row["mlm_baseline_accuracy"] for row in rows if row["event"] == "evaluation"]
        if name == "mlm_accuracy" and baselines:
            axes.axhline(baselines[-1], color="gray", linestyle=":", label="most frequent token")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    partial = path.with_suffix(".partial.png")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
