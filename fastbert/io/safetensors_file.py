"""Reading and writing one safetensors file, distrusting what is read.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
the data. The safetensors library judges the header first, because it needs milliseconds for any
header, however hostile. It keeps the last of two equal keys, so equal keys are refused here.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

# What the safetensors library itself accepts at most.
MAX_HEADER = 100_000_000


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU. Raises ValueError naming ``path`` and the reason when it
    is damaged."""
    length, size = _header_length(path)
    try:
        tensors = safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _damaged(path, f"{error} (the file has {size} bytes)") from error
    with open(path, "rb") as file:
        file.seek(8)
        header = file.read(length)
    try:
        json.loads(header, object_pairs_hook=_refuse_equal_keys)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``tensors`` with transformers' metadata and the permissions of any new file.

    Raises OSError naming ``path`` when they cannot be written.
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
    """The bytes of the header and of the file. Raises ValueError when the header does not fit."""
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
