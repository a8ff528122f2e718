"""Prepare the standard streams, so that no command fails because of their encoding or state."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Make the standard streams accept any text, whatever their encoding and even if closed.

    A character that the encoding of stdout lacks is escaped, as Python does on stderr. A stream
    that the caller has closed becomes the null device. Otherwise, the next file that is opened
    would get the stream's file descriptor, and libraries that print would write into this file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
    if sys.stdout is None:
        sys.stdout = _null(1)
    if sys.stderr is None:
        sys.stderr = _null(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _null(number: int) -> io.TextIOWrapper:
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
