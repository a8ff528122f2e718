"""Tensor maps for bulk tensor copies, in the PTX machine's own encoding.

A driver encodes a ``CUtensorMap`` in a layout that is not documented. The machine therefore has its
own layout, ``TensorMap`` in csrc/machine.h. The instruction ``tensormap.replace`` writes the same
layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ptxmachine import buffers, limits

SWIZZLES = (0, 32, 64, 128)
FLOATS = ("f16", "bf16", "f32", "f64")
# Element type → its number in tensormap.replace.elemtype. Only bulk reductions read the type.
TYPES = {
    "u8": 0, "i16": 1, "u16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5, "f16": 6, "f32": 7,
    "f64": 9, "bf16": 10,
}  # fmt: skip


def tensor_map(
    tensor: Any, box: Sequence[int], *, swizzle: int = 0, fill_nan: bool = False
) -> bytes:
    """Encode a tensor map that describes the memory of an array.

    Args:
        tensor: Array of one to five dimensions whose last dimension is contiguous: an object with
            the buffer protocol, or with DLPack in the memory of the CPU.
        box: Elements of a copy in each dimension of `tensor`, in the same order.
        swizzle: Bytes of the swizzle pattern: 32, 64 or 128, or 0 for no swizzle.
        fill_nan: Whether elements outside the tensor are read as NaN instead of zero.

    Returns:
        128 bytes: the argument for a ``__grid_constant__ CUtensorMap`` parameter.

    Raises:
        ValueError: If `tensor` is not an array in the memory of the CPU, or if
            ``cuTensorMapEncodeTiled`` does not allow such a map.
    """
    array = buffers.buffer(tensor, "tensor")
    dims, size = len(array.shape), array.size
    if not 1 <= dims <= 5 or array.strides[-1] != size:
        raise ValueError(
            f"tensor: got shape {array.shape} and strides {array.strides} in bytes, allowed: one "
            "to five dimensions, the last contiguous"
        )
    if len(box) != dims or not all(1 <= side <= limits.MAP_BOX for side in box):
        raise ValueError(f"box: got {tuple(box)}, allowed: {dims} sizes of 1 to {limits.MAP_BOX}")
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle: got {swizzle}, allowed: {', '.join(map(str, SWIZZLES))}")
    if not all(1 <= side <= limits.MAP_SIZE for side in array.shape):
        raise ValueError(
            f"tensor: got shape {array.shape}, allowed: sizes of 1 to {limits.MAP_SIZE}"
        )
    if fill_nan and array.kind not in FLOATS:
        raise ValueError(f"fill_nan: got a tensor of {array.kind}, allowed: {', '.join(FLOATS)}")
    strides = array.strides[:-1]
    if array.address % 16 or any(stride % 16 for stride in strides):
        raise ValueError(
            f"tensor: got address {array.address} and strides {strides} in bytes, allowed: "
            "multiples of 16"
        )
    if not all(0 <= stride < limits.MAP_STRIDE_END for stride in strides):
        raise ValueError(
            f"tensor: got strides {strides} in bytes, allowed: 0 to {limits.MAP_STRIDE_END - 16}"
        )
    row = box[-1] * size
    if row % 16 or (swizzle and row > swizzle):
        raise ValueError(
            f"box: a row has {row} bytes, allowed: multiples of 16"
            + (f" up to the swizzle's {swizzle}" if swizzle else "")
        )

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*reversed(values), *([0] * (count - len(values)))]

    encoded = struct.pack(
        "<4s4BQ5II4Q5H", b"ptxm", dims, size, swizzle, fill_nan, array.address,
        *padded(array.shape, 5), TYPES.get(array.kind, 0), *padded(strides, 4), *padded(box, 5),
    )  # fmt: skip
    return encoded.ljust(128, b"\0")
