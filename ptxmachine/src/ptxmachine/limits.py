"""The limits of the machine for PTX texts, and the limits of hardware for launches.

A text that exceeds a limit raises PtxSyntaxError before memory of that size is allocated. The
limits of hardware are from the CUDA C++ Programming Guide, section "Compute Capabilities", table
"Technical Specifications per Compute Capability", unless a comment names another source. The limits
of instructions are in csrc/machine.h.
"""

from __future__ import annotations

import re

from ptxmachine.errors import PtxSyntaxError

LINE = 100_000  # characters per line
REGISTERS = 65_536  # registers per kernel, including the functions that it calls
SCOPES = 256  # depth of nested braces
CALLS = 64  # depth of nested calls
INLINED = 100_000  # lines and statements that calls and brx.idx add to a kernel
THREADS = 1024  # threads per block
# A block may have all registers of a multiprocessor. Registers are allocated in multiples of 8 for
# each thread and of 4 warps for each block (cuda_occupancy.h of the CUDA toolkit).
BLOCK_REGISTERS, REGISTER_UNIT, WARP_UNIT = 65_536, 8, 4
THREAD_REGISTERS = 256  # most registers per thread that setmaxnreg may set
BLOCK = (1024, 1024, 64)  # threads of a block in x, y and z
GRID = (2**31 - 1, 65_535, 65_535)  # blocks of a grid in x, y and z
BLOCKS = 2**31 - 1  # blocks per grid; the machine numbers blocks with 32 bits
# The most blocks per cluster without the attribute NonPortableClusterSizeAllowed, and the first
# architecture with clusters.
CLUSTER, CLUSTER_TARGET = 8, 90
# Bytes of the parameters of a kernel. The first limit holds for sm_70 and later with PTX ISA 8.1
# and later. The second limit holds otherwise (PTX ISA, section "Kernel Function Parameter
# Attributes").
PARAMETERS, OLD_PARAMETERS = 32_764, 4096
# Bytes of static shared memory that ptxas allows. The sum of static and dynamic shared memory has
# the same limit unless the attribute MaxDynamicSharedMemorySize of the kernel allows more.
STATIC_SHARED = 48 * 1024
# Architecture → KiB of static and dynamic shared memory that MaxDynamicSharedMemorySize may allow.
# From sm_80 on, the CUDA system reserves 1 KiB more for each block, which these numbers exclude.
MOST_SHARED = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227,
    120: 99, 121: 99,
}  # fmt: skip
# Limits of a tensor map: the most elements in a dimension of the tensor (32 bits in the machine),
# the most elements in a dimension of the box, and an exclusive limit of the strides in bytes (CUDA
# Driver API, cuTensorMapEncodeTiled).
MAP_SIZE, MAP_BOX, MAP_STRIDE_END = 2**32 - 1, 256, 2**40
LOCAL = 64 * 1024  # bytes of local memory per thread
GLOBAL = 64 * 1024 * 1024  # bytes of global variables per module
ALIGNMENT = 4096  # bytes of the largest alignment of a variable or parameter
MEMORY = {
    "shared": STATIC_SHARED, "local": LOCAL, "param": LOCAL, "global": GLOBAL, "const": GLOBAL,
}  # fmt: skip


def architecture(target: str) -> int:
    """Return the number in a target such as ``"sm_90a"``, or 0 if the target has no number."""
    match = re.match(r"sm_(\d{1,4})", target)
    return int(match[1]) if match else 0


def most_shared(target: str) -> int:
    """Return the most bytes of shared memory, static and dynamic, for a block on `target`."""
    return 1024 * MOST_SHARED.get(architecture(target), STATIC_SHARED // 1024)


def most_cluster(target: str) -> int:
    """Return the most blocks that a cluster on `target` may have."""
    return CLUSTER if architecture(target) >= CLUSTER_TARGET else 1


def most_parameters(target: str, version: tuple[int, int]) -> int:
    """Return the most bytes of kernel parameters for `target` and the PTX ISA `version`."""
    old = architecture(target) < 70 or version < (8, 1)
    return OLD_PARAMETERS if old else PARAMETERS


def at_most(value: int, most: int, what: str, line: int | None) -> int:
    """Return `value`, or raise PtxSyntaxError if it is greater than `most`."""
    if value > most:
        raise PtxSyntaxError(f"{what}: got {value}, allowed: at most {most}", line)
    return value


def count(digits: str, most: int, what: str, line: int | None) -> int:
    """Return the value of decimal digits, or raise PtxSyntaxError if it is greater than `most`.

    ``int`` raises ValueError for thousands of digits, so the number of digits is checked first.
    """
    if len(digits) > 18:
        raise PtxSyntaxError(f"{what}: got a number of {len(digits)} digits, allowed: 18", line)
    return at_most(int(digits), most, what, line)
