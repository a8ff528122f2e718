"""The JSONL log of a run, and the curves that are drawn from the log."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastbert import json_file
from fastbert.atomic_file import write_atomically
from fastbert.file_size import check_file
from fastbert.picture import picture

LOG, CURVES = "log.jsonl", "curves.png"
# The largest size of a log, in bytes. A log of a million rows has 300 MB.
MOST_BYTES = 1 << 32

LogRow = dict[str, Any]


class RunLog:
    """A log with one JSON object per line; each row is written at once, without a buffer.

    If a write raises OSError, as on a full disk, the next write continues at the same byte.

    Attributes:
        path: Path of the log.
        rows: All rows, whether they could be written or not.
    """

    def __init__(self, path: Path, rows: Sequence[LogRow] = ()) -> None:
        """Create the file, or replace it if it exists.

        Args:
            path: Path of the log.
            rows: The rows of the earlier part of a resumed run, with which the file begins.
        """
        self.path = path
        self.rows = list(rows)
        if self.rows:
            # If the process is killed here, the file has either its complete old content or its
            # complete new content.
            content = b"".join(map(_line, self.rows))
            write_atomically(path, lambda temporary: temporary.write_bytes(content))
        self._file = path.open("ab" if self.rows else "wb", buffering=0)
        self._unwritten = b""

    def write(self, **row: Any) -> None:
        """Add one row; raise OSError if it cannot be written."""
        self.rows.append(row)
        self._unwritten += _line(row)
        self._flush()

    def close(self) -> None:
        """Write the remaining bytes and close the file; raise OSError if they cannot be written."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def _line(row: LogRow) -> bytes:
    return json.dumps(row).encode() + b"\n"


def rows_until(path: Path, step: int) -> list[LogRow]:
    """Return the rows of the first `step` steps; an incomplete last line is left out.

    The result is empty if there is no log.

    Raises:
        ValueError: If another line is damaged. The message names the file and the line.
    """
    if not path.exists():
        return []
    check_file(path, MOST_BYTES)
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [row for row in _parsed(path, whole, resumed=True) if row["step"] <= step]


def read_log(path: str | os.PathLike[str]) -> list[LogRow]:
    """Read the rows of a log that `RunLog` wrote.

    Raises:
        ValueError: If a line is damaged. The message names the file and the line.
    """
    check_file(Path(path), MOST_BYTES)
    return _parsed(Path(path), Path(path).read_bytes().removesuffix(b"\n"), resumed=False)


def _parsed(path: Path, content: bytes, *, resumed: bool) -> list[LogRow]:
    """Return the rows of a log; with `resumed`, every row must have a step and an event."""
    rows = []
    for number, line in enumerate(content.split(b"\n") if content else (), 1):
        try:
            row = json_file.parse(line.decode())
            if not isinstance(row, dict):
                raise TypeError("a row is an object")
            if resumed and (type(row["step"]) is not int or not isinstance(row["event"], str)):
                raise TypeError("a row has the number of its step and the name of its event")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: got {line!r:.80}, allowed: a row of the log as JSON; "
                "without this line, the run can continue"
            ) from error
        rows.append(row)
    return rows


# The curves of a pre-training run have these panels. A key is the name of a figure in the rows of
# the log, and its value is the title of the panel.
PANELS = {
    "mlm_loss": "masked-LM loss (nats)",
    "mlm_accuracy": "masked-LM accuracy",
    "nsp_loss": "next-sentence loss (nats)",
    "nsp_accuracy": "next-sentence accuracy",
}
# For each value of the option `objective`, the task to which the figures with the prefix "nsp"
# belong.
PAIR_TASKS = {"nsp": "next-sentence", "sop": "sentence-order"}
BASELINE = "mlm_baseline_accuracy"


def panels_of(objective: str) -> dict[str, str]:
    """Return the panels of ``curves.png`` for a value of ``PretrainOptions.objective``."""
    task = PAIR_TASKS.get(objective)
    if task is None:
        return {name: title for name, title in PANELS.items() if not name.startswith("nsp")}
    return {name: title.replace("next-sentence", task) for name, title in PANELS.items()}


def plot_curves(rows: list[LogRow], path: Path, panels: Mapping[str, str] = PANELS) -> None:
    """Draw the curves of a log: a panel for each figure, with the step on the horizontal axis.

    Args:
        rows: The rows of the log. A row without the figure of a panel gives no point in that panel.
            The last row whose entry ``best`` is True, and a row with the event ``"stop"``, are
            marked by vertical lines.
        path: The PNG file, which appears complete or not at all.
        panels: The title of each panel by the name of its figure. The number of panels must be
            even.
    """
    lines = len(panels) // 2
    with picture(path, 11, 3.5 * lines) as figure:
        for axes, (name, title) in zip(figure.subplots(lines, 2).flat, panels.items(), strict=True):
            _draw_panel(axes, rows, name)
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()


def _draw_panel(axes: Any, rows: list[LogRow], name: str) -> None:
    for event, style in (("train", "C0-"), ("evaluation", "C1o--")):
        chosen = [row for row in rows if row["event"] == event and name in row]
        points = [(row["step"], row[name]) for row in chosen]
        if points:
            label = "training" if event == "train" else "held-out"
            axes.plot(*zip(*points, strict=True), style, label=label)
    baselines = [row[BASELINE] for row in rows if BASELINE in row]
    if name == "mlm_accuracy" and baselines:
        axes.axhline(baselines[-1], color="gray", linestyle=":", label="most frequent token")
    for step, label, style in _marks(rows):
        axes.axvline(step, color="black", linewidth=1.2, linestyle=style, label=label)


def _marks(rows: list[LogRow]) -> list[tuple[int, str, str]]:
    """Return the step, the label and the line style of each vertical line of the curves."""
    best = [row["step"] for row in rows if row.get("best") is True]
    stops = [row["step"] for row in rows if row["event"] == "stop"]
    return [
        *((step, f"best (step {step})", ":") for step in best[-1:]),
        *((step, f"stopped early (step {step})", "-.") for step in stops),
    ]
