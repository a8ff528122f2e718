"""Trackers, which show the rows of the log in tools such as TensorBoard."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.training.log import LogRow

if TYPE_CHECKING:
    from accelerate import Accelerator

# For each tracker of accelerate, the packages of which one must be installed.
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


def require_tracker(name: str | None) -> None:
    """Raise ImportError if the tracker `name` needs a package that is not installed."""
    if name is not None and not any(find_spec(package) for package in TRACKERS[name]):
        package = TRACKERS[name][-1]
        raise ImportError(f"tracker: {name} needs {package}: pip install {package}", name=package)


class Tracker:
    """Sends the rows of a log to a tracker of accelerate.

    The name of a figure begins with the event of its row, as in ``train/mlm_loss``.
    """

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        folder: Path,
        *,
        step: int,
        settings: dict[str, Any],
    ) -> None:
        """Start the tracker.

        Args:
            name: Name of the tracker.
            accelerator: The accelerator, which was created with the name of the tracker.
            folder: Folder of the run. TensorBoard's files are in its folder ``tensorboard``.
            step: Number of steps that were made before the run was resumed; TensorBoard hides rows
                of later steps, which an interrupted run has sent.
            settings: Options of the run, as values of JSON.
        """
        self.name, self._accelerator = name, accelerator
        project = {"tensorboard": "tensorboard", "wandb": "fastbert"}[name]
        keywords: dict[str, dict[str, Any]] = {
            # A queue without a limit never blocks a write, even if a full disk ended the thread
            # that empties the queue.
            "tensorboard": {"purge_step": step + 1, "max_queue": 0},
            "wandb": {"dir": str(folder), "name": folder.name, "config": settings},
        }
        folder.mkdir(parents=True, exist_ok=True)
        accelerator.init_trackers(project, init_kwargs=keywords)

    def write(self, row: LogRow) -> None:
        """Send the figures of a row."""
        figures = {
            f"{row['event']}/{name}": value
            for name, value in row.items()
            if name not in ("event", "step")
        }
        self._accelerator.log(figures, step=row["step"])

    def close(self) -> None:
        """Send the remaining figures, and end the tracker."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
