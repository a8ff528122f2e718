"""Attempts of a training run to write files; a failed attempt does not end the run."""

from __future__ import annotations

from collections.abc import Callable


class Attempts:
    """The attempts of a run to write files, with the failures that no later attempt corrected.

    Attributes:
        failures: For each target (a file or a tracker) that could not be written, its last error.
            A later success removes the entry.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start without failures.

        Args:
            say: Shows a line of text to the user.
        """
        self.failures: dict[str, OSError] = {}
        self._say = say

    def __call__(self, what: str, write: Callable[[], object]) -> bool:
        """Call `write` and return whether it succeeded; an OSError is shown and stored.

        Args:
            what: Name of the target, for messages.
            write: Writes the target.
        """
        try:
            write()
        except OSError as error:
            self.failures[what] = error
            self._say(f"{what} could not be written: {error}")
            return False
        self.failures.pop(what, None)
        return True

    def draw(self, what: str, draw: Callable[[], object]) -> bool:
        """Call `draw` as `__call__` calls `write`, and return whether it succeeded.

        Errors other than OSError do not end the run either. They are shown but not stored, because
        the results are complete without the picture.

        Args:
            what: Name of the picture, for messages.
            draw: Draws the picture into its file.
        """
        try:
            return self(what, draw)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"{what} could not be drawn: {reason:.500}")
            return False

    def check(self, kept: str) -> None:
        """Raise OSError if a target could not be written.

        Args:
            kept: Names of the files that were written, for the message.
        """
        if self.failures:
            told = "; ".join(f"{what}: {error}" for what, error in self.failures.items())
            raise OSError(f"could not be written at the end of the run: {told}; kept: {kept}")
