"""The instructions and loops of machine code, as ``cuobjdump --dump-sass`` prints it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)\s*([^;]*);")
# What is known before an instruction, in `flow`.
State = TypeVar("State")

PREDICATE = re.compile(r"!?U?P(?:\d+|T)$")
# The first operand of these instructions is a register that they read, not a register they write.
READERS = re.compile(r"(?:\w*SETP\w*|FCHK|PLOP3|RET|BRX|JMX|CALL|BAR|NANOSLEEP|WARPSYNC|R2P)$")
ADDRESS = re.compile(r"0x([0-9a-f]+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction of machine code.

    Args:
        address: Address of the instruction in its function.
        guard: Predicate of the instruction, such as "@!P0"; empty if the instruction always runs.
        operation: Name with modifiers, such as "HGMMA.64x128x16.F32.BF16".
        rest: Text of the operands.
    """

    address: int
    guard: str
    operation: str
    rest: str

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.operation.partition(".")[0]

    @cached_property
    def modifiers(self) -> list[str]:
        """The parts of the operation after the opcode."""
        return self.operation.split(".")[1:]

    @cached_property
    def operands(self) -> list[str]:
        """The operands, in the order of the text."""
        return [operand for part in self.rest.split(",") if (operand := part.strip())]

    @cached_property
    def text(self) -> str:
        """The operation and its operands, separated by single spaces."""
        return " ".join(f"{self.operation} {self.rest}".split())

    @cached_property
    def target(self) -> int | None:
        """The address to which a branch goes, or None for another instruction."""
        last = ADDRESS.search(self.rest.rstrip()) if self.name == "BRA" else None
        return int(last[1], 16) if last else None


def read(sass: str) -> list[Instruction]:
    """Return the instructions of one function in their order.

    Args:
        sass: Part of the output of ``cuobjdump --dump-sass`` after one ``Function :``.

    Examples:
        >>> from fastbert.testing.machine_code import read
        >>> [instruction] = read("/*0010*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;")
        >>> instruction.address, instruction.guard, instruction.name, instruction.operands
        (16, '@!P0', 'LDG', ['R4', 'desc[UR4][R2.64]'])
    """
    return [
        Instruction(int(address, 16), guard.strip(), operation, rest)
        for address, guard, operation, rest in INSTRUCTION.findall(sass)
    ]


def bodies(sass: str) -> Iterator[dict[int, Instruction]]:
    """Yield the instructions of each function in the output of ``cuobjdump``, by address."""
    for text in re.split(r"^\s*Function :", sass, flags=re.MULTILINE):
        code = {instruction.address: instruction for instruction in read(text)}
        if code:
            yield code


def functions(sass: str) -> dict[str, str]:
    """Return the machine code of each function in the output of ``cuobjdump``, by mangled name."""
    parts = re.split(r"^.*Function : ", sass, flags=re.MULTILINE)[1:]
    return {part.split(None, 1)[0]: part for part in parts}


def loops(code: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the instructions of each loop, from the target of a backward branch to the branch."""
    for branch in code:
        if branch.target is not None and branch.target < branch.address:
            yield [x for x in code if branch.target <= x.address <= branch.address]


def width(instruction: Instruction) -> int:
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


def following(code: dict[int, Instruction]) -> dict[int, list[int]]:
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


def flow(
    code: dict[int, Instruction],
    next_addresses: dict[int, list[int]],
    first: State,
    step: Callable[[Instruction, State], State],
    merge: Callable[[State, State], State],
) -> dict[int, State]:
    """Return the state before each instruction that a path from the first instruction reaches.

    Args:
        code: The instructions of a function by address.
        next_addresses: The addresses that may follow each instruction, as from `following`.
        first: State before the first instruction.
        step: Function of an instruction and the state before it that returns the state after it.
        merge: Function of the states of two paths that returns the state where the paths join.
    """
    before = {min(code): first}
    waiting = [min(code)]
    while waiting:
        address = waiting.pop()
        after = step(code[address], before[address])
        for follower in next_addresses[address]:
            known = before.get(follower)
            merged = after if known is None else merge(known, after)
            if known is None or merged != known:
                before[follower] = merged
                waiting.append(follower)
    return before


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

    def step(instruction: Instruction, joins: _Joins) -> _Joins:
        barrier = next(iter(instruction.operands), "")
        if instruction.name == "BSSY":
            return joins | {barrier: frozenset(_targets(instruction, code))}
        if instruction.name == "BSYNC":
            # The path goes on at the added addresses, too.
            own = following[instruction.address]
            own += sorted((every | joins.get(barrier, frozenset())) - set(own))
        return joins

    start: _Joins = {}
    flow(code, following, start, step, _united)


def _united(one: _Joins, other: _Joins) -> _Joins:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in one | other}


def _targets(instruction: Instruction, code: dict[int, Instruction]) -> Iterator[int]:
    for operand in instruction.operands:
        match = re.match(r"0x([0-9a-f]+)$", operand)
        if match and int(match[1], 16) in code:
            yield int(match[1], 16)
