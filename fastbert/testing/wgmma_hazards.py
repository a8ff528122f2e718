"""Find registers in SASS that are written while a matrix product may still read them.

A Hopper ``HGMMA`` runs asynchronously. If operand A of the instruction is in registers, no other
instruction may write these registers before a ``WARPGROUP.DEPBAR`` that waits for the product. Some
versions of ptxas break this rule (triton-lang/triton issue 9433); NVIDIA lists the fix for CUDA
13.3.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from fastbert.testing.machine_code import Instruction, read

PREDICATE = re.compile(r"!?U?P(?:\d+|T)$")
REGISTER = re.compile(r"R(\d+)(?:\.\w+)*$")
# The first operand of these instructions is a register that they read, not a register they write.
READERS = re.compile(r"(?:\w*SETP\w*|FCHK|PLOP3|RET|BRX|JMX|CALL|BAR|NANOSLEEP|WARPSYNC|R2P)$")
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
    for text in re.split(r"^\s*Function :", sass, flags=re.MULTILINE):
        code = {instruction.address: instruction for instruction in read(text)}
        if any(_operand(instruction) for instruction in code.values()):
            _follow(code, faults)
    return [faults[key] for key in sorted(faults)]


# The products in flight. A key has a register of operand A and the address of the product, and its
# value is the product's age. The age is the number of groups that have ended after the group of the
# product; where paths join, it is the lowest age.
_Flight = dict[tuple[int, int], int]


def _follow(code: dict[int, Instruction], faults: dict[tuple[int, int], str]) -> None:
    following = _following(code)
    before: dict[int, _Flight] = {min(code): {}}
    waiting = [min(code)]
    while waiting:
        instruction = code[waiting.pop()]
        after = _step(instruction, before[instruction.address], faults)
        for address in following[instruction.address]:
            known = before.get(address)
            merged = dict(after) if known is None else _merge(known, after)
            if merged != known:
                before[address] = merged
                waiting.append(address)


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
    return range(int(match[1]), int(match[1]) + _width(instruction))


def _width(instruction: Instruction) -> int:
    """Return the number of registers that an instruction writes."""
    name, modifiers = instruction.name, instruction.modifiers
    if name == "HGMMA":
        columns = int(modifiers[0].split("x")[1])
        return columns // 2 if "F32" in modifiers else columns // 4
    if name == "HMMA" or "128" in modifiers:
        return 4
    if name == "LDSM":
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    wide = {"64", "WIDE", "F64", "S64", "U64"} & set(modifiers)
    is_double = re.match(r"D(?:ADD|MUL|FMA|MMA)$", name) or (
        name == "CS2R" and "32" not in modifiers
    )
    return 2 if wide or is_double else 1


def _following(code: dict[int, Instruction]) -> dict[int, list[int]]:
    """Return the addresses of the instructions that may follow each instruction."""
    order = sorted(code)
    next_of = dict(itertools.pairwise(order))
    returns = [next_of[a] for a in order if code[a].name == "CALL" and a in next_of]
    next_addresses: dict[int, list[int]] = {address: [] for address in order}
    for address in order:
        instruction, following = code[address], next_addresses[address]
        ends = instruction.name in ("EXIT", "RET", "BRA", "BRX", "JMP", "CALL", "BREAK")
        if (not ends or instruction.guard or "!UPT" in instruction.operands) and address in next_of:
            following.append(next_of[address])
        if instruction.name in ("BRA", "JMP", "CALL"):
            following += _targets(instruction, code)
            if not following and address in next_of:
                # The branch target is a name in another section, so the next instruction follows.
                following.append(next_of[address])
        elif instruction.name == "RET":
            following += returns
    _join(code, next_addresses)
    return next_addresses


# A key is a convergence barrier. Its value has the addresses at which the barrier's threads may
# meet.
_Joins = dict[str, frozenset[int]]


def _join(code: dict[int, Instruction], following: dict[int, list[int]]) -> None:
    """Add to `following` the addresses at which the threads of each BSYNC may continue.

    A BSYNC continues at the target of a BSSY with the same barrier on a path to the BSYNC.
    """
    every: frozenset[int] = frozenset()
    if any(instruction.name == "BMOV" for instruction in code.values()):
        # BMOV moves barriers between registers, so a BSYNC may wait at any barrier.
        joins = [_targets(x, code) for x in code.values() if x.name == "BSSY"]
        every = frozenset(itertools.chain.from_iterable(joins))
    before: dict[int, _Joins] = {min(code): {}}
    waiting = [min(code)]
    while waiting:
        instruction = code[waiting.pop()]
        after = dict(before[instruction.address])
        barrier = next(iter(instruction.operands), "")
        if instruction.name == "BSSY":
            after[barrier] = frozenset(_targets(instruction, code))
        elif instruction.name == "BSYNC":
            own = following[instruction.address]
            own += sorted((every | after.get(barrier, frozenset())) - set(own))
        for address in following[instruction.address]:
            known = before.get(address)
            merged = _united(known or {}, after)
            if merged != known:
                before[address] = merged
                waiting.append(address)


def _united(one: _Joins, other: _Joins) -> _Joins:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in one | other}


def _targets(instruction: Instruction, code: dict[int, Instruction]) -> Iterator[int]:
    for operand in instruction.operands:
        match = re.match(r"0x([0-9a-f]+)$", operand)
        if match and int(match[1], 16) in code:
            yield int(match[1], 16)
