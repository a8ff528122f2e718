"""Damage one file of a folder, by a mutation that a generator of random numbers chooses.

A mutation changes a file, or replaces it by something else, and returns a description of the
change.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

TERABYTE = 1 << 40
JUNK = (
    *(None, True, False, -1, 0, 1, 3, 1.5, 2**31, 2**63, 10**30, float("inf"), float("nan")),
    *("", "x", "/etc/passwd", "../outside", "\0", "\ud800", "x" * 100_000),
    *([], {}, [[]], [5], ["x"], [None], {"a": {}}, [0] * 10_000, {"x": 1, "y": [2]}),
)
# Texts that replace the whole content of a JSON file.
WHOLE = ("", "[]", "{}", "null", "5", '"x"', "[" * 100_000, '{"a":' * 5000, "[],", "\ufeff{}", "{")

Mutation = Callable[[Path, Random], str]


def any_file(path: Path, chance: Random) -> str:
    """Damage a file by a mutation for its suffix, or by a mutation for any file."""
    own = {".json": json_values, ".safetensors": safetensors_header, ".jsonl": json_line}
    kinds: list[Mutation] = [flipped, cut, moved_bytes]
    special = own.get(path.suffix)
    if special is not None:
        kinds = [special, special, special, *kinds]
    elif path.suffix in (".txt", ".csv", ".tsv"):
        kinds = [lines, lines, *kinds]
    return chance.choice(kinds)(path, chance)


def flipped(path: Path, chance: Random) -> str:
    """Flip bits, most of them near both ends, where binary files have their headers."""
    content = bytearray(path.read_bytes())
    count = chance.choice((1, 1, 3, 30))
    for _ in range(count if content else 0):
        near = min(chance.choice((200, 2000, len(content))), len(content))
        place = chance.randrange(near)
        content[chance.choice((place, -1 - place))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"{count} flipped bits"


def cut(path: Path, chance: Random) -> str:
    """Cut off the end of the file, append zeros, or extend the file by a hole to a terabyte."""
    size = path.stat().st_size
    length = chance.choice((0, chance.randrange(size + 1), size + 1, size + 4096, TERABYTE))
    os.truncate(path, length)
    return f"{length} bytes instead of {size}"


def moved_bytes(path: Path, chance: Random) -> str:
    """Overwrite part of the file with zeros, with 0xff, or with another part of the file."""
    content = bytearray(path.read_bytes())
    length = min(chance.choice((1, 4, 8, 100)), len(content))
    start = chance.randrange(len(content) - length + 1)
    other = chance.randrange(len(content) - length + 1)
    part = chance.choice((bytes(length), b"\xff" * length, bytes(content[other : other + length])))
    content[start : start + length] = part
    path.write_bytes(content)
    return f"{length} bytes overwritten at {start}"


def json_values(path: Path, chance: Random) -> str:
    """Replace, remove or nest a value in a JSON file, or replace the whole text."""
    if chance.random() < 0.1:
        text = chance.choice(WHOLE)
        path.write_text(text, encoding="utf-8")
        return f"the text {text[:20]!r}"
    content, what = replaced(json.loads(path.read_text(encoding="utf-8")), chance)
    path.write_text(json.dumps(content), encoding="utf-8")
    return what


def json_line(path: Path, chance: Random) -> str:
    """Replace, remove or nest a value in a line of a file of JSON lines, or replace the line."""
    rows = path.read_text(encoding="utf-8").splitlines()
    number = chance.randrange(len(rows))
    content, what = replaced(json.loads(rows[number]), chance)
    rows[number] = chance.choice((json.dumps(content), json.dumps(content), chance.choice(WHOLE)))
    path.write_text("\n".join(rows), encoding="utf-8")
    return f"line {number + 1}: {what}"


def replaced(content: Any, chance: Random) -> tuple[Any, str]:
    """Return JSON content with one value replaced, removed or nested, and a description."""
    root = holder = [content]
    key: Any = 0
    while chance.random() < 0.8 and isinstance(holder[key], (dict, list)) and holder[key]:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = chance.random()
    if kind < 0.15 and holder is not root:
        del holder[key]
        return root[0], f"{key!r} removed"
    if kind < 0.25:
        for _ in range(levels := chance.choice((50, 150, 800))):
            holder[key] = [holder[key]]
        return root[0], f"{key!r} nested {levels} times"
    value = chance.choice(JUNK)
    if kind < 0.5 and isinstance(holder[key], int):
        value = holder[key] + chance.choice((-1, 1, 2**32, -(2**40)))
    holder[key] = value
    return root[0], f"{key!r} is {value!r:.60}"


def safetensors_header(path: Path, chance: Random) -> str:
    """Change a value in the header of a safetensors file, or replace the length of the header."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if chance.random() < 0.1:
        claimed = chance.choice((0, length - 1, length + 1, 1 << 27, 1 << 62))
        path.write_bytes(struct.pack("<Q", claimed) + content[8:])
        return f"the header claims {claimed} bytes"
    header, what = replaced(json.loads(content[8 : 8 + length]), chance)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return f"header: {what}"


def lines(path: Path, chance: Random) -> str:
    """Remove, repeat, empty or replace a line of the file."""
    rows = path.read_bytes().split(b"\n")
    number = chance.randrange(len(rows))
    junk = (
        b"",
        rows[0],
        b"\xff\xfe",
        b"\0",
        b'"',
        b"\t,\t",
        b"x" * 100_000,
        "\u2028\ud7ff".encode(),
    )
    rows[number : number + 1] = chance.choice(([], [rows[number]] * 2, [chance.choice(junk)]))
    path.write_bytes(b"\n".join(rows))
    return f"line {number + 1}"


def something_else(path: Path, chance: Random) -> str:
    """Replace the file by a folder, a pipe or a link, or only delete the file."""
    path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("absent"),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to the folder": lambda: path.symlink_to("."),
    }
    name = chance.choice(list(kinds))
    kinds[name]()
    return name


def commit(folder: Path, outside: Path, chance: Random) -> str:
    """Make a folder of an unfinished commit (``fastbert.io.commit``) with random parts."""
    place, done = folder / ".fastbert-committed", []
    if chance.random() < 0.2:
        place.symlink_to(chance.choice((outside, folder, outside / "absent")))
        return "the folder of a commit is a link"
    place.mkdir()
    for part in ("lock", "new", "old"):
        kind = chance.choice(("absent", "folder", "folder", "file", "link"))
        if kind == "folder":
            (place / part).mkdir()
            for file in chance.sample(sorted(folder.glob("*.*")), 2):
                if file.is_file():
                    shutil.copy(file, place / part)
        elif kind == "file":
            (place / part).touch()
        elif kind == "link":
            (place / part).symlink_to(chance.choice((outside, outside / "absent")))
        done.append(f"{part}: {kind}")
    return f"a commit with {', '.join(done)}"
