"""The instructions and loops of machine code, as ``cuobjdump --dump-sass`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)\s*([^;]*);")
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


def functions(sass: str) -> dict[str, str]:
    """Return the machine code of each function in the output of ``cuobjdump``, by mangled name."""
    parts = re.split(r"^.*Function : ", sass, flags=re.MULTILINE)[1:]
    return {part.split(None, 1)[0]: part for part in parts}


def loops(code: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the instructions of each loop, from the target of a backward branch to the branch."""
    for branch in code:
        if branch.target is not None and branch.target < branch.address:
            yield [x for x in code if branch.target <= x.address <= branch.address]
