"""Find 32-bit products in the address arithmetic of a kernel, from its Triton IR (TTIR).

A tensor may have more than 2**31 elements. If a kernel multiplies a row by a stride in 32 bits and
widens the product afterwards, the product may already have wrapped. Neither the PTX nor a small
test shows this error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# The search for products in an offset goes from the operation that makes the offset to its
# operands, and on to their operands. It ends at these operations. The result of a division, a
# remainder or a load is an index, and a product inside an index is no product inside the offset.
BEGINNINGS = (
    "argument",
    "arith.cmpi",
    "arith.constant",
    "arith.divsi",
    "arith.divui",
    "arith.remsi",
    "arith.remui",
    "tt.get_num_programs",
    "tt.get_program_id",
    "tt.load",
    "tt.make_range",
)
# These operations return their operand with another width or shape.
UNCHANGED = (
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.splat",
    "tt.trans",
)
NAME = r"%[\w$.\-]+(?:#\d+)?"
LOCATION = re.compile(r"\s*loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)")
OPERATION = re.compile(rf"(?:({NAME})(?::(\d+))? = )?\"?([a-z_]+\.[\w.]+)\"?(.*)$")


class Value(NamedTuple):
    """An SSA value: the operation that makes it, its operands, its type and its line of TTIR.

    If a loop, a branch or a block defines a value from one of several others, the operation of this
    value is "join", and its operands are the others.
    """

    operation: str
    operands: list[str]
    type: str = ""
    line: str = ""


class Graph:
    """The values of one module of TTIR by name.

    The attribute ``strides`` is the set of the arguments whose names begin with "stride", and
    ``offsets`` is the list of the offsets that are added to pointers.

    Args:
        ttir: The text of the module.
        arguments: The names of the kernel's arguments in order, without its constexprs.

    Raises:
        ValueError: If the TTIR has a while loop.
    """

    def __init__(self, ttir: str, arguments: list[str]) -> None:
        """Read the module line by line."""
        self.values: dict[str, Value] = {}
        self.strides: set[str] = set()
        self.offsets: list[str] = []
        self._arguments = arguments
        self._blocks: dict[str, list[str]] = {}
        self._jumps: list[tuple[str, list[str]]] = []
        # For each open region, the k-th list has the names that get the k-th yielded value.
        self._regions: list[list[list[str]]] = []
        for line in ttir.splitlines():
            self._read(LOCATION.sub("", line).strip(), line)
        for label, passed in self._jumps:
            for target, source in zip(self._blocks[label], passed, strict=True):
                self._join(target, source)

    def _read(self, text: str, line: str) -> None:
        targets: list[list[str]] = []
        if text.startswith("}"):
            targets = self._regions.pop()
        elif text.startswith("^"):
            label, _, rest = text.partition("(")
            self._blocks[label.rstrip(":")] = re.findall(rf"({NAME}):", rest)
            for name in self._blocks[label.rstrip(":")]:
                self.values.setdefault(name, Value("join", []))
        elif text.startswith("tt.func"):
            self._read_function(text)
        elif (match := OPERATION.match(text)) is not None:
            name, count, operation, rest = match.groups()
            names = [] if name is None else [name]
            if count is not None:
                names = [f"{name}#{i}" for i in range(int(count))]
            targets = self._read_operation(operation, names, rest, line)
        if text.endswith("{"):
            self._regions.append(targets)

    def _read_function(self, text: str) -> None:
        names = re.findall(rf"({NAME}): ", text)
        for position, name in enumerate(names):
            self.values[name] = Value("argument", [])
            known = self._arguments[position] if len(names) == len(self._arguments) else name[1:]
            if known.startswith("stride"):
                self.strides.add(name)

    def _read_operation(
        self, operation: str, results: list[str], rest: str, line: str
    ) -> list[list[str]]:
        """Add the results of an operation to ``values``.

        Returns:
            One list for each value that the operation's region yields: the names that get this
            value.
        """
        operands = re.findall(NAME, rest.partition(" : ")[0])
        if operation == "scf.for":
            # The text is: %i = %low to %high step %step iter_args(%inside = %initial, ...) -> ...
            self.values[operands[0]] = Value("loop", [operands[1]])
            pairs = re.findall(rf"({NAME}) = ({NAME})", rest.partition("iter_args(")[2])
            for name, (inside, initial) in zip(results, pairs, strict=True):
                self._join(inside, initial)
                self._join(name, initial)
            return [[name, pair[0]] for name, pair in zip(results, pairs, strict=True)]
        if operation == "scf.while":
            raise ValueError("addresses: a while loop in TTIR is not understood")
        if operation == "scf.if":
            return [[name] for name in results]
        if operation == "scf.yield":
            for targets, source in zip(self._regions[-1], operands, strict=True):
                for target in targets:
                    self._join(target, source)
        elif operation.startswith("cf."):
            for label, passed in re.findall(r"(\^bb\d+)\(([^)]*)\)", rest):
                self._jumps.append((label, re.findall(NAME, passed.partition(" : ")[0])))
        else:
            if operation == "tt.addptr":
                self.offsets.append(operands[1])
            for name in results:
                self.values[name] = Value(operation, operands, rest.rpartition(" : ")[2], line)
        return []

    def _join(self, target: str, source: str) -> None:
        self.values.setdefault(target, Value("join", [])).operands.append(source)

    def reached(self, name: str) -> Iterator[tuple[str, Value]]:
        """Yield a value and all values from which it is computed, with their names."""
        seen, waiting = {name}, [name]
        while waiting:
            value = self.values[waiting[-1]]
            yield waiting.pop(), value
            if value.operation not in BEGINNINGS:
                new = set(value.operands) - seen
                seen |= new
                waiting += new

    def made_of(self, name: str) -> set[str]:
        """Return the operations from which a value is computed."""
        return {value.operation for _, value in self.reached(name)}

    def is_known(self, name: str) -> bool:
        """Return whether a value is computed from constants and ranges alone."""
        unknown = {*BEGINNINGS, "loop"} - {"arith.constant", "tt.make_range"}
        return not self.made_of(name) & unknown

    def is_stride(self, name: str) -> bool:
        """Return whether a value is a stride of the kernel, in any width or shape."""
        while self.values[name].operation in UNCHANGED:
            name = self.values[name].operands[0]
        return name in self.strides

    def grows(self, product: Value) -> bool:
        """Return whether a 32-bit product can exceed 32 bits.

        A product can exceed 32 bits in three cases: neither factor is known at compile time, one
        factor is a stride, or one factor is a position inside a tensor. The product of a program's
        number and a block size cannot exceed 32 bits.
        """
        unknown = [name for name in product.operands if not self.is_known(name)]
        if len(unknown) == 2:
            return True
        return any(self.is_stride(n) or "tt.make_range" in self.made_of(n) for n in unknown)


def narrow_products(ttir: str, arguments: list[str]) -> list[str]:
    """Find the 32-bit products that reach an address and may wrap.

    Args:
        ttir: The TTIR of the kernel, with locations.
        arguments: The names of the kernel's arguments in order, without its constexprs.

    Returns:
        The products in the form "name at file.py:line", sorted.

    Raises:
        ValueError: If the TTIR has a while loop, which is not supported.
    """
    graph = Graph(ttir, arguments)
    places = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", ttir, re.MULTILINE))
    faults = {
        f"{name} at {_place(value.line, places)}"
        for offset in set(graph.offsets)
        for name, value in graph.reached(offset)
        if value.operation == "arith.muli" and re.search(r"(^|x)i32>?$", value.type)
        if graph.grows(value)
    }
    return sorted(faults)


def _place(line: str, places: dict[str, str]) -> str:
    """Return the source of a line of TTIR as "file.py:line".

    For code of a function that a kernel calls, the source is the line in this function.
    """
    waiting = re.findall(r"#loc\d*", line)[-1:]
    while waiting:
        text = places.get(waiting.pop(0), "")
        match = re.search(r'"[^"]*?([^/"]*\.py)":(\d+)', text)
        if match is not None:
            return f"{match[1]}:{match[2]}"
        waiting = re.findall(r"#loc\d*", text) + waiting
    return "an unknown line"
