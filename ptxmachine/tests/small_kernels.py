"""Functions that build and run small PTX kernels for the tests of the PTX machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ptxmachine as ptx

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .b64 %d<32>;
    .reg .b32 %a<16>;
    .reg .b32 %b<8>;
    .reg .b32 %c<256>;
"""
# Number of bits of a value → prefix of the registers that hold it.
CLASS = {1: "%p", 8: "%h", 16: "%h", 32: "%r", 64: "%d"}
BITS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16, "tf32": 32}


def bits_of(suffix: str) -> int:
    """Return the number of bits of a type suffix, such as "s32"."""
    return BITS.get(suffix) or int(suffix.lstrip("abcdefghijklmnopqrstuvwxyz"))


def kernel(body: str, pointers: int = 1, shared: int = 0, name: str = "k", bounds: str = "") -> str:
    """Return a module with one kernel that executes the instructions in `body`.

    The registers %d0, %d1, … have the pointers, and %r0 has the number of the thread. `bounds` is
    the text of the directives after the parameters, such as ".maxntid 384".
    """
    parameters = ", ".join(f".param .u64 p{n}" for n in range(pointers))
    loads = "".join(f"    ld.param.u64 %d{n}, [p{n}];\n" for n in range(pointers))
    memory = f"    .shared .align 1024 .b8 memory[{shared}];\n" if shared else ""
    return (
        f"{HEADER}.visible .entry {name}({parameters})\n{bounds}\n{{{REGISTERS}{memory}{loads}"
        f"    mov.u32 %r0, %tid.x;\n{body}\n    ret;\n}}\n"
    )


def launch(body: str, tensors: Sequence[Tensor], threads: int = 32, shared: int = 0, **options):
    """Run the kernel with a given body on one block, and return the report of the launch."""
    module = ptx.load(kernel(body, len(tensors), shared))
    return module.launch("k", (1,), (threads,), list(tensors), **options)


def apply(
    mnemonic: str, result: str, sources: Sequence[str], values: Sequence[Sequence[int]], **options
) -> list[int]:
    """Run one instruction with one thread for each row of `values`, and return the result bits.

    Args:
        mnemonic: The instruction, such as "add.s32".
        result: Type of the result, such as "s32".
        sources: Types of the operands.
        values: One row of bit patterns per thread.
        options: Keyword arguments of the launch.
    """
    count = len(values)
    given = torch.tensor([[_signed(v) for v in row] for row in values], dtype=torch.int64)
    out = torch.zeros(count, dtype=torch.int64)
    body = [
        f"    mad.wide.u32 %d2, %r0, {8 * len(sources)}, %d0;",
        "    mad.wide.u32 %d3, %r0, 8, %d1;",
    ]
    names = []
    for n, kind in enumerate(sources):
        name = f"{CLASS[bits_of(kind)]}{10 + n}"
        names.append(name)
        if kind == "pred":
            body += [f"    ld.global.u32 %r{30 + n}, [%d2+{8 * n}];"]
            body += [f"    setp.ne.u32 {name}, %r{30 + n}, 0;"]
        else:
            body += [f"    ld.global.b{bits_of(kind)} {name}, [%d2+{8 * n}];"]
    to = f"{CLASS[bits_of(result)]}1"
    body += [f"    {mnemonic} {to}, {', '.join(names)};"]
    if result == "pred":
        body += [f"    selp.u32 %r2, 1, 0, {to};", "    st.global.b32 [%d3], %r2;"]
    else:
        body += [f"    st.global.b{bits_of(result)} [%d3], {to};"]
    launch("\n".join(body), [given, out], threads=count, **options)
    mask = (1 << bits_of(result)) - 1
    return [int(v) & mask for v in out.tolist()]


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
