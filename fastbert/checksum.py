"""The SHA-256 of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from fastbert.file_size import check_file

_BLOCK = 1 << 20


def checksum(path: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """Return the SHA-256 of a file as hexadecimal digits.

    Args:
        path: The file.
        advance: Function that is called with the number of bytes read since the previous call.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If `path` is a pipe or a device, which may have no end.
    """
    check_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
