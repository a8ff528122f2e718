"""The notes and the progress that a job reports to its caller while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


class Reporter:
    """A receiver of the notes and the progress of a job; this class ignores both."""

    def note(self, text: str) -> None:
        """Receive a sentence that the user should read."""

    def reading(self, path: Path) -> AbstractContextManager[None]:
        """Return a context manager that is entered while `path` is read for the first time."""
        return nullcontext()

    def progress(self, total: int, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context manager in whose block the job does its work.

        The work is counted in texts. `prepare` counts it in bytes, and `predict` counts it in
        sequences of tokens.

        Args:
            total: Amount of the whole work.
            done: Amount of the work that an earlier run has done.

        Returns:
            A context manager that yields a function. The function is called with the amount of work
            that was done since its last call.
        """
        return nullcontext(lambda count: None)


SILENT = Reporter()
