"""Split PTX text into kernels, variables, and instructions with operands.

The grammar is that of the PTX ISA, as far as compilers emit it: one module, kernels (``.entry``),
functions (``.func``), variables, registers and labels in nested scopes, and guarded instructions.
A call is replaced by the body of the function, whose parameters become local memory. Meaning is not
known here; ``csrc/ptx/decode.cpp`` finds the handler of a mnemonic.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
# In the order of `Special` in csrc/ptx/program.h.
SPECIALS = [
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
    "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%smid",
    "%nsmid", "%gridid", "%clock", "%clock64", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt", "%cluster_ctaid.x", "%cluster_nctaid.x", "%cluster_ctarank",
    "%cluster_nctarank", "%total_smem_size", "%dynamic_smem_size", "%globaltimer",
    "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.y", "%cluster_nctaid.z",
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y",
    "%nclusterid.z",
]  # fmt: skip


class Operand(NamedTuple):
    """One operand, as csrc/ptx/bindings.cpp reads it.

    Attributes:
        kind: ``"r"`` register, ``"i"`` immediate, ``"v"`` vector, ``"m"`` address, ``"l"`` label,
            ``"s"`` variable (replaced by its address before the kernel is decoded), ``"_"`` sink.
        value: Register number, immediate, instruction number or name.
        offset: Bytes added to an address.
        parts: Elements of a vector; base and coordinates of an address.
        negated: Whether the operand is ``!p``.
    """

    kind: str
    value: int | str = 0
    offset: int = 0
    parts: tuple[Operand, ...] = ()
    negated: bool = False


class Instruction(NamedTuple):
    """One instruction; `guard` is the register of its predicate or -1."""

    mnemonic: str
    operands: tuple[Operand, ...]
    guard: int
    negated: bool
    line: int


@dataclass
class Variable:
    """A variable in ``.global``, ``.const``, ``.shared`` or ``.local`` memory."""

    name: str
    space: str
    align: int
    size: int
    initial: bytes = b""
    external: bool = False


@dataclass
class Parameter:
    """A kernel parameter: its PTX type, its size in bytes and its offset."""

    name: str
    type: str
    align: int
    size: int
    offset: int


@dataclass
class Kernel:
    """One ``.entry`` with its instructions.

    Attributes:
        threads: The threads of a block that the kernel requires, or None.
        most_threads: The most threads of a block, or None.
        most_registers: The most registers of a thread, or None.
        least_blocks: Blocks that have to fit on a multiprocessor at a time; 0 if this is not set.
    """

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    registers: list[int] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    threads: tuple[int, int, int] | None = None
    most_threads: int | None = None
    most_registers: int | None = None
    least_blocks: int = 0
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)


class Function(NamedTuple):
    """A ``.entry`` or ``.func`` before its statements are read: its head, and a range of lines."""

    head: str
    lines: list[str]
    first: int
    last: int

    @property
    def name(self) -> str:
        """The name, which stands before the parameters and, in a function, after the results."""
        match = re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$.]+)", self.head)
        if match is None:
            raise PtxSyntaxError(f"cannot read the head of a function: {self.head.strip()[:200]!r}")
        return match[1]


class Kernels(Mapping[str, Kernel]):
    """The kernels of a module by name.

    A kernel is read when it is first asked for, because a module that nvcc made of templates has
    dozens, most of which are never launched. Reading one may raise PtxSyntaxError.
    """

    def __init__(self, entries: Sequence[Function], functions: dict[str, Function]) -> None:
        """Keep the kernels, and the functions that they call, as text."""
        self._entries = {entry.name: entry for entry in entries}
        self._functions = functions
        self._read: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        """Return a kernel, or raise KeyError."""
        if name not in self._read:
            self._read[name] = _Body(self._entries[name], self._functions).kernel
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a kernel of this name, without reading it."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of kernels."""
        return len(self._entries)


@dataclass
class Text:
    """A parsed module."""

    kernels: Kernels
    variables: list[Variable]
    files: dict[int, str]
    target: str


class PtxSyntaxError(ValueError):
    """The text is not PTX that this parser reads."""


def parse(text: str) -> Text:
    """Parse a PTX module.

    Args:
        text: The whole text, from ``.version`` on.

    Returns:
        The kernels, variables and source files. A kernel is read when it is first asked for.

    Raises:
        PtxSyntaxError: If a statement outside the kernels cannot be read; the message gives its
            line.
    """
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    target = re.search(r"^\s*\.target\s+([\w, ]+)", text, re.M)
    variables: list[Variable] = []
    lines = text.split("\n")
    number = 0
    entries: list[Function] = []
    functions: dict[str, Function] = {}
    while number < len(lines):
        line = _bare(lines[number])
        if ".entry" in line or re.match(r"(\.\w+\s+)*\.func\b", line):
            body, number = _function(lines, number)
            if body is not None and ".entry" in body.head:
                entries.append(body)
            elif body is not None:
                functions[body.name] = body
            continue
        if re.match(r"(\.\w+\s+)*\.(global|const|shared)\b", line):
            start, statement = number, line
            while ";" not in statement:
                number += 1
                statement += " " + _bare(lines[number])
            variables.append(_variable(statement.split(";")[0], start + 1))
        elif line.startswith(".section"):
            break
        number += 1
    architecture = target[1].split(",")[0].strip() if target else ""
    return Text(Kernels(entries, functions), variables, files, architecture)


def _bare(line: str) -> str:
    return line.split("//")[0].strip()


def _function(lines: list[str], start: int) -> tuple[Function | None, int]:
    """Return a function, or None for a declaration, and the number of the line after it."""
    head, number = "", start
    while "{" not in (bare := _bare(lines[number])):
        head += " " + bare
        number += 1
        if ";" in bare and "{" not in bare:
            return None, number  # a declaration
    first, depth = number, 0
    while True:
        bare = _bare(lines[number])
        depth += bare.count("{") - bare.count("}")
        if depth == 0:
            break
        number += 1
    return Function(head, lines, first, number), number + 1


_VARIABLE = re.compile(
    r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(global|const|shared|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.([a-z]+)(\d+)\s+([\w$]+)((?:\[\d*\])*)"
    r"(?:\s*=\s*(.*))?$"
)


def _variable(statement: str, line: int) -> Variable:
    match = _VARIABLE.match(statement.strip())
    if match is None:
        raise PtxSyntaxError(f"line {line}: cannot read the variable {statement.strip()!r}")
    linkage, space, align, kind, bits, name, dims, initial = match.groups()
    size = width = BYTES[bits]
    sizes = re.findall(r"\[(\d*)\]", dims)
    for count in sizes:
        size *= int(count or 0)
    data = b""
    if initial:
        for token in re.findall(r"[\w.+-]+", initial):
            if kind == "f":
                data += bytes(_float_bits(token, int(bits)).to_bytes(width, "little"))
            else:
                data += (_integer(token) % (1 << (8 * width))).to_bytes(width, "little")
    return Variable(name, space, int(align or width), size, data, "extern" in linkage)


def _integer(token: str) -> int:
    token = token.rstrip("U")
    sign = -1 if token.startswith("-") else 1
    token = token.lstrip("+-")
    if re.fullmatch(r"0[0-7]+", token):
        return sign * int(token, 8)
    return sign * int(token, 0)


def _float_bits(token: str, bits: int) -> int:
    if re.match(r"0[fF][0-9a-fA-F]{8}$", token):
        raw = int(token[2:], 16)
        if bits == 64:
            value = struct.unpack("<f", raw.to_bytes(4, "little"))[0]
            return int.from_bytes(struct.pack("<d", value), "little")
        return raw
    if re.match(r"0[dD][0-9a-fA-F]{16}$", token):
        raw = int(token[2:], 16)
        if bits == 32:
            value = struct.unpack("<d", raw.to_bytes(8, "little"))[0]
            return int.from_bytes(struct.pack("<f", value), "little")
        return raw
    return int.from_bytes(struct.pack("<d" if bits == 64 else "<f", float(token)), "little")


def _bounded(entry: Function) -> Kernel:
    """Return a kernel with its parameters and the bounds of its launches."""

    def bound(directive: str) -> tuple[int, ...] | None:
        match = re.search(rf"\.{directive}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry.head)
        return None if match is None else tuple(int(n or 1) for n in match.groups())

    required = bound("reqntid")
    threads = required or bound("maxntid")
    registers, blocks = bound("maxnreg"), bound("minnctapersm")
    return Kernel(
        entry.name,
        _parameters(entry.head),
        threads=None if required is None else (required[0], required[1], required[2]),
        most_threads=None if threads is None else math.prod(threads),
        most_registers=None if registers is None else registers[0],
        least_blocks=0 if blocks is None else blocks[0],
    )


def _parameters(head: str) -> list[Parameter]:
    """Return the parameters of a kernel; of a function, its results and then its parameters."""
    offset = 0
    found = []
    pattern = (
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)(?:\s+\.ptr(?:\s+\.\w+)?"
        r"(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?"
    )
    for align, kind, bits, name, count in re.findall(pattern, head):
        size = BYTES[bits] * int(count or 1)
        alignment = max(int(align or 1), BYTES[bits])
        offset = -(-offset // alignment) * alignment
        found.append(Parameter(name, kind + bits, alignment, size, offset))
        offset += size
    return found


@dataclass
class _Scope:
    """What is declared between two braces.

    Attributes:
        names: The number of a register, or the unique name of a variable.
        labels: Numbers of instructions.
        tables: Labels of a ``.branchtargets``.
    """

    names: dict[str, int | str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)


class _Body:
    """Reads the body of one kernel, statement by statement."""

    def __init__(self, entry: Function, functions: dict[str, Function]) -> None:
        self.kernel = _bounded(entry)
        self.functions = functions
        self.scopes = [_Scope()]
        self.visible: list[tuple[_Scope, ...]] = []  # by instruction, the outermost first
        self.label = ""  # the last one
        # By call that is being read: name of the function, and the label after its body.
        self.calls: list[tuple[str, str]] = []
        self.copies = 0  # of functions and of variables so far
        self.source: tuple[int, int] | None = None
        self._read(entry)
        self._resolve()

    def _read(self, function: Function) -> None:
        text, line_of = [], []
        for number in range(function.first, function.last + 1):
            bare = _bare(function.lines[number])
            if re.match(r"\.loc\s", bare):
                bare = bare.split(",")[0] + ";"
            text.append(bare)
            line_of.append(number + 1)
        self._statements(text, line_of)

    def _statements(self, text: list[str], line_of: list[int]) -> None:
        """Cut the text at semicolons, at labels and at the braces of scopes."""
        statement, start = "", 0
        for bare, number in zip(text, line_of, strict=True):
            rest = bare
            while rest:
                if not statement.strip():
                    rest, start = rest.lstrip(), number
                    if not rest:
                        break
                    if rest[0] == "{":
                        self.scopes.append(_Scope())
                        rest = rest[1:]
                        continue
                    if rest[0] == "}":
                        self.scopes.pop()
                        rest = rest[1:]
                        continue
                    label = re.match(r"([\w$]+)\s*:(?!:)", rest)
                    if label:
                        self.scopes[-1].labels[label[1]] = len(self.kernel.code)
                        self.label = label[1]
                        rest = rest[label.end() :]
                        continue
                cut = rest.find(";")
                if cut < 0:
                    statement += rest + " "
                    break
                statement += rest[:cut]
                rest = rest[cut + 1 :]
                self._statement(statement.strip(), start)
                statement = ""

    def _statement(self, statement: str, line: int) -> None:
        if not statement:
            return
        if re.match(r"\.loc\s", statement):
            file, row = statement.split()[1:3]
            self.source = (int(file), int(row))
        elif statement.startswith(".reg"):
            self._registers(statement, line)
        elif re.match(r"(\.\w+\s+)*\.(shared|local|global|param)\b", statement):
            self._declare(_variable(statement, line))
        elif statement.startswith(".branchtargets"):
            names = statement.removeprefix(".branchtargets").split(",")
            self.scopes[-1].tables[self.label] = [name.strip() for name in names]
        elif statement.startswith("."):
            return  # .pragma and other directives
        elif re.match(r"call\b", statement):
            self._call(statement, line)
        elif re.match(r"brx\.idx\b", statement):
            self._branch_by_index(statement, line)
        else:
            self._instruction(statement, line)

    def _registers(self, statement: str, line: int) -> None:
        match = re.match(r"\.reg\s+\.([a-z]+)(\d*)\s+(.*)$", statement)
        if match is None:
            raise PtxSyntaxError(f"line {line}: cannot read {statement!r}")
        bits = 1 if match[1] == "pred" else int(match[2])
        for name in match[3].split(","):
            name = name.strip()
            many = re.match(r"([%\w$]+)<(\d+)>$", name)
            names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]
            for each in names:
                self.scopes[-1].names[each] = len(self.kernel.registers)
                self.kernel.registers.append(bits)

    def _declare(self, variable: Variable) -> None:
        """Add a variable; one of a thread is another one in each scope and each call."""
        if variable.space in ("local", "param"):
            self.copies += 1
            name = f"{variable.name}#{self.copies}"
            self.scopes[-1].names[variable.name] = name
            variable = replace(variable, name=name, space="local")
        elif any(variable.name == known.name for known in self.kernel.variables):
            return
        self.kernel.variables.append(variable)

    def _call(self, statement: str, line: int) -> None:
        """Put the body of a function in the place of its call.

        ``vprintf`` prints nothing and ``__assertfail`` traps.
        """
        match = re.match(
            r"call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?([\w$]+)(?:\s*,\s*\(([^)]*)\))?", statement
        )
        if match is None:
            raise PtxSyntaxError(f"line {line}: cannot read {statement!r}")
        results, name, arguments = match.groups()
        if name == "__assertfail":
            return self._instruction("trap", line)
        if name == "vprintf":
            return self._instruction(f"st.param.b32 [{results}], 0", line)
        if name not in self.functions:
            raise PtxSyntaxError(f"line {line}: the function {name} has no body")
        if any(name == caller for caller, _ in self.calls):
            raise PtxSyntaxError(f"line {line}: {name} calls itself, which is not supported")
        function = self.functions[name]
        given = [part.strip() for part in f"{results or ''},{arguments or ''}".split(",")]
        given = [part for part in given if part]
        declared = [parameter.name for parameter in _parameters(function.head)]
        if len(given) != len(declared):
            raise PtxSyntaxError(f"line {line}: {name} has {len(declared)} parameters")
        names = {to: self._find(part) for to, part in zip(declared, given, strict=True)}
        scope = _Scope({to: known for to, known in names.items() if known is not None})
        self.copies += 1
        end = f"end of {name}#{self.copies}"
        outer, self.scopes = self.scopes, [*self.scopes[:1], scope]
        self.calls.append((name, end))
        self._read(function)
        self.calls.pop()
        self.scopes = outer
        # The branches of the body reach the label through its scope.
        scope.labels[end] = len(self.kernel.code)

    def _branch_by_index(self, statement: str, line: int) -> None:
        """Replace ``brx.idx`` by a comparison and a branch for each label of its table."""
        index, table = _split(statement.split(None, 1)[1])
        scope = next(s for s in reversed(self.scopes) if table.strip() in s.tables)
        for number, target in enumerate(scope.tables[table.strip()]):
            predicate = f"%index#{len(self.kernel.registers)}"
            self.scopes[-1].names[predicate] = len(self.kernel.registers)
            self.kernel.registers.append(1)
            self._instruction(f"setp.eq.u32 {predicate}, {index}, {number}", line)
            guard = self._register(predicate, line)
            self._append("bra", (Operand("s", target),), guard, False, line)

    def _instruction(self, statement: str, line: int) -> None:
        guard, negated = -1, False
        match = re.match(r"@(!?)([%\w$]+)\s+(.*)$", statement, re.S)
        if match:
            negated, guard = match[1] == "!", self._register(match[2], line)
            statement = match[3]
        parts = statement.split(None, 1)
        mnemonic, rest = parts[0], parts[1] if len(parts) > 1 else ""
        bits = 64 if mnemonic.endswith("64") else 32
        operands = tuple(self._operand(o, bits, line) for o in _split(rest))
        if mnemonic.startswith(("ld.param", "st.param")) and any(
            "#" in str(part.value)
            for operand in operands
            if operand.kind == "m"
            for part in operand.parts
        ):
            mnemonic = re.sub(r"\.param(::\w+)?", ".local", mnemonic)
        if self.calls and mnemonic in ("ret", "ret.uni"):
            mnemonic, operands = "bra", (Operand("s", self.calls[-1][1]),)
        self._append(mnemonic, operands, guard, negated, line)

    def _append(
        self, mnemonic: str, operands: tuple[Operand, ...], guard: int, negated: bool, line: int
    ) -> None:
        if self.source is not None:
            self.kernel.sources[len(self.kernel.code)] = self.source
        self.kernel.code.append(Instruction(mnemonic, operands, guard, negated, line))
        self.visible.append(tuple(self.scopes))

    def _register(self, name: str, line: int) -> int:
        found = self._find(name)
        if not isinstance(found, int):
            raise PtxSyntaxError(f"line {line}: the register {name} is not declared")
        return found

    def _find(self, name: str) -> int | str | None:
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
        return None

    def _operand(self, text: str, bits: int, line: int) -> Operand:
        text = text.strip()
        if text == "_":
            return Operand("_")
        if text[0] == "{":
            return Operand(
                "v", parts=tuple(self._operand(p, bits, line) for p in _split(text[1:-1]))
            )
        if text[0] == "[":
            base, *more = _split(text[1:-1])
            match = re.match(r"(.*?[\w\]])\s*\+\s*(-?\w+)$|(.*?[\w\]])\s*(-\s*\w+)$", base.strip())
            offset = 0
            if match:
                base = match[1] or match[3]
                offset = _integer((match[2] or match[4]).replace(" ", ""))
            parts = [self._operand(base, 64, line)]
            parts += [self._operand(p, 32, line) for p in more]
            return Operand("m", offset=offset, parts=tuple(parts))
        if text[0] == "!":
            return self._operand(text[1:], bits, line)._replace(negated=True)
        if "|" in text:
            pair = text.split("|")
            return Operand("v", parts=tuple(self._operand(p, bits, line) for p in pair))
        if text == "WARP_SZ":
            return Operand("i", 32)
        if text in SPECIALS:
            return Operand("special", SPECIALS.index(text))
        found = self._find(text)
        if found is not None:
            return Operand("r" if isinstance(found, int) else "s", found)
        if re.match(r"0[fFdD][0-9a-fA-F]{8}", text):
            return Operand("i", _float_bits(text, bits))
        if re.match(r"[+-]?\d[\w]*$", text):
            return Operand("i", _integer(text))
        if re.match(r"[+-]?\d*\.\d*(e[+-]?\d+)?$", text):
            return Operand("i", _float_bits(text, bits))
        match = re.match(r"([\w$]+)\s*\+\s*(\d+)$", text)
        if match:
            return Operand("s", self._find(match[1]) or match[1], offset=int(match[2]))
        if re.match(r"[\w$]+$", text):
            return Operand("s", text)
        raise PtxSyntaxError(f"line {line}: cannot read the operand {text!r}")

    def _resolve(self) -> None:
        """Turn the names of labels and special registers into numbers."""
        count = len(self.kernel.registers)

        def resolved(o: Operand, visible: tuple[_Scope, ...]) -> Operand:
            if o.kind == "special":
                return Operand("r", count + int(o.value), negated=o.negated)
            if o.kind == "s":
                for scope in reversed(visible):
                    if o.value in scope.labels:
                        return Operand("l", scope.labels[str(o.value)])
            if o.parts:
                return o._replace(parts=tuple(resolved(p, visible) for p in o.parts))
            return o

        self.kernel.code = [
            i._replace(operands=tuple(resolved(o, visible) for o in i.operands))
            for i, visible in zip(self.kernel.code, self.visible, strict=True)
        ]


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if text[start:].strip():
        parts.append(text[start:])
    return parts
