"""The output of a run other than its model: the log, the curves and the messages to the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert.training.attempts import Attempts
from fastbert.training.log import CURVES, LOG, RunLog, plot_curves
from fastbert.training.progress import TrainingProgress
from fastbert.training.trackers import Tracker


@dataclass(frozen=True)
class Record:
    """The output of a run other than its model.

    Attributes:
        folder: Folder of the run.
        log: The log; None in all processes but the first.
        progress: Shows the steps to the user.
        attempt: Writes files, and stores the errors of failed writes.
        panels: The title of each panel of the curves by the name of its figure.
        tracker: Also receives the rows of the log; None if the run has no tracker.
    """

    folder: Path
    log: RunLog | None
    progress: TrainingProgress
    attempt: Attempts
    panels: Mapping[str, str]
    tracker: Tracker | None = None

    def write(self, row: dict[str, Any]) -> None:
        """Add a row to the log, and send it to the tracker if there is one."""
        log = self.log
        if log is not None:
            self.attempt(LOG, lambda: log.write(**row))
        tracker = self.tracker
        if tracker is not None:
            self.attempt(tracker.name, lambda: tracker.write(row))

    def close(self) -> None:
        """Close the log and the tracker, and draw the curves."""
        if self.tracker is not None:
            self.attempt(self.tracker.name, self.tracker.close)
        log = self.log
        if log is not None:
            self.attempt(LOG, log.close)
            curves = self.folder / CURVES
            self.attempt.draw(CURVES, lambda: plot_curves(log.rows, curves, self.panels))

    def kept(self, saved: int) -> str:
        """Return the names of the files that were written and the last checkpoint, for messages.

        Args:
            saved: Step of the last checkpoint; 0 means that there is none.
        """
        last = f"the checkpoint of step {saved}" if saved else "no checkpoint (see save_every)"
        written = (name for name in (LOG, CURVES) if name not in self.attempt.failures)
        return ", ".join([*written, last])
