"""The mix of instructions in the machine code of a kernel, which stands for what ptxas changes.

The PTX machine counts PTX instructions as they run. ptxas merges some of them, removes others and
adds its own. The number of instructions in the machine code, over that in the PTX, corrects the
count, and the shares of the units in the machine code divide it. Both are exact for code without
loops and branches, and near if the loop is most of the code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import Instruction, read

# Opcodes by unit, for sm_80 to sm_90; all others only take the time of their issue.
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
    """Count the instructions of a text of machine code by unit; "issue" is all of them.

    Args:
        sass: Output of ``cuobjdump --dump-sass``. NOP is not counted; it fills the end.

    Examples:
        >>> from fastbert.testing.ptx.sass import mix
        >>> mix("/*0010*/ @!P0 FADD R1, R2, R3 ;")
        {'fma': 1, 'alu': 0, 'lsu': 0, 'issue': 1}
    """
    opcodes = [found.name for found in read(sass) if found.name != "NOP"]
    units = [UNIT_OF.get(opcode) for opcode in opcodes]
    return {**{unit: units.count(unit) for unit in UNITS}, "issue": len(opcodes)}


def mix_of_path(path: Sequence[Instruction], tensor_flops: float) -> dict[str, float]:
    """Return the instructions of warps by unit of a kernel whose work is one loop.

    Args:
        path: The instructions that a warp executes in one turn of the loop, with products.
        tensor_flops: FLOPs of the products that ran in the kernel.

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
    """Return the instructions of warps by unit that the machine code is taken to execute.

    Args:
        instructions: PTX instructions of warps that ran.
        ptx: Instructions in the text of the PTX.
        found: `mix` of the machine code.
    """
    return {unit: instructions * number / ptx for unit, number in found.items()}
