"""Reading and writing one safetensors file; a damaged file raises ValueError.

A file consists of the length of the header (8 bytes, little-endian), a JSON header ``{name: {dtype,
shape, data_offsets}}``, and the data. This module compares the size of the file with the largest
offset in the header before it maps the file. The safetensors library then checks the header, which
takes only milliseconds. If a header has the same key twice, the library silently uses the last one,
so this module refuses such a header.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fastbert.file_size import check_file

# The largest size of a header, in bytes; the safetensors library refuses a larger header.
MAX_HEADER = 100_000_000
# The expression matches the offsets of a tensor in the header, and its group is the end offset. If
# the expression matches nothing in a header, only the library checks the offsets.
_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')


def read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file to the CPU.

    Args:
        path: Path of the file.

    Returns:
        The tensors by name.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged. The message names `path` and the reason.
    """
    size, header = check_size(path)
    try:
        tensors = safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _damaged(path, f"{error} (the file has {size} bytes)") from error
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"{path}: its {size:,} bytes cannot be mapped: {error}") from error
    try:
        json.loads(header, object_pairs_hook=_refuse_equal_keys)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return tensors


def check_size(path: Path) -> tuple[int, bytes]:
    """Compare the size of a file with the offsets in its header, without reading the data.

    Args:
        path: Path of the file.

    Returns:
        The size in bytes and the header.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If `path` is not a regular file, or if its size does not match its header. The
            message names `path`.
    """
    length, size = _header_length(path)
    with open(path, "rb") as file:
        file.seek(8)
        header = file.read(length)
    ends = _END.findall(header)
    if ends and 8 + length + max(map(int, ends)) != size:
        raise _damaged(path, f"file not fully covered (the file has {size} bytes)")
    return size, header


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with the metadata ``format: pt`` and the usual permissions of a new file.

    Args:
        path: Path of the file.
        tensors: The tensors by name.

    Raises:
        OSError: If the file cannot be written. The message names `path`.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(contiguous, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)


def _header_length(path: Path) -> tuple[int, int]:
    """Return the sizes of the header and of the file in bytes.

    Raises:
        ValueError: If the file is too small for its header, or the header exceeds ``MAX_HEADER``.
    """
    check_file(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
    if len(start) < 8:
        raise _damaged(path, f"it ends after {size} bytes")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER or 8 + length > size:
        raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
    return length, size


def _refuse_equal_keys(pairs: list[tuple[str, Any]]) -> None:
    name, count = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if count > 1:
        raise ValueError(f"duplicate key {name!r}")


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: not a sound safetensors file: {reason}")
