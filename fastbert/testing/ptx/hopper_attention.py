"""The CUDA C++ attention for Hopper GPUs alone, on the PTX machine and as machine code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from ctypes import byref
from pathlib import Path
from typing import Any

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import Instruction, functions, loops, read
from fastbert.testing.ptx import nvcc
from fastbert.testing.ptx.cuda_attention import AttentionOperators
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA

FRONT = """
#include "hopper/attention.cuh"
using namespace fastbert::cuda;
extern "C" {
int run_attention_forward(AttentionForward* p) {
  return hopper_attention_refuses(*p) ? -1 : hopper_attention_forward(*p, nullptr);
}
int run_attention_backward(AttentionBackward* p) {
  return hopper_attention_refuses(*p) ? -1 : hopper_attention_backward(*p, nullptr);
}
int64_t attention_forward_pair_words(AttentionForward* p) { return attention_pair_words(*p); }
int64_t attention_backward_pair_words(AttentionBackward* p) { return attention_pair_words(*p); }
}
"""
# Code that hides keys (masked keys, or keys after the end of a sequence) has many FSEL, and code
# that rescales sums has many FMUL. A block of code with more than MANY of either is skipped in a
# tile without hidden keys in which no row maximum grows.
RARE, MANY = ("FSEL", "FMUL"), 20


class HopperAttention(AttentionOperators):
    """The attention kernels of csrc/cuda/hopper, compiled by nvcc, on the PTX machine.

    Args:
        folder: An existing folder for the compiled files.

    Attributes:
        compiled: The library, which collects the reports of the launches.
        options: Keyword arguments of `Module.launch`, such as ``seed``.
    """

    def __init__(self, folder: Path) -> None:
        """Compile the kernels."""
        front = folder / "front.cu"
        front.write_text(FRONT, encoding="utf-8")
        hopper = CUDA / "hopper"
        names = ("choice.cu", "pairs.cu", "tensor_map.cu")
        sources = [*hopper.glob("attention_*.cu"), *(hopper / name for name in names), front]
        self.compiled = CudaLibrary(sources, folder, "90a", nvcc.flags_of("90a"))
        self.options: dict[str, Any] = {}
        super().__init__(self.compiled.functions)

    def _call(self, name: str, params: Any) -> int:
        return self.compiled.call(name, byref(params), memory=self.tensors, **self.options)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the last launch."""
        return self.compiled.reports[-1][1].counts


def machine_code(
    folder: Path, direction: str = "forward"
) -> dict[tuple[str, int, bool, bool], str]:
    """Compile the kernels of one direction for sm_90a, and disassemble them.

    Args:
        folder: An existing folder for the compiled files.
        direction: "forward", "backward" or "backward_wide".

    Returns:
        The machine code by dtype, head dim, whether the kernel has a mask of query-key pairs, and
        whether it has dropout.

    Raises:
        RuntimeError: If ptxas makes the products of a kernel wait for each other.
    """
    source = CUDA / "hopper" / f"attention_{direction}.cu"
    assembled, report = nvcc.assembled(source, folder, "90a")
    cubin = assembled.rename(folder / assembled.name)
    if "serialized" in report:
        raise RuntimeError(f"ptxas serializes products:\n{report}")
    found = {}
    for function, text in functions(cuobjdump("--dump-sass", cubin)).items():
        match = re.search(r"kernelI\d+__([a-z_\d]+?)Li(\d+)ELb(\d)ELb(\d)E", function)
        assert match is not None
        dtype = {"nv_bfloat16": "bfloat16", "half": "float16"}[match[1]]
        found[dtype, int(match[2]), match[3] == "1", match[4] == "1"] = text
    return found


def loop_over_tiles(code: str) -> list[Instruction]:
    """Return the instructions of the loop over tiles.

    The result is the shortest loop that has matrix products with a transposed right operand and
    matrix products without.
    """
    found = []
    for body in loops(read(code)):
        products = [x for x in body if x.name == "HGMMA"]
        if len({any("tnspB" in operand for operand in x.operands) for x in products}) == 2:
            found.append(body)
    return min(found, key=len)


def path_of_a_tile(code: str) -> list[Instruction]:
    """Return the instructions that a warp executes for a tile without hidden keys.

    The result leaves out the code that masks hidden scores and the code that rescales sums. If two
    groups of warps take turns with some products, the result has the instructions for two tiles.
    """
    body = loop_over_tiles(code)
    places = {x.address: i for i, x in enumerate(body)}
    ends = [places.get(x.target or 0, 0) for x in body]
    turns = {
        x.guard for i, x in enumerate(body) if any(y.name == "HGMMA" for y in body[i : ends[i]])
    }
    if len(turns) > 1:
        raise ValueError(f"code: products depend on {len(turns)} predicates, allowed: at most 1")
    path = []
    for skipped in (True, False) if turns else (False,):
        i = 0
        while i < len(body):
            path.append(body[i])
            if ends[i] > i and _skips(body[i : ends[i]], turns, skipped):
                i = ends[i]
            else:
                i += 1
    return [x for x in path if x.name != "NOP"]


def _skips(block: Sequence[Instruction], turns: Collection[str], skipped: bool) -> bool:
    """Return whether a block's first branch skips the block in a tile without hidden keys."""
    counts = Counter(x.name for x in block)
    if any(counts[x] > MANY for x in RARE):
        return True
    if block[0].guard in turns:
        return skipped
    # An unguarded branch always skips its block. A long block is the code for hidden keys, which
    # are masked or after the end of the sequence.
    return not block[0].guard or len(block) > 2 * MANY
