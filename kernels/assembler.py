"""The assembler that Triton uses for a GPU, and two errors of its older versions.

Before CUDA 13.3, ptxas may reuse the registers of operand A of a ``wgmma`` that still runs
(triton-lang/triton issue 9433 and pull request 11781). Before CUDA 12.9, it may also compute a
descriptor of a ``wgmma`` from the wrong registers (fastbert/testing/descriptors.py). On an H200,
the second error gave wrong gradients of short attention, and accesses to memory out of bounds. Only
GPUs of sm_90 have this instruction.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# The first versions without the errors.
FIXED = (13, 3)
KEEPS_DESCRIPTORS = (12, 9)


class Assembler(NamedTuple):
    """The ptxas that Triton uses for an architecture.

    Args:
        path: Path of the program.
        version: Version of the program, such as "12.8".
        variable: Environment variable of Triton that names another program.
    """

    path: str
    version: str
    variable: str

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, such as (12, 8)."""
        return tuple(map(int, self.version.split(".")))

    def warning(self, arch: int) -> str | None:
        """Return a warning if code for an architecture may be wrong, or None.

        Args:
            arch: Architecture of the GPU, such as 90 for sm_90.
        """
        if arch != 90 or self.release >= FIXED:
            return None
        return (
            f"ptxas {self.version} may overwrite operands of a running wgmma on sm_90; "
            f"{'.'.join(map(str, FIXED))} does not. `fastbert check --aot --arch 90` searches the "
            f"kernels for such code, and {self.variable} names another ptxas."
        )


def assembler(arch: int) -> Assembler:
    """Return the assembler that Triton uses for an architecture.

    Triton takes the program that TRITON_PTXAS_PATH names. For newer GPUs it takes the program of
    TRITON_PTXAS_BLACKWELL_PATH: from sm_90 in Triton 3.9, and from sm_100 in Triton 3.6. A program
    that does not run is replaced by the program of the wheel, without a message.

    Args:
        arch: Architecture of the GPU, such as 90 for sm_90.

    Raises:
        ImportError: If Triton is not installed.
    """
    from triton.backends.nvidia.compiler import get_ptxas, knobs

    tool = get_ptxas(arch)
    is_newer = tool.path == knobs.nvidia.ptxas_blackwell.path
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if is_newer else "TRITON_PTXAS_PATH"
    return Assembler(tool.path, tool.version, variable)


@functools.cache
def loses_descriptors(arch: int) -> bool:
    """Tell whether descriptors of a ``wgmma`` may be wrong in Triton's code for an architecture.

    Args:
        arch: Architecture of the GPU, such as 90 for sm_90.
    """
    return arch == 90 and assembler(arch).release < KEEPS_DESCRIPTORS
