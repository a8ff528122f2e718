"""Read the body of a kernel: its registers, variables, labels and instructions.

A call is replaced with the body of the called function. The parameters of functions become
variables in local memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ptxmachine import limits
from ptxmachine.declarations import (
    Parameter,
    Variable,
    float_bits,
    integer,
    parameters,
    variable,
)
from ptxmachine.errors import PtxSyntaxError

# The special registers, in the order of `Special` in csrc/program.h.
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
_SPECIAL = {name: number for number, name in enumerate(SPECIALS)}


class Operand(NamedTuple):
    """One operand of an instruction, which csrc/bindings.cpp converts to a ``RawOperand``.

    Attributes:
        kind: ``"r"`` register, ``"i"`` immediate, ``"v"`` vector, ``"m"`` address, ``"l"`` label,
            ``"s"`` variable (replaced with its address before the kernel is decoded), ``"_"`` sink,
            ``"special"`` special register (replaced with a register at the end of the reading).
        value: Register number, immediate, instruction number or name, depending on `kind`. For a
            special register, the index in ``SPECIALS``.
        offset: Number of bytes that are added to an address.
        parts: Elements of a vector, or the base and the coordinates of an address.
        negated: Whether ``!`` precedes the operand, which is then a predicate.
    """

    kind: str
    value: int | str = 0
    offset: int = 0
    parts: tuple[Operand, ...] = ()
    negated: bool = False


class Instruction(NamedTuple):
    """One instruction; `guard` is the register of its guard predicate, or -1 if it has none."""

    mnemonic: str
    operands: tuple[Operand, ...]
    guard: int
    negated: bool
    line: int


@dataclass
class Kernel:
    """One kernel (``.entry``) with its instructions.

    Attributes:
        name: Name of the kernel.
        parameters: The parameters.
        code: The instructions.
        registers: The number of bits of each declared register.
        variables: The variables inside the kernel.
        threads: The threads per block, in x, y and z, that the kernel requires, or None.
        most_threads: The most threads per block that the kernel allows, or None.
        most_registers: The most registers per thread that the kernel allows, or None.
        least_blocks: The fewest blocks that must fit on a multiprocessor; 0 if not set.
        cluster: The blocks per cluster, in x, y and z, that the kernel requires, or None.
        most_cluster: The most blocks per cluster that the kernel allows, or None.
        explicit_cluster: Whether every launch must specify its cluster size.
        sources: By instruction number, the file number and the line of the ``.loc`` before it.
        line: Line of the text in which the kernel begins.
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
    cluster: tuple[int, int, int] | None = None
    most_cluster: int | None = None
    explicit_cluster: bool = False
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)
    line: int = 0


class Function(NamedTuple):
    """A ``.entry`` or ``.func`` before its statements are read.

    Attributes:
        head: The text before the opening brace.
        lines: The lines of the module.
        start: Number of the line in which the head begins. Line numbers count from 0.
        first: Number of the line with the opening brace.
        column: Index of the opening brace in line `first`.
        last: Number of the line with the closing brace.
    """

    head: str
    lines: list[str]
    start: int
    first: int
    column: int
    last: int

    @property
    def name(self) -> str:
        """The name, which comes before the parameters and after the results of a function."""
        match = re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$.]+)", self.head)
        if match is None:
            message = f"cannot read the head of a function: {self.head.strip()[:200]!r}"
            raise PtxSyntaxError(message, self.start + 1)
        return match[1]

    def parameters(self) -> list[Parameter]:
        """Return the parameters of a kernel, or the results and the parameters of a function."""
        return parameters(self.head, self.start + 1)


def bare(line: str) -> str:
    """Return a line without its comment and without blanks at its ends."""
    return line.split("//", 1)[0].strip()


def read(entry: Function, functions: dict[str, Function]) -> Kernel:
    """Read a kernel.

    Args:
        entry: The kernel before its statements are read.
        functions: The functions that the kernel may call, by name.

    Raises:
        PtxSyntaxError: If a statement cannot be read, or if the kernel exceeds a limit of
            `limits`.
    """
    return _Body(entry, functions).kernel


def _bounded(entry: Function) -> Kernel:
    """Return a kernel without instructions, with the launch limits that its directives set."""
    line = entry.start + 1

    def bound(directive: str, most: int) -> tuple[int, ...] | None:
        match = re.search(rf"\.{directive}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry.head)
        if match is None:
            return None
        return tuple(limits.count(n or "1", most, f".{directive}", line) for n in match.groups())

    required = bound("reqntid", limits.THREADS)
    threads = required or bound("maxntid", limits.THREADS)
    for given, directive in ((required, ".reqntid"), (threads, ".maxntid")):
        if given is not None and not 1 <= math.prod(given) <= limits.THREADS:
            message = f"{directive}: got {given}, allowed: 1 to {limits.THREADS} threads"
            raise PtxSyntaxError(message, line)
    cluster = bound("reqnctapercluster", limits.THREADS)
    if cluster is not None and 0 in cluster:
        raise PtxSyntaxError(f".reqnctapercluster: got {cluster}, allowed: at least 1 block", line)
    most_cluster = bound("maxclusterrank", limits.THREADS)
    registers, blocks = bound("maxnreg", limits.REGISTERS), bound("minnctapersm", limits.THREADS)
    return Kernel(
        entry.name,
        entry.parameters(),
        threads=None if required is None else (required[0], required[1], required[2]),
        most_threads=None if threads is None else math.prod(threads),
        most_registers=None if registers is None else registers[0],
        least_blocks=0 if blocks is None else blocks[0],
        cluster=None if cluster is None else (cluster[0], cluster[1], cluster[2]),
        most_cluster=None if most_cluster is None else most_cluster[0],
        explicit_cluster=".explicitcluster" in entry.head,
        line=line,
    )


@dataclass
class _Scope:
    """The names that are declared between two braces.

    Attributes:
        names: Name in the text → number of the register, or unique name of the variable.
        labels: Label → number of the instruction that follows it.
        tables: Label → targets of the ``.branchtargets`` that follows it.
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
        self.visible: list[tuple[_Scope, ...]] = []  # scopes by instruction, outermost first
        self.label = ""  # the last label
        # For each call that is being inlined, outermost first: the name of the function and the
        # label at the end of its body.
        self.calls: list[tuple[str, str]] = []
        self.copies = 0  # number of inlined functions and local variables, for unique names
        self.inlined = 0  # lines and statements that calls and brx.idx have added
        self.local = 0  # bytes of local memory
        self.shared: set[str] = set()
        self.parameters: dict[str, list[str]] = {}  # by name of a called function
        self.source: tuple[int, int] | None = None
        self._read(entry)
        self._resolve()

    def _read(self, function: Function) -> None:
        """Divide a function at semicolons, labels and braces, and read each statement."""
        if self.calls:
            self._inline(function.last - function.first, function.first + 1)
        outermost, closed = len(self.scopes), False
        statement: list[str] = []
        start = function.first + 1
        for number in range(function.first, function.last + 1):
            rest = bare(function.lines[number])
            if number == function.first:
                rest = rest[function.column :]
            if re.match(r"\.loc\s", rest):
                rest = rest.split(",")[0] + ";"
            while rest:
                if closed:
                    message = f"cannot read {rest[:200]!r} after the end of a function"
                    raise PtxSyntaxError(message, number + 1)
                if not statement:
                    rest, start = rest.lstrip(), number + 1
                    if after := self._opened(rest, start):
                        rest = rest[after:].lstrip()
                        closed = len(self.scopes) == outermost
                        continue
                part, semicolon, rest = rest.partition(";")
                if part.strip():
                    statement.append(part)
                if semicolon:
                    self._statement(" ".join(statement).strip(), start)
                    statement = []
        if statement:
            text = " ".join(statement)[:200]
            raise PtxSyntaxError(f"a statement has no semicolon: {text!r}", start)

    def _opened(self, text: str, line: int) -> int:
        """Read a brace or a label at the start of a text, and return its length, or 0 if none."""
        if text.startswith("{"):
            limits.at_most(len(self.scopes), limits.SCOPES, "scopes inside each other", line)
            self.scopes.append(_Scope())
            return 1
        if text.startswith("}"):
            self.scopes.pop()
            return 1
        label = re.match(r"([\w$]+)\s*:(?!:)", text)
        if label is None:
            return 0
        self.scopes[-1].labels[label[1]] = len(self.kernel.code)
        self.label = label[1]
        return label.end()

    def _statement(self, statement: str, line: int) -> None:
        if not statement:
            return
        if self.calls:
            self._inline(1, line)
        if re.match(r"\.loc\s", statement):
            self._location(statement, line)
        elif statement.startswith(".reg"):
            self._registers(statement, line)
        elif re.match(r"(\.\w+\s+)*\.(shared|local|global|param)\b", statement):
            self._declare(variable(statement, line))
        elif statement.startswith(".branchtargets"):
            names = statement.removeprefix(".branchtargets").split(",")
            self.scopes[-1].tables[self.label] = [name.strip() for name in names]
        elif statement.startswith("."):
            return  # .pragma and other directives are ignored
        elif re.match(r"call\b", statement):
            self._call(statement, line)
        elif re.match(r"brx\.idx\b", statement):
            self._branch_by_index(statement, line)
        else:
            self._instruction(statement, line)

    def _inline(self, count: int, line: int) -> None:
        """Count lines and statements that replace a call or ``brx.idx``, and check the limit."""
        self.inlined += count
        limits.at_most(self.inlined, limits.INLINED, "lines and statements by calls", line)

    def _location(self, statement: str, line: int) -> None:
        match = re.match(r"\.loc\s+(\d{1,9})\s+(\d{1,9})\b", statement)
        if match is None:
            raise PtxSyntaxError(f"cannot read {statement[:200]!r}", line)
        self.source = (int(match[1]), int(match[2]))

    def _registers(self, statement: str, line: int) -> None:
        match = re.match(r"\.reg\s+\.(pred|[a-z]+(8|16|32|64)(x2)?)\s+(.*)$", statement, re.S)
        if match is None:
            raise PtxSyntaxError(f"cannot read {statement[:200]!r}", line)
        bits = 1 if match[1] == "pred" else int(match[2]) * (2 if match[3] else 1)
        for name in match[4].split(","):
            many = re.match(r"([%\w$]+)(?:<(\d+)>)?$", name.strip())
            if many is None or bits > 64:
                raise PtxSyntaxError(f"cannot read {statement[:200]!r}", line)
            if many[2] is None:
                self._register_of(many[1], bits, line)
                continue
            for number in range(limits.count(many[2], limits.REGISTERS, "registers", line)):
                self._register_of(f"{many[1]}{number}", bits, line)

    def _register_of(self, name: str, bits: int, line: int) -> None:
        """Declare one register in the innermost scope."""
        number = len(self.kernel.registers)
        limits.at_most(number + 1, limits.REGISTERS, "registers of a kernel", line)
        self.scopes[-1].names[name] = number
        self.kernel.registers.append(bits)

    def _declare(self, declared: Variable) -> None:
        """Add a variable. Each scope and each call has its own copy of a local variable."""
        if declared.space in ("local", "param"):
            self.copies += 1
            name = f"{declared.name}#{self.copies}"
            self.scopes[-1].names[declared.name] = name
            self.local += declared.size + declared.align
            limits.at_most(self.local, limits.LOCAL, "bytes of local memory", declared.line)
            declared = replace(declared, name=name, space="local")
        elif declared.name in self.shared:
            return
        else:
            self.shared.add(declared.name)
        self.kernel.variables.append(declared)

    def _call(self, statement: str, line: int) -> None:
        """Replace a call with the body of the called function.

        ``vprintf`` prints nothing and ``__assertfail`` traps.
        """
        match = re.match(
            r"call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?([\w$]+)(?:\s*,\s*\(([^)]*)\))?$", statement
        )
        if match is None:
            raise PtxSyntaxError(f"cannot read {statement[:200]!r}", line)
        results, name, arguments = match.groups()
        if name == "__assertfail":
            return self._instruction("trap", line)
        if name == "vprintf" and results:
            return self._instruction(f"st.param.b32 [{results}], 0", line)
        if name not in self.functions:
            raise PtxSyntaxError(f"the function {name} has no body", line)
        if any(name == caller for caller, _ in self.calls):
            raise PtxSyntaxError(f"{name} calls itself, which is not supported", line)
        limits.at_most(len(self.calls) + 1, limits.CALLS, "calls inside each other", line)
        function = self.functions[name]
        if name not in self.parameters:
            self.parameters[name] = [parameter.name for parameter in function.parameters()]
        given = [part.strip() for part in f"{results or ''},{arguments or ''}".split(",")]
        given = [part for part in given if part]
        declared = self.parameters[name]
        if len(given) != len(declared):
            message = f"{name} has {len(declared)} parameters, and the call has {len(given)}"
            raise PtxSyntaxError(message, line)
        names = {to: self._find(part) for to, part in zip(declared, given, strict=True)}
        scope = _Scope({to: known for to, known in names.items() if known is not None})
        self.copies += 1
        end = f"end of {name}#{self.copies}"
        outer, self.scopes = self.scopes, [*self.scopes[:1], scope]
        self.calls.append((name, end))
        self._read(function)
        self.calls.pop()
        self.scopes = outer
        # A ret in the function has become a branch to this label, which is in a scope that the body
        # of the function sees.
        scope.labels[end] = len(self.kernel.code)

    def _branch_by_index(self, statement: str, line: int) -> None:
        """Replace ``brx.idx`` with a comparison and a branch for each label in its table."""
        operands = [part.strip() for part in _split(statement.partition(" ")[2])]
        table = operands[-1] if len(operands) == 2 else ""
        scope = next((s for s in reversed(self.scopes) if table in s.tables), None)
        if scope is None:
            raise PtxSyntaxError(f"cannot read {statement[:200]!r}: it has no table", line)
        for number, target in enumerate(scope.tables[table]):
            self._inline(1, line)
            predicate = f"%index#{len(self.kernel.registers)}"
            self._register_of(predicate, 1, line)
            self._instruction(f"setp.eq.u32 {predicate}, {operands[0]}, {number}", line)
            guard = self._register(predicate, line)
            self._append("bra", (Operand("s", target),), guard, False, line)

    def _instruction(self, statement: str, line: int) -> None:
        guard, negated = -1, False
        match = re.match(r"@(!?)([%\w$]+)\s+(.*)$", statement, re.S)
        if match:
            negated, guard = match[1] == "!", self._register(match[2], line)
            statement = match[3]
        mnemonic, rest = (*statement.split(None, 1), "", "")[:2]
        if not re.fullmatch(r"[a-zA-Z_][\w.:]*", mnemonic, re.A):
            raise PtxSyntaxError(f"cannot read {statement[:200]!r}", line)
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
            mnemonic, operands = "bra", (*operands, Operand("s", self.calls[-1][1]))
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
            raise PtxSyntaxError(f"the register {name} is not declared", line)
        return found

    def _find(self, name: str) -> int | str | None:
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
        return None

    def _operand(self, text: str, bits: int, line: int) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return self._vector(text, bits, line)
        if text.startswith("["):
            return self._address(text, line)
        if text.startswith("!"):
            return self._scalar(text[1:].strip(), bits, line)._replace(negated=True)
        if "|" in text:
            pair = [part.strip() for part in text.split("|")]
            return Operand("v", parts=tuple(self._scalar(part, bits, line) for part in pair))
        return self._scalar(text, bits, line)

    def _vector(self, text: str, bits: int, line: int) -> Operand:
        if not text.endswith("}"):
            raise PtxSyntaxError(f"cannot read the operand {text[:200]!r}", line)
        parts = [part.strip() for part in text[1:-1].split(",")]
        return Operand("v", parts=tuple(self._scalar(part, bits, line) for part in parts))

    def _address(self, text: str, line: int) -> Operand:
        """Read ``[base + offset]``, or ``[map, {coordinates}]`` for a tensor copy."""
        base, *more = _split(text[1:-1] if text.endswith("]") else "") or [""]
        match = re.fullmatch(
            r"([%\w$.]+(?:\[\w+\])?)\s*(?:\+\s*(-?\s*\w+)|(-\s*\w+))?", base.strip()
        )
        if match is None:
            raise PtxSyntaxError(f"cannot read the address {text[:200]!r}", line)
        offset = (match[2] or match[3] or "0").replace(" ", "")
        parts = [self._scalar(match[1], 64, line)]
        for part in more:
            brace = part.strip().startswith("{")
            given = part.strip()
            parts.append(self._vector(given, 32, line) if brace else self._scalar(given, 32, line))
        distance = integer(offset, line)
        if distance >= 1 << 63:
            raise PtxSyntaxError(f"an offset of {distance} bytes, allowed: 63 bits", line)
        return Operand("m", offset=distance, parts=tuple(parts))

    def _scalar(self, text: str, bits: int, line: int) -> Operand:
        """Read a register, a number, a variable or a label."""
        if text == "_":
            return Operand("_")
        if text == "WARP_SZ":
            return Operand("i", 32)
        if text in _SPECIAL:
            return Operand("special", _SPECIAL[text])
        found = self._find(text)
        if found is not None:
            return Operand("r" if isinstance(found, int) else "s", found)
        if re.match(r"0[fFdD][0-9a-fA-F]{8}", text):
            return Operand("i", float_bits(text, bits, line))
        if re.match(r"[+-]?\d\w*$", text):
            return Operand("i", integer(text, line))
        if re.match(r"[+-]?\d*\.\d*(e[+-]?\d+)?$", text):
            return Operand("i", float_bits(text, bits, line))
        match = re.match(r"([\w$]+)\s*\+\s*(\d+)$", text)
        if match:
            offset = integer(match[2], line)
            return Operand("s", self._find(match[1]) or match[1], offset=offset)
        if re.match(r"[\w$]+$", text):
            return Operand("s", text)
        raise PtxSyntaxError(f"cannot read the operand {text[:200]!r}", line)

    def _resolve(self) -> None:
        """Replace the names of labels and special registers with numbers."""
        count = len(self.kernel.registers)

        def resolved(o: Operand, visible: tuple[_Scope, ...]) -> Operand:
            if o.kind == "special":
                return Operand("r", count + int(o.value), negated=o.negated)
            if o.kind == "s":
                for scope in reversed(visible):
                    if o.value in scope.labels:
                        return o._replace(kind="l", value=scope.labels[str(o.value)])
            if o.parts:
                return o._replace(parts=tuple(resolved(p, visible) for p in o.parts))
            return o

        self.kernel.code = [
            i._replace(operands=tuple(resolved(o, visible) for o in i.operands))
            for i, visible in zip(self.kernel.code, self.visible, strict=True)
        ]


def _split(text: str) -> Sequence[str]:
    """Split a text at the commas outside brackets. A blank text has no parts."""
    if not text.strip():
        return []
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]
