"""A text that is cut off, changed or too demanding raises a PtxError within seconds."""

import re

import pytest
from _attempts import outcomes
from _mutations import SOURCES, mutated
from small_kernels import HEADER, kernel

import ptxmachine as ptx
from ptxmachine import limits


def whole(body: str) -> str:
    """Return a module whose only kernel has this body after its opening brace in line 5."""
    return f"{HEADER}.visible .entry k()\n{{{body}\n    ret;\n}}\n"


def doubling(depth: int) -> str:
    """Return a module with a chain of functions, each of which calls the next one twice."""
    last = f".func f{depth}()\n{{\nret;\n}}\n"
    calls = [f".func f{n}()\n{{\ncall f{n + 1};\ncall f{n + 1};\nret;\n}}\n" for n in range(depth)]
    return HEADER + last + "".join(calls) + ".visible .entry k()\n{\ncall f0;\nret;\n}\n"


def chain(depth: int) -> str:
    """Return a module with a chain of functions, each of which calls the next one once."""
    last = f".func f{depth}()\n{{\nret;\n}}\n"
    calls = [f".func f{n}()\n{{\ncall f{n + 1};\nret;\n}}\n" for n in range(depth)]
    return HEADER + last + "".join(calls) + ".visible .entry k()\n{\ncall f0;\nret;\n}\n"


def table(labels: int) -> str:
    targets = ", ".join(["END"] * labels)
    return kernel(f"T: .branchtargets {targets};\n" + "brx.idx %r0, T;\n" * labels + "END:")


# Name of an error → a text with this error, and a part of the expected message.
TOO_MUCH = {
    "registers": (whole(" .reg .b32 %z<1000000000>;"), "registers: got 1000000000, allowed: at"),
    "registers in parts": (whole(" .reg .b32 %z<60000>, %y<60000>;"), "registers of a kernel"),
    "digits of registers": (whole(f" .reg .b32 %z<{'9' * 9999}>;"), "a number of 9999 digits"),
    "shared": (whole(" .shared .b8 x[1000000000];"), "bytes of x in .shared"),
    "shared in parts": (whole(" .shared .b8 x[200000], y[2];"), "cannot read the variable"),
    "two shared": (
        whole(" .shared .b8 x[40000];\n .shared .b8 y[40000];"),
        "bytes of .shared variables",
    ),
    "dimensions": (whole(" .shared .b8 x[60000][60000][60000];"), "bytes of x in .shared"),
    "local": (whole(" .local .b8 x[100000];"), "bytes of x in .local"),
    "two local": (whole(" .local .b8 x[40000];\n .local .b8 y[40000];"), "bytes of local memory"),
    "global": (f"{HEADER}.global .b8 x[1000000000000];\n", "bytes of x in .global"),
    "two global": (
        f"{HEADER}.global .b8 x[40000000];\n.global .b8 y[40000000];\n",
        "bytes of variables",
    ),
    "parameters": (
        f"{HEADER}.visible .entry k(.param .b8 x[1000000000])\n{{\nret;\n}}\n",
        "bytes of the parameter x",
    ),
    "alignment": (whole(" .shared .align 1000000000000 .b8 x[4];"), "alignment of x"),
    "an alignment of 0": (whole(" .shared .align 0 .b8 x[4];"), "allowed: powers of 2"),
    "a line": (whole(" " + "/" * 200_000), "characters of a line"),
    "calls": (chain(200), "calls inside each other"),
    "calls that double": (doubling(40), "statements by calls"),
    "tables": (table(1000), "registers of a kernel|statements by calls"),
    "scopes": (whole("{\n" * 50_000 + "}\n" * 50_000), "scopes inside each other"),
    "calls of many lines": (
        doubling(12).replace("ret;", "\n" * 100 + "ret;"),
        "statements by calls",
    ),
    "threads": (
        whole("").replace("k()", "k()\n.reqntid 100000, 100000, 100000"),
        ".reqntid: got 100000",
    ),
    "no threads": (whole("").replace("k()", "k()\n.maxntid 0"), ".maxntid: got"),
    "an integer": (whole(" .reg .b64 %d<2>;\n mov.u64 %d1, 18446744073709551616;"), "64 bits"),
    "an offset": (kernel("ld.global.u32 %r1, [%d0+18446744073709551615];"), "63 bits"),
    "a float": (kernel("mov.f32 %r1, 1.0e99;"), "as a float of 32 bits"),
}
UNREADABLE = {
    "no end": (f"{HEADER}.visible .entry k()\n{{\n    ret;\n", "has no end"),
    "no body": (f"{HEADER}.visible .entry k()\n", "has no body"),
    "no semicolon": (f"{HEADER}.visible .entry k()\n{{\n    ret\n}}\n", "no semicolon: 'ret"),
    "no variable": (f"{HEADER}.global .b8 x[4]", "a variable has no semicolon"),
    "a comment": (f"{HEADER}/* here", "a comment has no end"),
    "a brace": (
        f"{HEADER}.visible .entry k()\n{{ }} {{ ret;\n}}\n",
        "after the end of a function",
    ),
    "braces": (kernel("mov.u32 %r1, " + "{" * 5000 + "}" * 5000 + ";"), "cannot read the operand"),
    "negations": (kernel("mov.u32 %r1, " + "!" * 50_000 + "%p1;"), "cannot read the operand"),
    "an empty operand": (kernel("add.s32 %r1, , %r2;"), "cannot read the operand ''"),
    "a last comma": (kernel("add.s32 %r1, %r2, %r3,;"), "cannot read the operand ''"),
    "an empty address": (kernel("ld.global.u32 %r1, [];"), "cannot read the address"),
    "an octal": (kernel("mov.u32 %r1, 09;"), "cannot read the integer '09'"),
    "a point": (kernel("mov.f32 %r1, .;"), "cannot read '.' as a float"),
    "a table": (kernel("brx.idx %r0, NOWHERE;"), "it has no table"),
    "an index": (kernel("brx.idx;"), "it has no table"),
    "a location": (kernel(".loc 1;"), r"cannot read '.loc 1'"),
    "a register": (kernel("add.s32 %r1, %q1, 1;"), "cannot read the operand '%q1'"),
    "a name": (kernel("mov.u64 %d1, nothing;"), "the name nothing is not known"),
    "a function": (kernel("call nothing;"), "the function nothing has no body"),
    "a call": (kernel("call (;"), "cannot read 'call"),
    "a head": (f"{HEADER}.visible .entry (\n{{\nret;\n}}\n", "cannot read the head"),
    "a parameter": (f"{HEADER}.visible .entry k(.param .b7 x)\n{{\nret;\n}}\n", "the parameters"),
    "a value": (f"{HEADER}.global .b32 x = y;\n", "cannot read the integer 'y'"),
    "values": (f"{HEADER}.global .b8 x[2] = {{1, 2, 3}};\n", "its values have 3"),
    "a statement": (f"{HEADER}frobnicate;\n", "outside a kernel"),
    "a class of registers": (whole(" .reg .b7 %x;"), "cannot read '.reg .b7 %x'"),
    "no class": (whole(" .reg .f %x;"), "cannot read '.reg .f %x'"),
    "a surrogate": (kernel("add\ud800.s32 %r1, %r2, %r3;"), "cannot read 'add"),
}


@pytest.fixture(scope="module")
def hostile():
    texts = {**TOO_MUCH, **UNREADABLE}
    found = outcomes([text for text, _ in texts.values()])
    return dict(zip(texts, found, strict=True))


@pytest.mark.parametrize("name", [*TOO_MUCH, *UNREADABLE])
def test_a_hostile_text_is_refused_at_once_with_its_line(hostile, name):
    _, message = {**TOO_MUCH, **UNREADABLE}[name]
    found = hostile[name]
    assert found.kind == "PtxSyntaxError", found
    assert found.line is not None
    assert found.message.startswith(f"line {found.line}: ")
    assert re.search(message, found.message)
    # The longest text takes 3 s on a fast processor.
    assert found.seconds < 10


@pytest.mark.every_case
def test_texts_at_the_limits_run():
    assert limits.CALLS >= 64
    texts = [
        whole(f" .reg .b32 %z<{limits.REGISTERS}>;"),
        whole(f" .shared .b8 x[{limits.STATIC_SHARED}];"),
        whole(f" .local .align 1 .b8 x[{limits.LOCAL - 1}];"),
        chain(limits.CALLS - 1),
        doubling(10),
        table(60),
    ]
    assert [(found.kind, found.message) for found in outcomes(texts)] == [("ran", "")] * len(texts)


def test_the_texts_that_are_mutated_run_or_are_refused_by_their_data():
    """Each text in SOURCES must run or have a fault before any mutation.

    The arguments are not tensor maps, so a kernel that needs tensor maps has a fault.
    """
    found = outcomes(list(SOURCES.values()))
    assert [outcome.kind for outcome in found].count("ran") >= 2
    assert {outcome.kind for outcome in found} <= {"ran", "PtxFault"}


def check_mutations(seeds: range) -> None:
    """Assert that mutated texts run or raise a PtxError, and that a PtxSyntaxError has a line."""
    names = list(SOURCES)
    chosen = [(names[seed % len(names)], seed) for seed in seeds]
    found = outcomes([mutated(SOURCES[name], seed) for name, seed in chosen])
    bad = [
        f"{name}, seed {seed}: {outcome.kind} {outcome.message[:300]}"
        for (name, seed), outcome in zip(chosen, found, strict=True)
        if not outcome.orderly or (outcome.kind == "PtxSyntaxError" and outcome.line is None)
    ]
    assert bad == []
    kinds = [outcome.kind for outcome in found]
    # The mutations must be neither too weak nor too strong: some texts run, and some are refused.
    assert min(kinds.count("ran"), kinds.count("PtxSyntaxError")) > len(kinds) // 20


def test_mutated_texts():
    check_mutations(range(300))


@pytest.mark.every_case
def test_many_mutated_texts():
    check_mutations(range(300, 3300))


def test_a_mutation_depends_on_its_seed_alone():
    assert mutated(SOURCES["calls"], 1) == mutated(SOURCES["calls"], 1)
    assert len({mutated(SOURCES["calls"], seed) for seed in range(50)}) > 40
    assert mutated("", 3) == mutated("", 3)


def test_errors_have_one_base():
    assert issubclass(ptx.PtxSyntaxError, (ptx.PtxError, ValueError))
    assert issubclass(ptx.PtxFault, (ptx.PtxError, RuntimeError))
    assert ptx.PtxSyntaxError("no line").line is None
