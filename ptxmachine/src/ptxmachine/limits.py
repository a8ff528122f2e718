"""The most that a PTX text may ask of the machine, and the most that a launch may ask of hardware.

A text that asks for more is refused when it is read, before anything of that size is allocated. The
numbers of hardware are those of the CUDA C++ Programming Guide, section "Compute Capabilities",
table "Technical Specifications per Compute Capability", where no other source is named. The limits
of instructions are in csrc/machine.h.
"""

from __future__ import annotations

import re

from ptxmachine.errors import PtxSyntaxError

LINE = 100_000  # characters
REGISTERS = 65_536  # of a kernel with the functions that it calls
SCOPES = 256  # braces inside each other
CALLS = 64  # calls inside each other
INLINED = 100_000  # lines and statements that a kernel has by calls and by tables of branches
THREADS = 1024  # of a block, as on GPUs
# The registers of a block, which are those of a multiprocessor. A thread is given a multiple of 8,
# and a block those of a multiple of 4 warps: cuda_occupancy.h of the CUDA toolkit.
BLOCK_REGISTERS, REGISTER_UNIT, WARP_UNIT = 65_536, 8, 4
THREAD_REGISTERS = 256  # as setmaxnreg counts them
BLOCK = (1024, 1024, 64)  # threads of a block in x, y and z
GRID = (2**31 - 1, 65_535, 65_535)  # blocks of a grid in x, y and z
BLOCKS = 2**31 - 1  # of a grid, because the machine numbers them with 32 bits
# Bytes of the parameters of a kernel, of sm_70 and later in PTX ISA 8.1 and later, and of others:
# PTX ISA, section "Kernel Function Parameter Attributes".
PARAMETERS, OLD_PARAMETERS = 32_764, 4096
# Bytes. ptxas allows so much static shared memory, and a launch has so much static and dynamic
# shared memory together unless the kernel's attribute MaxDynamicSharedMemorySize allows more.
STATIC_SHARED = 48 * 1024
# KiB that the attribute may allow, with the static memory. A multiprocessor of sm_80 and later has
# 1 KiB more for each block, which the system takes.
MOST_SHARED = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227,
    120: 99, 121: 99,
}  # fmt: skip
# Of a tensor map: elements of a side of the tensor, which the machine keeps in 32 bits, elements of
# a side of the box, and the end of the strides in bytes: CUDA Driver API, cuTensorMapEncodeTiled.
MAP_SIZE, MAP_BOX, MAP_STRIDE_END = 2**32 - 1, 256, 2**40
LOCAL = 64 * 1024  # of a thread
GLOBAL = 64 * 1024 * 1024  # of a module
ALIGNMENT = 4096
MEMORY = {
    "shared": STATIC_SHARED, "local": LOCAL, "param": LOCAL, "global": GLOBAL, "const": GLOBAL,
}  # fmt: skip


def architecture(target: str) -> int:
    """Return the number of a target such as ``"sm_90a"``; 0 of one that has no number."""
    match = re.match(r"sm_(\d{1,4})", target)
    return int(match[1]) if match else 0


def most_shared(target: str) -> int:
    """Return the most bytes of static and dynamic shared memory of a block."""
    return 1024 * MOST_SHARED.get(architecture(target), STATIC_SHARED // 1024)


def most_parameters(target: str, version: tuple[int, int]) -> int:
    """Return the most bytes of the parameters of a kernel, by target and version of PTX ISA."""
    old = architecture(target) < 70 or version < (8, 1)
    return OLD_PARAMETERS if old else PARAMETERS


def at_most(value: int, most: int, what: str, line: int | None) -> int:
    """Return a value, or raise PtxSyntaxError if it is above a limit of the machine."""
    if value > most:
        raise PtxSyntaxError(f"{what}: got {value}, allowed: at most {most}", line)
    return value


def count(digits: str, most: int, what: str, line: int | None) -> int:
    """Return the number that decimal digits stand for, or raise PtxSyntaxError as `at_most`.

    Python refuses to convert thousands of digits, so the number of digits is checked first.
    """
    if len(digits) > 18:
        raise PtxSyntaxError(f"{what}: got a number of {len(digits)} digits, allowed: 18", line)
    return at_most(int(digits), most, what, line)
