"""Tensor maps for bulk tensor copies, in the PTX machine's own encoding.

A driver encodes a ``CUtensorMap`` in a layout that is not documented. The machine has a layout of
its own, in csrc/ptx/machine.h, for the arguments of ``cuTensorMapEncodeTiled``. The instruction
``tensormap.replace`` writes the same layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

SWIZZLES = (0, 32, 64, 128)
# Numbers of types as .elemtype of tensormap.replace has them; bulk reductions need them.
TYPES = {
    torch.int16: 1, torch.int32: 3, torch.int64: 5, torch.float16: 6, torch.float32: 7,
    torch.float64: 9, torch.bfloat16: 10,
}  # fmt: skip


def tensor_map(
    tensor: Tensor, box: Sequence[int], *, swizzle: int = 0, fill_nan: bool = False
) -> bytes:
    """Encode a tensor map.

    Args:
        tensor: CPU tensor of one to five dimensions, the last of them contiguous.
        box: Elements of a copy in each dimension of `tensor`, in the same order.
        swizzle: Bytes of the swizzle pattern: 0, 32, 64 or 128.
        fill_nan: Whether elements outside the tensor are read as NaN; otherwise as zero.

    Returns:
        128 bytes, for a ``__grid_constant__ CUtensorMap`` parameter.

    Raises:
        ValueError: If the hardware would not take such a map.
    """
    if not 1 <= tensor.dim() <= 5 or tensor.stride(-1) != 1:
        raise ValueError(
            f"tensor: got shape {tuple(tensor.shape)} and strides {tensor.stride()}, allowed: one "
            "to five dimensions, the last contiguous"
        )
    if len(box) != tensor.dim() or not all(1 <= side <= 256 for side in box):
        raise ValueError(f"box: got {tuple(box)}, allowed: {tensor.dim()} sizes of 1 to 256")
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle: got {swizzle}, allowed: {', '.join(map(str, SWIZZLES))}")
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:-1]]
    if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
        raise ValueError(f"tensor: its address and strides {strides} must be multiples of 16 bytes")
    row = box[-1] * size
    if row % 16 or (swizzle and row > swizzle):
        raise ValueError(
            f"box: a row has {row} bytes, allowed: multiples of 16"
            + (f" up to the swizzle's {swizzle}" if swizzle else "")
        )

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*reversed(values), *([0] * (count - len(values)))]

    encoded = struct.pack(
        "<4s4BQ5II4Q5H", b"fbtm", tensor.dim(), size, swizzle, fill_nan, tensor.data_ptr(),
        *padded(tensor.shape, 5), TYPES.get(tensor.dtype, 0), *padded(strides, 4), *padded(box, 5),
    )  # fmt: skip
    return encoded.ljust(128, b"\0")
