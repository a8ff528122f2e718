"""The instructions in the machine code of a kernel, by which counts of PTX are corrected.

The PTX machine counts PTX instructions as they run. ptxas merges some of them, removes others and
adds its own. The count is therefore multiplied by a ratio: the number of instructions in the
machine code over the number in the PTX. The corrected count is divided among the units by their
shares in the machine code. The result is exact for code without loops and branches, and nearly
right if one loop is most of the code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import Instruction, read

# Opcodes by unit, for sm_80 to sm_90. For any other opcode, only the issue is counted.
UNITS = {
    "fma": "FADD FMUL FFMA IMAD HADD2 HMUL2 HFMA2 IDP",
    "alu": (
        "BMSK FMNMX FSEL FSET FSETP F2FP I2FP IABS IADD3 IMNMX ISCADD ISETP LEA LOP3 MOV P2R PLOP3 "
        "PRMT R2P SEL SGXT SHF VABSDIFF VIADD VIMNMX"
    ),
    "lsu": "ATOM ATOMG ATOMS LDG LDGSTS LDL LDS LDSM RED SHFL STG STL STS STSM",
}
UNIT_OF = {opcode: unit for unit, opcodes in UNITS.items() for opcode in opcodes.split()}


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a binary as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return cuobjdump("--dump-sass", path)


def mix(sass: str) -> dict[str, int]:
    """Count the instructions in a text of machine code by unit; "issue" counts all of them.

    Args:
        sass: Output of ``cuobjdump --dump-sass``. NOP is not counted, because it only fills the end
            of the code.

    Examples:
        >>> from fastbert.testing.ptx.sass import mix
        >>> mix("/*0010*/ @!P0 FADD R1, R2, R3 ;")
        {'fma': 1, 'alu': 0, 'lsu': 0, 'issue': 1}
    """
    opcodes = [found.name for found in read(sass) if found.name != "NOP"]
    units = [UNIT_OF.get(opcode) for opcode in opcodes]
    return {**{unit: units.count(unit) for unit in UNITS}, "issue": len(opcodes)}


def mix_of_path(path: Sequence[Instruction], tensor_flops: float) -> dict[str, float]:
    """Return the number of warp instructions by unit, for a kernel whose work is one loop.

    Args:
        path: The instructions that a warp executes in one iteration of the loop, including matrix
            products.
        tensor_flops: FLOPs of all matrix products that the kernel executed.

    Examples:
        >>> from fastbert.testing.machine_code import read
        >>> from fastbert.testing.ptx.sass import mix_of_path
        >>> path = read("/*0000*/ HGMMA.64x8x16.F32 R1, R2 ; /*0010*/ FADD R1, R2, R3 ;")
        >>> mix_of_path(path, 3 * 2 * 64 * 8 * 16)["fma"]  # Three turns of four warps.
        12.0
    """
    turn = 0.0
    for instruction in path:
        if instruction.name == "HGMMA":
            rows, columns, depth = map(int, instruction.modifiers[0].split("x"))
            # Four warps execute one product together.
            turn += 2 * rows * columns * depth / 4
    units = [UNIT_OF.get(instruction.name) for instruction in path]
    found = {**{unit: units.count(unit) for unit in UNITS}, "issue": len(path)}
    return {unit: tensor_flops / turn * number for unit, number in found.items()}


def corrected(instructions: float, ptx: int, found: dict[str, int]) -> dict[str, float]:
    """Return an estimate of the warp instructions that the machine code executes, by unit.

    Args:
        instructions: Number of PTX instructions that warps executed.
        ptx: Number of instructions in the text of the PTX.
        found: Result of `mix` for the machine code.
    """
    return {unit: instructions * number / ptx for unit, number in found.items()}
