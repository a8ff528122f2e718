"""The check of a file before it is read as a whole."""

from __future__ import annotations

from pathlib import Path


def check_file(path: Path, most: int | None = None) -> None:
    """Raise ValueError if `path` is a pipe or a device, or a file of more than `most` bytes.

    A pipe or a device may have no end. If `most` is None, any size is allowed. The message names
    the file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: got a pipe or a device, allowed: a file")
    if most is not None and (size := path.stat().st_size) > most:
        raise ValueError(f"{path}: it has {size:,} bytes, allowed: at most {most:,}")
