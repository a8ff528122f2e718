"""Writes of a training run that may fail without ending it."""

from __future__ import annotations

from collections.abc import Callable


class Attempts:
    """Makes writes, says which one failed, and keeps the last failure of each in ``failures``.

    A write that succeeds later is no failure any more. ``say`` shows a line to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failures: dict[str, OSError] = {}
        self._say = say

    def __call__(self, what: str, write: Callable[[], object]) -> bool:
        """Returns whether ``write`` wrote ``what``; an OSError is told and kept."""
        try:
            write()
        except OSError as error:
            self.failures[what] = error
            self._say(f"{what} could not be written: {error}")
            return False
        self.failures.pop(what, None)
        return True

    def check(self, kept: str) -> None:
        """Raises OSError naming what could not be written in the end, and what was ``kept``."""
        if self.failures:
            told = "; ".join(f"{what}: {error}" for what, error in self.failures.items())
            raise OSError(f"could not be written at the end of the run: {told}; kept: {kept}")
