"""The memory of arrays of any library.

An array is an object with the buffer protocol, such as a bytearray or an array of NumPy, or an
object with DLPack, such as a tensor of PyTorch. The memory of the array is used without a copy.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ptxmachine import _machine

# DLPack devices whose memory the CPU can read: kDLCPU and kDLCUDAHost (pinned memory).
_CPU = (1, 3)
_DLPACK_TYPES = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "u"}
_FORMATS = {"i": "bhilqn", "u": "?cBHILQN", "f": "efd"}


class Buffer(NamedTuple):
    """The memory of an array.

    Args:
        address: Address of the first element.
        shape: Elements in each dimension.
        strides: Bytes between neighbouring elements in each dimension.
        size: Bytes of an element.
        kind: Type of an element, such as "f32", "bf16" or "i64"; "" for any other type.
        writable: Whether a kernel may write to the memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    kind: str
    writable: bool

    @property
    def extent(self) -> tuple[int, int]:
        """The first address, and the address after the last byte; equal for an empty array."""
        if 0 in self.shape:
            return self.address, self.address
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low, high = (sum(f(step, 0) for step in steps) for f in (min, max))
        return self.address + low, self.address + high + self.size


def argument(value: Any) -> Any:
    """Return the memory if `value` is an array, otherwise `value` itself.

    Raises:
        ValueError: If the array is not in the memory of the CPU.
    """
    if value is None or isinstance(value, (bytes, numbers.Number)):
        return value
    return _memory(value, "args") or value


def buffer(value: Any, name: str) -> Buffer:
    """Return the memory of an array.

    Args:
        value: An object with the buffer protocol or with DLPack.
        name: Name of the argument, for error messages.

    Raises:
        ValueError: If the object is not an array in the memory of the CPU.
    """
    memory = _memory(value, name)
    if memory is None:
        raise ValueError(
            f"{name}: got a {type(value).__name__}, allowed: an object with the buffer protocol or "
            "with DLPack"
        )
    return memory


def _memory(value: Any, name: str) -> Buffer | None:
    """Return the memory of an array, or None for an object that is not an array."""
    if _has_buffer(value):
        address, shape, strides, size, form, constant = _machine.read_buffer(value)
        kind = next((kind for kind, letters in _FORMATS.items() if form[-1:] in letters), "")
        name_of_kind = f"{kind}{8 * size}" if kind and len(form.lstrip("@=<")) == 1 else ""
        return Buffer(address, tuple(shape), tuple(strides), size, name_of_kind, not constant)
    if not hasattr(value, "__dlpack__"):
        return None
    try:
        device, _ = value.__dlpack_device__()
        described = _machine.read_capsule(value.__dlpack__()) if device in _CPU else None
    except (BufferError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: got an array that DLPack does not give: {error}") from error
    if described is None:
        raise ValueError(f"{name}: got an array on DLPack's device {device}, allowed: the CPU")
    address, shape, strides, code, bits, lanes = described
    size = -(-bits * lanes // 8)
    kind = f"{_DLPACK_TYPES[code]}{bits}" if code in _DLPACK_TYPES and lanes == 1 else ""
    in_bytes = tuple(stride * size for stride in strides)
    return Buffer(address, tuple(shape), in_bytes, size, kind, True)


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    # NumPy raises ValueError for types that have no letter in the buffer protocol.
    except (TypeError, ValueError):
        return False
    return True


class Region(NamedTuple):
    """Memory that a launch may reach.

    Args:
        begin: Address of the first byte.
        size: Number of bytes.
        writable: Whether a kernel may write to the memory.
        name: Name of the memory in messages.
        empty: Whether the memory is uninitialized.
    """

    begin: int
    size: int
    writable: bool
    name: str
    empty: bool


def regions(full: Sequence[Buffer], empty: Iterable[Buffer]) -> list[Region]:
    """Return the regions of the buffers `full` and of the uninitialized buffers `empty`.

    Buffers that overlap become one region, which is writable, or uninitialized, if one of them is.
    """
    numbered = [(b, False) for b in full] + [(b, True) for b in empty]
    parts = [
        Region(begin, end - begin, b.writable, f"buffer {n} {b.shape}", nothing)
        for n, (b, nothing) in enumerate(numbered)
        for begin, end in [b.extent]
        if begin < end
    ]
    joined: list[Region] = []
    for part in sorted(parts, key=lambda part: part.begin):
        last = joined[-1] if joined else None
        if last is None or part.begin >= last.begin + last.size:
            joined.append(part)
            continue
        joined[-1] = Region(
            last.begin,
            max(last.size, part.begin + part.size - last.begin),
            last.writable or part.writable,
            last.name,
            last.empty or part.empty,
        )
    return joined
