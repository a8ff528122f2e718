"""Read the numbers, variables and parameters in a PTX text."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ptxmachine import limits
from ptxmachine.errors import PtxSyntaxError

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


@dataclass
class Variable:
    """A variable in ``.global``, ``.const``, ``.shared`` or ``.local`` memory."""

    name: str
    space: str
    align: int
    size: int
    initial: bytes = b""
    external: bool = False
    line: int | None = None


@dataclass
class Parameter:
    """A kernel parameter: its PTX type, its size in bytes and its offset."""

    name: str
    type: str
    align: int
    size: int
    offset: int


_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?")


def integer(token: str, line: int) -> int:
    """Return the value of an integer of at most 64 bits, or raise PtxSyntaxError."""
    match = _INTEGER.fullmatch(token)
    if match is None:
        raise PtxSyntaxError(f"cannot read the integer {token[:100]!r}", line)
    digits = match[2]
    if len(digits) > 80:
        raise PtxSyntaxError(f"an integer has {len(digits)} digits, allowed: 64 bits", line)
    octal = re.fullmatch(r"0[0-7]+", digits)
    value = int(digits, 8 if octal else 0) * (-1 if match[1] == "-" else 1)
    if not -(1 << 63) <= value < 1 << 64:
        raise PtxSyntaxError(f"the integer {token} has more than 64 bits", line)
    return value


def float_bits(token: str, bits: int, line: int) -> int:
    """Return the bits of the number `token` in fp32 or fp64, or raise PtxSyntaxError."""
    hexadecimal = re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", token)
    try:
        if hexadecimal is None:
            value = float(token)
        else:
            single, double = hexadecimal.groups()
            raw, given = int(single or double, 16), 32 if single else 64
            if given == bits:
                return raw
            [value] = struct.unpack("<f" if single else "<d", raw.to_bytes(given // 8, "little"))
        return int.from_bytes(struct.pack("<d" if bits == 64 else "<f", value), "little")
    except (ValueError, OverflowError):
        message = f"cannot read {token[:100]!r} as a float of {bits} bits"
        raise PtxSyntaxError(message, line) from None


_VARIABLE = re.compile(
    r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(global|const|shared|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.([a-z]+)(\d+)\s+([\w$]+)((?:\[\d*\])*)"
    r"(?:\s*=\s*(.*))?$"
)


def variable(statement: str, line: int) -> Variable:
    """Return the variable that a statement declares, or raise PtxSyntaxError."""
    match = _VARIABLE.match(statement.strip())
    if match is None or match[5] not in BYTES:
        raise PtxSyntaxError(f"cannot read the variable {statement.strip()[:200]!r}", line)
    linkage, space, align, kind, bits, name, dims, initial = match.groups()
    what = f"bytes of {name} in .{space}"
    size = width = BYTES[bits]
    sizes = re.findall(r"\[(\d*)\]", dims)
    for elements in sizes:
        size *= limits.count(elements or "0", limits.MEMORY[space], what, line)
        limits.at_most(size, limits.MEMORY[space], what, line)
    data = b"".join(_value(token, kind, width, line) for token in _tokens(initial))
    if "" in sizes and data:
        size = len(data)
    if len(data) > size:
        raise PtxSyntaxError(f"{name} has {size} bytes, and its values have {len(data)}", line)
    alignment = _alignment(align, width, name, line)
    return Variable(name, space, alignment, size, data, "extern" in linkage, line)


def _tokens(initial: str | None) -> list[str]:
    """Return the texts of the numbers in an initial value. None has no numbers."""
    return re.findall(r"[^\s,{}]+", initial or "")


def _value(token: str, kind: str, width: int, line: int) -> bytes:
    if kind == "f":
        if width < 4:
            raise PtxSyntaxError(f"cannot read {token[:100]!r} as a float of 16 bits", line)
        return float_bits(token, 8 * width, line).to_bytes(width, "little")
    return (integer(token, line) % (1 << (8 * width))).to_bytes(width, "little")


def _alignment(given: str | None, width: int, name: str, line: int) -> int:
    align = limits.count(given or str(width), limits.ALIGNMENT, f"alignment of {name}", line)
    if align < 1 or align & (align - 1):
        message = f"alignment of {name}: got {align}, allowed: powers of 2"
        raise PtxSyntaxError(message, line)
    return align


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)(?:\s+\.ptr(?:\s+\.\w+)?"
    r"(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?"
)


def parameters(head: str, line: int) -> list[Parameter]:
    """Return the parameters of a kernel, or the results and the parameters of a function."""
    offset = 0
    found: list[Parameter] = []
    for align, kind, bits, name, elements in _PARAMETER.findall(head):
        if bits not in BYTES:
            break
        what = f"bytes of the parameter {name}"
        size = BYTES[bits] * limits.count(elements or "1", limits.PARAMETERS, what, line)
        alignment = max(_alignment(align, 1, name, line), BYTES[bits])
        offset = -(-offset // alignment) * alignment
        found.append(Parameter(name, kind + bits, alignment, size, offset))
        offset = limits.at_most(offset + size, limits.PARAMETERS, "bytes of parameters", line)
    if len(found) != len(re.findall(r"\.param\b", head)):
        raise PtxSyntaxError(f"cannot read the parameters in {head.strip()[:200]!r}", line)
    return found
