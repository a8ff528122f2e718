"""The CUDA C++ products with GELU in the epilogue, on the PTX machine and as machine code."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import functions, loops, read
from fastbert.testing.ptx import nvcc
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA, CompiledOperators, Operators

FRONT = """
#include "gemm.cuh"
using namespace fastbert::cuda;
extern "C" {
int run_linear_gelu(LinearGelu* p) { return linear_gelu(*p, nullptr); }
int run_linear_gelu_gradient(LinearGeluGradient* p) { return linear_gelu_gradient(*p, nullptr); }
}
"""
KERNEL = re.compile(
    r"gemm_kernelI(?:6__|13__nv_)(half|bfloat16)\S*?Store(Gelu|Gradient)\S*?(GeluTanhBy|GeluBy)"
)


class GemmOperators(CompiledOperators):
    """The operators with GELU in the epilogue, compiled by nvcc, on the PTX machine.

    Args:
        folder: An existing folder for the compiled files.
        arch: Architecture of the GPU, such as 80 for sm_80; 90 compiles for sm_90a.

    Attributes:
        compiled: The library, which collects the reports of the launches.
        options: Keyword arguments of `Module.launch`, such as ``seed``.
    """

    def __init__(self, folder: Path, arch: int) -> None:
        """Compile the kernels."""
        front = folder / "front.cu"
        front.write_text(FRONT, encoding="utf-8")
        names = ("gemm.cu", "reduce.cu", "hopper/gemm.cu", "hopper/tensor_map.cu")
        name = "90a" if arch == 90 else str(arch)
        sources = [*(CUDA / n for n in names), front]
        self.compiled = CudaLibrary(sources, folder, name, nvcc.flags_of(name))
        self.options: dict[str, Any] = {}
        Operators.__init__(self, self.compiled.functions)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the last launch of a product."""
        launches = (report for name, report in reversed(self.compiled.reports) if "gemm" in name)
        return next(launches).counts


def machine_code(folder: Path, arch: int) -> tuple[dict[tuple[str, str, str], str], str]:
    """Compile the kernels of one architecture, and disassemble them.

    Args:
        folder: An existing folder for the compiled files.
        arch: Architecture of the GPU, such as 80 for sm_80; 90 compiles for sm_90a.

    Returns:
        The machine code by dtype, direction ("forward" or "backward") and activation, and the
        report of ptxas.
    """
    source, name = (CUDA / "hopper" / "gemm.cu", "90a") if arch == 90 else (CUDA / "gemm.cu", arch)
    assembled, report = nvcc.assembled(source, folder, str(name))
    cubin = assembled.rename(folder / f"gemm{name}.cubin")
    found = {}
    for function, text in functions(cuobjdump("--dump-sass", cubin)).items():
        match = KERNEL.search(function)
        assert match is not None
        direction = {"Gelu": "forward", "Gradient": "backward"}[match[2]]
        activation = {"GeluBy": "gelu", "GeluTanhBy": "gelu_tanh"}[match[3]]
        dtype = {"half": "float16", "bfloat16": "bfloat16"}[match[1]]
        found[dtype, direction, activation] = text
    return found, report


def loop(sass: str, opcode: str, at_least: int = 1) -> Counter[str]:
    r"""Count the opcodes of the smallest loop with at least `at_least` instructions of one opcode.

    NOP is not counted.

    Args:
        sass: Machine code of one kernel.
        opcode: The opcode that the loop must have.
        at_least: Smallest number of instructions in the loop with the opcode `opcode`.

    Examples:
        >>> from fastbert.testing.ptx.cuda_gemm import loop
        >>> line = "        /*%04x*/                   %s ;"
        >>> code = ("MOV R1, R2", "HMMA.16816 R1", "@P0 BRA 0x10", "EXIT")
        >>> loop("\n".join(line % (16 * n, text) for n, text in enumerate(code)), "HMMA")
        Counter({'HMMA': 1, 'BRA': 1})
    """
    found = []
    for body in loops(read(sass)):
        inside = Counter(instruction.name for instruction in body)
        # ptxas puts rare code after the end of the kernel. A branch back from there does not make a
        # loop.
        if inside[opcode] >= at_least and "EXIT" not in inside:
            found.append(inside)
    smallest = min(found, key=lambda inside: inside.total())
    del smallest["NOP"]
    return smallest
