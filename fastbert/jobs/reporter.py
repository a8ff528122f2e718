"""What a job tells its caller while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


class Reporter:
    """Receives the notes and the progress of a job; this class drops them."""

    def note(self, text: str) -> None:
        """A sentence that the user should read."""

    def reading(self, path: Path) -> AbstractContextManager[None]:
        """Entered while ``path`` is read for the first time."""
        return nullcontext()

    def progress(self, total: int, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Entered for the work on ``total`` texts, of which ``done`` were done before.

        The context manager yields a function that is called with the number of texts just done.
        """
        return nullcontext(lambda count: None)


SILENT = Reporter()
