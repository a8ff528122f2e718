"""Find registers in SASS that are written while a matrix product may still read them.

A Hopper ``HGMMA`` runs asynchronously. If operand A of the instruction is in registers, no other
instruction may write these registers before a ``WARPGROUP.DEPBAR`` that waits for the product. Some
versions of ptxas break this rule (triton-lang/triton issue 9433); NVIDIA lists the fix for CUDA
13.3.
"""

from __future__ import annotations

import re

from fastbert.testing.machine_code import (
    PREDICATE,
    READERS,
    Instruction,
    bodies,
    flow,
    following,
    width,
)

REGISTER = re.compile(r"R(\d+)(?:\.\w+)*$")
# Number of registers of operand A of one product, which is equal for every dtype.
OPERAND_REGISTERS = 4
# The age (see `_Flight`) of a product whose group has not ended.
OPEN = -1


def overwritten_operands(sass: str) -> list[str]:
    """Return the instructions that write operand A of a product that may still run.

    Every path through the branches is followed. A ``WARPGROUP.DEPBAR`` waits until at most n groups
    are pending. On a path, a product counts as running until such a wait comes after its own group
    and at least n further groups.

    Args:
        sass: Output of ``cuobjdump --dump-sass`` for one binary.

    Returns:
        A sentence for each fault, with the addresses of both instructions.

    Examples:
        >>> from fastbert.testing.wgmma_hazards import overwritten_operands
        >>> overwritten_operands('''
        ...     /*0000*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        ...     /*0010*/ MOV R5, R60 ;
        ...     /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        ...     /*0030*/ EXIT ;''')
        ['/*0010*/ MOV R5, R60: R5 is operand A of the HGMMA at 0000, which may still run']
    """
    faults: dict[tuple[int, int], str] = {}
    for code in bodies(sass):
        if any(_operand(instruction) for instruction in code.values()):
            _follow(code, faults)
    return [faults[key] for key in sorted(faults)]


# The products in flight. A key has a register of operand A and the address of the product, and its
# value is the product's age. The age is the number of groups that have ended after the group of the
# product; where paths join, it is the lowest age.
_Flight = dict[tuple[int, int], int]


def _follow(code: dict[int, Instruction], faults: dict[tuple[int, int], str]) -> None:
    def step(instruction: Instruction, flight: _Flight) -> _Flight:
        return _step(instruction, flight, faults)

    start: _Flight = {}
    flow(code, following(code), start, step, _merge)


def _merge(one: _Flight, other: _Flight) -> _Flight:
    return {key: min(x.get(key, 1 << 30) for x in (one, other)) for key in one | other}


def _step(instruction: Instruction, flight: _Flight, faults: dict[tuple[int, int], str]) -> _Flight:
    """Return the products in flight after an instruction; add overwritten operands to `faults`."""
    written = set(_written(instruction))
    for register, product in flight:
        if register in written and product != instruction.address:
            faults[instruction.address, product] = (
                f"/*{instruction.address:04x}*/ {instruction.text}: R{register} is operand A of "
                f"the HGMMA at {product:04x}, which may still run"
            )
    after = dict(flight)
    for register in _operand(instruction):
        after[register, instruction.address] = OPEN
    if instruction.name == "HGMMA" and "gsb0" in instruction.operands:
        return {key: age + 1 for key, age in after.items()}
    if instruction.operation.startswith("WARPGROUP.DEPBAR"):
        pending = int(instruction.operands[-1], 16)
        return {key: age for key, age in after.items() if age < pending}
    return after


def _operand(instruction: Instruction) -> range:
    """Return the registers of operand A of a product; none if A is in shared memory."""
    if instruction.name != "HGMMA" or (match := REGISTER.match(instruction.operands[1])) is None:
        return range(0)
    first = int(match[1])
    return range(first, first + OPERAND_REGISTERS)


def _written(instruction: Instruction) -> range:
    """Return the registers that an instruction writes."""
    if READERS.match(instruction.name):
        return range(0)
    operands = iter(instruction.operands)
    first = next((x for x in operands if not PREDICATE.match(x)), "")
    match = REGISTER.match(first)
    if match is None:
        return range(0)
    return range(int(match[1]), int(match[1]) + width(instruction))
