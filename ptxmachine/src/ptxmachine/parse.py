"""Split PTX text into functions and variables; body.py reads the kernels.

The grammar is the part of the PTX ISA that compilers emit: one module, kernels (``.entry``),
functions (``.func``), variables, registers and labels in nested scopes, and guarded instructions.
This module does not know instructions. ``csrc/decode.cpp`` finds the handler of a mnemonic and
checks the operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ptxmachine import limits
from ptxmachine.body import Function, Kernel, bare, read
from ptxmachine.declarations import Variable, variable
from ptxmachine.errors import PtxSyntaxError


class Kernels(Mapping[str, Kernel]):
    """The kernels of a module by name.

    The first look-up of a name reads the text of its kernel, and may raise PtxSyntaxError. Reading
    is delayed because nvcc compiles templates to modules with dozens of kernels, most of which are
    never launched.
    """

    def __init__(self, entries: Sequence[Function], functions: dict[str, Function]) -> None:
        """Store the text of the kernels and of the functions that they call."""
        self._entries = {entry.name: entry for entry in entries}
        self._functions = functions
        self._read: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        """Return a kernel, or raise KeyError if there is no kernel of this name."""
        if name not in self._read:
            self._read[name] = read(self._entries[name], self._functions)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a kernel of this name, without reading the kernel."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the kernels."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of kernels."""
        return len(self._entries)


@dataclass
class Text:
    """A parsed module.

    Attributes:
        kernels: The kernels by name.
        variables: The variables outside the kernels.
        files: Names of the source files, by their number in ``.file``.
        target: The architecture, such as ``"sm_90a"``.
        version: Major and minor version of PTX ISA.
    """

    kernels: Kernels
    variables: list[Variable]
    files: dict[int, str]
    target: str
    version: tuple[int, int]


def parse(text: str) -> Text:
    """Parse a PTX module.

    Args:
        text: The whole text, from ``.version`` on.

    Returns:
        The parsed module. A kernel is read at the first look-up of its name.

    Raises:
        PtxSyntaxError: If a statement outside the kernels cannot be read. The message names the
            line.
    """
    text = _without_comments(text)
    pattern = r'^\s*\.file\s+(\d{1,9})\s+"([^"]*)"'
    files = {int(n): name for n, name in re.findall(pattern, text, re.M)}
    target = re.search(r"^\s*\.target\s+([\w, ]+)", text, re.M)
    version = re.search(r"^\s*\.version\s+(\d{1,4})\.(\d{1,4})", text, re.M)
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        limits.at_most(len(line), limits.LINE, "characters of a line", number)
    variables: list[Variable] = []
    entries: list[Function] = []
    functions: dict[str, Function] = {}
    number = 0
    while number < len(lines):
        line = bare(lines[number])
        if ".entry" in line or re.match(r"(\.\w+\s+)*\.func\b", line):
            body, number = _function(lines, number)
            if body is not None and ".entry" in body.head:
                entries.append(body)
            elif body is not None:
                functions[body.name] = body
            continue
        if re.match(r"(\.\w+\s+)*\.(global|const|shared)\b", line):
            statement, end = _statement(lines, number)
            variables.append(variable(statement, number + 1))
            number = end
        elif line.startswith(".section"):
            break
        elif line and not line.startswith("."):
            raise PtxSyntaxError(f"cannot read {line[:200]!r} outside a kernel", number + 1)
        number += 1
    architecture = target[1].split(",")[0].strip() if target else ""
    numbers = (int(version[1]), int(version[2])) if version else (0, 0)
    return Text(Kernels(entries, functions), variables, files, architecture, numbers)


def _without_comments(text: str) -> str:
    """Replace each comment between ``/*`` and ``*/`` with the line breaks that it contains."""

    def ends(match: re.Match[str]) -> str:
        if not match[0].endswith("*/"):
            start = text.count("\n", 0, match.start()) + 1
            raise PtxSyntaxError("a comment has no end", start)
        return "\n" * match[0].count("\n")

    return re.sub(r"/\*.*?(?:\*/|\Z)", ends, text, flags=re.S)


def _statement(lines: list[str], start: int) -> tuple[str, int]:
    """Return the statement that begins in line `start`, and the number of its last line."""
    parts = []
    for number in range(start, len(lines)):
        part, semicolon, _ = bare(lines[number]).partition(";")
        parts.append(part)
        if semicolon:
            return " ".join(parts), number
    raise PtxSyntaxError("a variable has no semicolon", start + 1)


def _function(lines: list[str], start: int) -> tuple[Function | None, int]:
    """Return the function that begins in line `start`, and the number of the line after its end.

    The function is None for a declaration without a body.
    """
    head: list[str] = []
    depth = 0
    first = column = -1
    for number in range(start, len(lines)):
        line = bare(lines[number])
        if first < 0:
            before, brace, _ = line.partition("{")
            head.append(before)
            if not brace:
                if ";" in line:
                    return None, number + 1
                continue
            first, column = number, len(before)
        depth += line.count("{") - line.count("}")
        if depth <= 0:
            function = Function(" ".join(head), lines, start, first, column, number)
            return function, number + 1
    what = "the body of a function has no end" if first >= 0 else "a function has no body"
    raise PtxSyntaxError(what, start + 1)
