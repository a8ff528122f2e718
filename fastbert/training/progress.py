"""The progress of a run: a bar in a terminal, and one line per logged step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column


def describe(row: dict[str, Any]) -> str:
    """Format the losses, accuracies, learning rate and speed of one training row of the log."""
    reached = f"  {row['utilization']:.0%} of the peak" if "utilization" in row else ""
    return (
        f"mlm {row['mlm_loss']:.3f} ({row['mlm_accuracy']:.1%})  {_pairs(row)}"
        f"lr {row['learning_rate']:.2e}  {row['tokens_per_second'] / 1e3:,.1f}k tokens/s"
        f"{reached}"
    )


def describe_evaluation(figures: dict[str, float]) -> str:
    """Format in one line the figures that `fastbert.training.evaluate` returns."""
    return (
        f"mlm {figures['mlm_loss']:.3f} ({figures['mlm_accuracy']:.1%}, most frequent token "
        f"{figures['mlm_baseline_accuracy']:.1%})  {_pairs(figures)}"
    ).rstrip()


def _pairs(figures: dict[str, Any]) -> str:
    if "nsp_loss" not in figures:
        return ""
    return f"nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})  "


class TrainingProgress:
    """Context manager that shows the progress of a training loop."""

    def __init__(
        self,
        console: Console,
        total: int,
        done: int = 0,
        describe: Callable[[dict[str, Any]], str] = describe,
    ) -> None:
        """Prepare the output.

        Args:
            console: Where progress is shown.
            total: Number of steps.
            done: Number of steps that were made before the run was resumed.
            describe: Formats a training row of the log in one line.
        """
        self._describe = describe
        self._console = console
        self._total = total
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            # By default, rich ends a text that is too long with an ellipsis. Not every encoding has
            # this character, so the text is cut instead.
            cropped = Column(no_wrap=True, overflow="crop")
            self._bar = Progress(
                TextColumn("training", table_column=cropped),
                BarColumn(bar_width=20, table_column=cropped),
                MofNCompleteColumn(table_column=cropped),
                TimeRemainingColumn(table_column=cropped),
                TextColumn("{task.fields[status]}", table_column=cropped),
                console=console,
            )
            self._task = self._bar.add_task("training", total=total, completed=done, status="")

    def __enter__(self) -> TrainingProgress:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()

    def step(self) -> None:
        """Advance the bar by one step."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def report(self, row: dict[str, Any], seconds_left: float) -> None:
        """Show one training row of the log; without a bar, also show the remaining time.

        Args:
            row: The row.
            seconds_left: Estimate of the remaining time, in seconds.
        """
        if self._bar is not None:
            self._bar.update(self._task, status=self._describe(row))
        else:
            step = f"{row['step']:>{len(str(self._total))}}/{self._total}"
            self.note(f"step {step}  {self._describe(row)}  {seconds_left:.0f} s left")

    def note(self, message: str) -> None:
        """Show a line of text; an OSError, such as for a full disk, is ignored."""
        with suppress(OSError):
            self._console.print(message, highlight=False, markup=False, soft_wrap=True)
