"""Compile Triton kernels ahead of time and run them on the PTX machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import ptxmachine as ptx

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
# The swizzle sizes in bytes; the index is the driver's number of the swizzle.
SWIZZLES = (0, 32, 64, 128)


@dataclass
class Launch:
    """A launch of a Triton kernel; the arguments by name include compile-time constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def compiled(self, arch: int) -> Any:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for position, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                signature[parameter.name] = f"tensordesc<{NAMES[value.base.dtype]}[{block}]>"
            elif isinstance(value, Tensor):
                signature[parameter.name] = f"*{NAMES[value.dtype]}"
                if value.data_ptr() % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif value == 1:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

    def run(self, arch: int, **options: Any) -> ptx.Report:
        """Compile the kernel, and run it on the PTX machine.

        The kernel reads and writes the tensors in ``self.arguments``.
        """
        compiled = self.compiled(arch)
        module = ptx.load(compiled.asm["ptx"])
        [name] = module.kernels
        descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        given: list[Any] = []
        memory: list[Tensor] = []
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if isinstance(value, TensorDescriptor):
                given += _descriptor(value, next(descriptors, None))
                memory.append(value.base)
            elif parameter.is_constexpr or value is None:
                continue
            elif isinstance(value, (Tensor, float)) or value != 1:
                given.append(value)
        blocks = self.grid[0] * (self.grid[1:] or (1,))[0] * (self.grid[2:] or (1,))[0]
        scratch = []
        for kind in ("global", "profile"):
            size = getattr(compiled.metadata, f"{kind}_scratch_size")
            scratch.append(_aligned(blocks * size) if size else None)
        threads = 32 * compiled.metadata.num_warps
        [warps] = [module.text.kernels[name].threads or (threads, 1, 1)]
        return module.launch(
            name, self.grid, warps, [*given, *scratch], dynamic_shared=compiled.metadata.shared,
            memory=memory, **options,
        )  # fmt: skip


def _aligned(size: int) -> Tensor:
    """Return a tensor whose address is a multiple of 128 bytes."""
    data = torch.zeros(size + 128, dtype=torch.uint8)
    return data[-data.data_ptr() % 128 :][:size]


def _descriptor(value: TensorDescriptor, meta: dict[str, Any] | None) -> Sequence[Any]:
    """Return a descriptor as Triton passes it to a kernel: as a tensor map, or in parts."""
    shape, strides = list(value.shape), list(value.strides)
    if meta is None:
        flags = [value.padding == "nan", value.round_f32_to_tf32]
        return [value.base, *shape, *strides, *map(int, flags), *shape, *strides]
    encoded = ptx.tensor_map(
        value.base, meta["block_size"], swizzle=SWIZZLES[meta["swizzle"]],
        fill_nan=value.padding == "nan",
    )  # fmt: skip
    return [encoded, *shape, *strides]
