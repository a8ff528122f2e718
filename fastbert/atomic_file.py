"""Writing a file that appears complete or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a temporary file, and then rename the temporary file to ``path``.

    The temporary file is in the folder of ``path`` and has the suffix of ``path``, by which numpy
    and matplotlib choose the file format. If an OSError names no file, such as the error of a full
    disk, ``path`` is added to the error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        with naming(path):
            write(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to each OSError that the block raises without the name of a file.

    The error of a full disk is an example.

    Args:
        path: The file that the block writes.

    Raises:
        OSError: If the block raises an OSError. The message always names a file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None or len(error.args) < 2:
            raise OSError(f"{path}: {error}") from error
        error.filename = str(path)
        raise


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write_atomically`, and flush the file and its name to the disk before returning."""

    def flushed(temporary: Path) -> None:
        write(temporary)
        sync(temporary)

    write_atomically(path, flushed)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
