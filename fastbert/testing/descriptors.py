"""Find matrix products in SASS whose shared-memory descriptor is not what the program computed.

A Hopper ``HGMMA`` finds an operand in shared memory by a descriptor of 64 bits in two uniform
registers. The upper word holds the distance between groups of rows and the swizzle, which are known
when a kernel is compiled. ptxas 12.8 may move the addition of a constant to a descriptor before the
instructions that compute the descriptor, so that the sum has whatever the registers held before.
The upper word then depends on an argument of the kernel or on an earlier result.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

from fastbert.testing.machine_code import (
    PREDICATE,
    READERS,
    Instruction,
    bodies,
    flow,
    following,
    width,
)

REGISTER = re.compile(r"(U?R\d+|U?RZ)(?:\.reuse|\.X4)*$")
PAIR = re.compile(r"(U?R)(\d+)$")
WORD = 0xFFFFFFFF
# The truth table of the exclusive or of the first two of three words.
EXCLUSIVE_OR = 0x3C
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
# A word is the XOR of a constant and of unknown words, because ptxas exchanges two registers by
# three XORs. An unknown word is named by the instruction and the register that wrote it first.
_Word = tuple[frozenset[str], int]
# The words in the registers before an instruction, by name of the register.
_Words = dict[str, _Word]
NOTHING: frozenset[str] = frozenset()


def stale_descriptors(sass: str) -> list[str]:
    """Return the products with a descriptor whose upper word is not a known constant.

    Constants are followed through moves, sums and logical operations, along every path through the
    branches. The carry into an upper word counts as 0, because the lower word of a descriptor has
    only 14 bits in use.

    Args:
        sass: Output of ``cuobjdump --dump-sass`` for one binary.

    Returns:
        A sentence for each fault, with the address of the product.

    Examples:
        >>> from fastbert.testing.descriptors import stale_descriptors
        >>> stale_descriptors('''
        ...     /*0000*/ UMOV UR7, 0x40000040 ;
        ...     /*0010*/ ULDC.64 UR4, c[0x0][0x258] ;
        ...     /*0020*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        ...     /*0030*/ EXIT ;''')
        ['/*0020*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0: UR5 is no descriptor']
    """
    faults: dict[int, str] = {}
    for code in bodies(sass):
        if any(instruction.name == "HGMMA" for instruction in code.values()):
            _follow(code, faults)
    return [faults[address] for address in sorted(faults)]


def _follow(code: dict[int, Instruction], faults: dict[int, str]) -> None:
    start: _Words = {}
    before = flow(code, following(code), start, _after, _merge)
    for address, words in before.items():
        for register in _upper_words(code[address]):
            if not _constant(words.get(register)):
                faults[address] = (
                    f"/*{address:04x}*/ {code[address].text}: {register} is no descriptor"
                )


def _merge(one: _Words, other: _Words) -> _Words:
    return dict(one.items() & other.items())


def _constant(word: _Word | None) -> int | None:
    return word[1] if word is not None and not word[0] else None


def _upper_words(instruction: Instruction) -> Iterator[str]:
    """Yield the registers with the upper words of a product's descriptors."""
    match = DESCRIPTOR.search(instruction.rest)
    if instruction.name != "HGMMA" or match is None:
        return
    first = int(match[1])
    # The descriptor of A is in the first two registers, which are unused if A is in registers.
    if instruction.operands[1].startswith("gdesc"):
        yield f"UR{first + 1}"
    yield f"UR{first + 3}"


def _after(instruction: Instruction, words: _Words) -> _Words:
    written = list(_written(instruction))
    if not written:
        return words
    results = [] if instruction.guard else _results(instruction, words)
    # Of a register without a known result, all that is known is that nobody else has its word. The
    # unknown words that this instruction wrote before, in a loop, have no name any more.
    names = [f"{instruction.address:x} {register}" for register in written]
    after = {
        name: word
        for name, word in words.items()
        if name not in written and not word[0] & set(names)
    }
    for number, register in enumerate(written):
        result = results[number] if number < len(results) else None
        if not register.endswith("Z"):
            after[register] = result or (frozenset([names[number]]), 0)
    return after


def _written(instruction: Instruction) -> Iterator[str]:
    """Yield the names of the registers that an instruction writes."""
    if READERS.match(instruction.name):
        return
    first = next((x for x in instruction.operands if not PREDICATE.match(x)), "")
    match = PAIR.match(first)
    if match is not None:
        for number in range(width(instruction)):
            yield f"{match[1]}{int(match[2]) + number}"


def _results(instruction: Instruction, words: _Words) -> list[_Word | None]:
    """Return the words that an instruction writes, each None if it is unknown."""
    name, modifiers = instruction.name, instruction.modifiers
    given = [x for x in instruction.operands[1:] if not PREDICATE.match(x)]
    inputs = [_word(operand, words) for operand in given]
    constants = [_constant(word) for word in inputs]
    if name in ("MOV", "UMOV", "R2UR"):
        return inputs[:1]
    if name == "CS2R" and given == ["SRZ"]:
        return [(NOTHING, 0), (NOTHING, 0)]
    if name == "HFMA2" and given[:2] == ["-RZ", "RZ"]:
        # The result is a pair of fp16 constants, which ptxas uses to write any 32 bits.
        high, low = (struct.unpack("<H", struct.pack("<e", float(x)))[0] for x in given[2:4])
        return [(NOTHING, high << 16 | low)]
    if name == "UIADD3" and "64" in modifiers:
        return [None, _upper_sum(given[0], given[1], words)]
    if name in ("IADD3", "UIADD3", "VIADD"):
        return [_sum(inputs)]
    if name == "IMAD" and not {"WIDE", "HI"} & set(modifiers) and 0 in constants[:2]:
        return inputs[2:3]
    if name in ("LOP3", "ULOP3") and constants[3] == EXCLUSIVE_OR and constants[2] == 0:
        return [_exclusive_or(*inputs[:2])]
    if name in ("LOP3", "ULOP3"):
        return [_logical(constants[:4])]
    return [None]


def _word(operand: str, words: _Words) -> _Word | None:
    if re.match(r"-?0x[0-9a-f]+$", operand):
        return NOTHING, int(operand, 16) & WORD
    match = REGISTER.match(operand)
    if match is None:
        return None
    return (NOTHING, 0) if match[1].endswith("Z") else words.get(match[1])


def _next(register: str) -> str:
    match = PAIR.match(register)
    return f"{match[1]}{int(match[2]) + 1}" if match else ""


def _sum(inputs: Sequence[_Word | None]) -> _Word | None:
    others = [word for word in inputs if word != (NOTHING, 0)]
    if len(others) == 1:
        return others[0]
    constants = [word[1] for word in others if word is not None and not word[0]]
    return (NOTHING, sum(constants) & WORD) if len(constants) == len(others) else None


def _upper_sum(descriptor: str, constant: str, words: _Words) -> _Word | None:
    """Return the upper word of a descriptor plus or minus a constant, both of 64 bits."""
    minus, register = constant.startswith("-UR"), constant.removeprefix("-")
    low = _constant(_word(register, words))
    high = 0 if register.startswith("0x") else _constant(_word(_next(register), words))
    base = _constant(_word(_next(descriptor), words))
    if low is None or high is None or base is None:
        return None
    if minus:
        low, high = -low & WORD, ~high + (low == 0)
    # The lower word of the descriptor is small, so the sum has a carry if the constant is negative.
    return NOTHING, (base + high + (low >> 31)) & WORD


def _exclusive_or(a: _Word | None, b: _Word | None) -> _Word | None:
    return None if a is None or b is None else (a[0] ^ b[0], a[1] ^ b[1])


def _logical(constants: Sequence[int | None]) -> _Word | None:
    """Return the bitwise function of three words whose truth table is the fourth."""
    known = [constant for constant in constants if constant is not None]
    if len(known) != 4:
        return None
    *words, table = known
    result = 0
    for row in range(8):
        if table >> row & 1:
            a, b, c = (x if row >> bit & 1 else ~x for x, bit in zip(words, (2, 1, 0), strict=True))
            result |= a & b & c
    return NOTHING, result & WORD
