"""Reading and writing one safetensors file, distrusting what is read.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
the data. The header is checked here in full before the safetensors library sees the file, so that
every kind of damage has an error that names file and reason, and so that what the library tolerates
(a duplicate key) is refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

# What the safetensors library itself accepts at most.
MAX_HEADER = 100_000_000
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU. Raises ValueError naming ``path`` and the reason when it
    is damaged."""
    check(path)
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _damaged(path, str(error)) from error


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


def check(path: Path) -> None:
    """Raises ValueError unless the header is sound and describes exactly the bytes behind it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _damaged(path, f"it ends after {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER or 8 + length > size:
            raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
        header = file.read(length)
    try:
        content = json.loads(header, object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(path, "its header is not a JSON object")
    content.pop("__metadata__", None)
    _check_extents(path, content, size - 8 - length)


def _check_extents(path: Path, content: dict[str, Any], data_size: int) -> None:
    """The tensors lie one after another, without gap or overlap, and fill the data exactly."""
    extents = sorted((*_extent(path, name, entry), name) for name, entry in content.items())
    position = 0
    for begin, end, name in extents:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise _damaged(path, f"{name} {kind} (offset {begin}, expected {position})")
        position = end
    if position != data_size:
        raise _damaged(path, f"its tensors need {position} bytes, it holds {data_size}")


def _extent(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{name} is not described in full: {entry!r:.200}") from error
    if not all(type(number) is int and number >= 0 for number in numbers) or str(dtype) not in BITS:
        raise _damaged(path, f"{name} has dtype {dtype!r}, shape {shape}, offsets {begin}, {end}")
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise _damaged(path, f"{name} of {dtype} {shape} does not fit offsets {begin} to {end}")
    return begin, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return content


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: not a sound safetensors file: {reason}")
