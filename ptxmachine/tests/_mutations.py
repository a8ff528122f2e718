"""Change PTX texts at random, as a fuzzer does with the texts of real kernels.

A change depends only on the text and the seed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from small_kernels import HEADER, REGISTERS

# A module with a function call, a branch over a table, an asynchronous copy and a shuffle.
CALLS = f"""{HEADER}.global .align 4 .b32 numbers[4] = {{1, 2, 3, 4}};
.func (.param .b32 out) twice(.param .b32 x)
{{
    .reg .b32 %r<4>;
    ld.param.b32 %r1, [x];
    add.s32 %r1, %r1, %r1;
    st.param.b32 [out], %r1;
    ret;
}}
.visible .entry k(.param .u64 p0)
{{{REGISTERS}
    .shared .align 16 .b8 memory[512];
    .local .align 8 .b8 own[16];
    ld.param.u64 %d0, [p0];
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 3;
TABLE: .branchtargets ZERO, ONE, ZERO, ONE;
    brx.idx %r1, TABLE;
ZERO:
    mov.u64 %d2, numbers;
    ld.global.b32 %r2, [%d2+4];
    bra JOIN;
ONE:
    {{
        .param .b32 given;
        .param .b32 result;
        st.param.b32 [given], %r0;
        call.uni (result), twice, (given);
        ld.param.b32 %r2, [result];
    }}
JOIN:
    mov.u64 %d3, own;
    st.local.b32 [%d3+8], %r2;
    mov.u32 %r4, memory;
    mad.lo.u32 %r5, %r0, 4, %r4;
    cp.async.ca.shared.global [%r5], [%d0], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    shfl.sync.bfly.b32 %r6|%p1, %r2, 1, 31, -1;
    mad.wide.u32 %d4, %r0, 4, %d0;
    @%p1 atom.global.add.u32 %r7, [%d4], %r6;
    ret;
}}
"""
# The module above, and modules without debug information that Triton and nvcc have compiled.
SOURCES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).with_name("texts").glob("*.ptx"))
} | {"calls": CALLS}
# A token is an identifier with its dots, a number, a run of blanks or a single character.
TOKEN = re.compile(r"[%$.]?[A-Za-z_][\w$:.]*|\d[\w.]*|\s+|.", re.S)
NUMBER = re.compile(r"\d[\w.]*")
REGISTER = re.compile(r"(%[a-z]+)\d+")
TYPE = re.compile(r"\.(?:pred|[busf](?:8|16|32|64)|bf16|b128|f16x2|bf16x2|v2|v4|x[124])\b")
NUMBERS = (
    "0", "1", "2", "3", "5", "7", "8", "16", "31", "33", "64", "100", "255", "4096", "65536",
    "2147483648", "4294967295", "4294967296", "18446744073709551615", "18446744073709551616",
    "1000000000", "0x", "0xffffffff", "0f7F800000", "0d0", "1e400", "09", "1" + "0" * 30,
)  # fmt: skip
CHARACTERS = "{}[]()<>;,:.|!@%$_-+=*/\\\"'# \t\n0aZ\0é"


def mutated(text: str, seed: int | str) -> str:
    """Return a text with one to three random changes.

    A change deletes, repeats or exchanges tokens or lines, replaces a number, a register or a type,
    or inserts a character.

    Args:
        text: PTX, or another text.
        seed: Seed of the random changes. The same text and seed give the same result.
    """
    draw = random.Random(f"{seed}")
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        changes = (_tokens, _tokens, _lines, _number, _number, _register, _register, _type)
        text = draw.choice((*changes, _character))(text, draw)
    return text


def _tokens(text: str, draw: random.Random) -> str:
    return "".join(_changed(TOKEN.findall(text), draw, lambda token: not token.isspace()))


def _lines(text: str, draw: random.Random) -> str:
    return "".join(_changed(text.splitlines(keepends=True), draw, lambda line: bool(line.strip())))


def _changed(parts: list[str], draw: random.Random, counts) -> list[str]:
    """Make one change: delete, repeat, replace or exchange parts for which `counts` is true."""
    places = [n for n, part in enumerate(parts) if counts(part)]
    if not places:
        return parts
    at, other = draw.choice(places), draw.choice(places)
    action = draw.choice(("delete", "repeat", "exchange", "neighbour", "copy"))
    if action == "delete":
        parts[at] = ""
    elif action == "repeat":
        parts[at] += " " + parts[at]
    elif action == "copy":
        parts[at] = parts[other]
    else:
        if action == "neighbour":
            other = places[(places.index(at) + 1) % len(places)]
        parts[at], parts[other] = parts[other], parts[at]
    return parts


def _number(text: str, draw: random.Random) -> str:
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return text
    chosen = draw.choice(numbers)
    return text[: chosen.start()] + draw.choice(NUMBERS) + text[chosen.end() :]


def _register(text: str, draw: random.Random) -> str:
    """Replace a register with another register of the text, usually of the same class."""
    found = list(REGISTER.finditer(text))
    if not found:
        return text
    chosen = draw.choice(found)
    others = [other for other in found if other[1] == chosen[1] or draw.random() < 0.02]
    return text[: chosen.start()] + draw.choice(others)[0] + text[chosen.end() :]


def _type(text: str, draw: random.Random) -> str:
    """Replace a type or the size of a vector with another one in the text."""
    found = list(TYPE.finditer(text))
    if not found:
        return text
    chosen = draw.choice(found)
    return text[: chosen.start()] + draw.choice(found)[0] + text[chosen.end() :]


def _character(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    removed = draw.choice((0, 1))
    return text[:at] + draw.choice(CHARACTERS) + text[at + removed :]
