"""Change PTX texts at random: what a fuzzer does to the texts of real kernels.

A change depends on nothing but the text and its seed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

# Kernels that Triton and nvcc have compiled, without their debug information.
TEXTS = sorted(Path(__file__).with_name("texts").glob("*.ptx"))
# Identifiers with their dots, numbers, blanks and single characters.
TOKEN = re.compile(r"[%$.]?[A-Za-z_][\w$:.]*|\d[\w.]*|\s+|.", re.S)
NUMBER = re.compile(r"\d[\w.]*")
NUMBERS = (
    "0", "1", "2", "3", "5", "7", "8", "16", "31", "33", "64", "100", "255", "4096", "65536",
    "2147483648", "4294967295", "4294967296", "18446744073709551615", "18446744073709551616",
    "1000000000", "0x", "0xffffffff", "0f7F800000", "0d0", "1e400", "09", "1" + "0" * 30,
)  # fmt: skip
CHARACTERS = "{}[]()<>;,:.|!@%$_-+=*/\\\"'# \t\n0aZ\0é"


def mutated(text: str, seed: int | str) -> str:
    """Return a text with one to three random changes.

    A change deletes, repeats or exchanges tokens or lines, replaces a number, or inserts a
    character.

    Args:
        text: PTX, or another text.
        seed: Equal seeds make equal changes.
    """
    draw = random.Random(f"{seed}")
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice((_tokens, _tokens, _tokens, _lines, _number, _number, _character))
        text = change(text, draw)
    return text


def _tokens(text: str, draw: random.Random) -> str:
    return "".join(_changed(TOKEN.findall(text), draw, lambda token: not token.isspace()))


def _lines(text: str, draw: random.Random) -> str:
    return "".join(_changed(text.splitlines(keepends=True), draw, lambda line: bool(line.strip())))


def _changed(parts: list[str], draw: random.Random, counts) -> list[str]:
    """Delete, repeat or exchange parts among those that count."""
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


def _character(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    removed = draw.choice((0, 1))
    return text[:at] + draw.choice(CHARACTERS) + text[at + removed :]
