"""The assembler that Triton uses for a GPU, and a known error of its versions before CUDA 13.3.

These versions of ptxas may reuse the registers of operand A of a ``wgmma`` that still runs
(triton-lang/triton issue 9433 and pull request 11781). Only GPUs of sm_90 have this instruction.
"""

from __future__ import annotations

from typing import NamedTuple

# The first version without the error.
FIXED = (13, 3)


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

    def warning(self, arch: int) -> str | None:
        """Return a warning if code for an architecture may be wrong, or None.

        Args:
            arch: Architecture of the GPU, such as 90 for sm_90.
        """
        if arch != 90 or tuple(map(int, self.version.split("."))) >= FIXED:
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
