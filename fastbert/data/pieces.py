"""Cutting text files into pieces of similar size, and reading the documents of a piece.

A piece is read without the other pieces, so several processes can read parts of one file. Every
document is in exactly one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fastbert import json_file
from fastbert.data.corpus import text_files
from fastbert.data.parquet_file import read_rows, row_groups
from fastbert.text_file import COMPRESSED, content_suffix, is_plain, lines_in_utf8

SUFFIXES = (".txt", ".jsonl", ".parquet")
# A document of a .txt file with more than this number of bytes is cut after a line, so that no
# document fills the memory.
LONGEST = 4 << 20
_BLOCK = 1 << 20
# ``Span.end`` has this value if the file is compressed or not in UTF-8, because such a file is read
# as a whole.
_WHOLE = 1 << 62
# The estimated number of bytes of text for each byte of a compressed file.
_COMPRESSION = 4


class Span(NamedTuple):
    """A part of a file.

    Attributes:
        path: The file.
        start: Index of the first byte; for a .parquet file, index of the first row group.
        end: Index after the last byte or row group.
        size: Size of the text in bytes; an estimate for .parquet and compressed files.
    """

    path: Path
    start: int
    end: int
    size: int


Piece = tuple[Span, ...]


def find_text(source: Path) -> tuple[list[Path], int]:
    """Find the text files of a folder, at any depth and sorted, or check a single file.

    Args:
        source: A .txt, .jsonl or .parquet file, or a folder. A .txt or .jsonl file may be
            compressed, and may be in UTF-16 or UTF-32 with a byte order mark; see
            `fastbert.text_file.read_text`. In a folder, files and folders whose name begins with a
            dot are not read.

    Returns:
        The files, and the number of files of another suffix.

    Raises:
        FileNotFoundError: If `source` does not exist.
        ValueError: If there is no text file.
    """
    if not source.exists():
        raise FileNotFoundError(f"text: {source} does not exist, allowed: a file or folder")
    files = list(text_files(source)) if source.is_dir() else [source]
    texts = [path for path in files if content_suffix(path) in SUFFIXES]
    if not texts:
        raise ValueError(f"text: {source} is or has no file of {', '.join(SUFFIXES)}")
    return texts, len(files) - len(texts)


def cut(files: Sequence[Path], piece_bytes: int) -> list[Piece]:
    """Cut files into pieces; small files are joined, and large files are divided.

    Args:
        files: The files, in the order of the corpus.
        piece_bytes: Intended size of a piece in bytes. A row group of a .parquet file is never
            divided, and neither is a file that is compressed or not in UTF-8.

    Returns:
        The pieces, which depend only on the order, sizes and formats of the files, and on the row
        groups of .parquet files.

    Raises:
        ImportError: If a .parquet file is read without pyarrow.
        OSError: If a file cannot be read.
        ValueError: If a .parquet file is damaged.
    """
    pieces: list[Piece] = []
    joined: list[Span] = []
    size = 0
    for path in files:
        for span in _spans(path, piece_bytes):
            if joined and size + span.size > piece_bytes:
                pieces.append(tuple(joined))
                joined, size = [], 0
            joined.append(span)
            size += span.size
    return [*pieces, tuple(joined)] if joined else pieces


def _spans(path: Path, piece_bytes: int) -> Iterator[Span]:
    if content_suffix(path) != ".parquet":
        size = path.stat().st_size
        if not is_plain(path):
            compressed = path.suffix.lower() in COMPRESSED
            yield Span(path, 0, _WHOLE, size * _COMPRESSION if compressed else size)
            return
        parts = max(1, -(-size // piece_bytes))
        for part in range(parts):
            start, end = size * part // parts, size * (part + 1) // parts
            yield Span(path, start, end, end - start)
        return
    start, taken = 0, 0
    sizes = [size for _, size in row_groups(path)]
    for number, size in enumerate(sizes):
        if taken and taken + size > piece_bytes:
            yield Span(path, start, number, taken)
            start, taken = number, 0
        taken += size
    yield Span(path, start, len(sizes), taken)


def read_piece(piece: Piece) -> Iterator[str]:
    """Yield the text of each document of a piece.

    Args:
        piece: A piece that `cut` returned.

    Yields:
        The documents: the blocks of lines of a .txt file, or the values of ``text`` of a .jsonl or
        .parquet file.

    Raises:
        ImportError: If a .parquet or .zst file is read without pyarrow.
        OSError: If a file cannot be read.
        ValueError: If a line or a row is broken, or if bytes are not valid text. The message names
            the file and the line or the row.
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for span in piece:
        yield from readers[content_suffix(span.path)](span)


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from the first line that begins in the span to the end of the file.

    Each line comes with the index of its first byte, so that the caller can stop after the span.
    """
    if span.end == _WHOLE:
        place = 0
        for line in lines_in_utf8(span.path):
            yield place, line
            place += len(line)
        return
    with span.path.open("rb") as file:
        place = span.start
        if place:
            # The line that contains the last byte before the span belongs to the previous span.
            file.seek(place - 1)
            place += len(file.readline()) - 1
        for line in file:
            yield place, line
            place += len(line)


def _read_txt(span: Span) -> Iterator[str]:
    """Yield each block of lines that directly follows a blank line which begins in the span."""
    block: list[str] = []
    # `blank` is the index of the byte at which the preceding blank line begins; None until a blank
    # line was read. The start of a file counts as a blank line.
    blank: int | None = None if span.start else 0
    size = 0
    for place, line in _lines(span):
        if blank is None and line.strip():
            continue
        text = _decode(span.path, place, line)
        if not text.strip():
            if block:
                yield "".join(block)
                block, size = [], 0
            if place >= span.end:
                return
            blank = place
        elif blank is not None:
            block.append(text)
            size += len(line)
            if size > LONGEST:
                yield "".join(block)
                block, size = [], 0
    if block:
        yield "".join(block)


def _read_jsonl(span: Span) -> Iterator[str]:
    for place, line in _lines(span):
        if place >= span.end:
            return
        if not line.strip():
            continue
        text = _decode(span.path, place, line)
        try:
            content = json_file.parse(text)
        except ValueError as error:
            raise _broken(span.path, place, f"not valid JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("text"), str):
            got = type(content).__name__
            if isinstance(content, dict):
                got = "an object whose fields are: " + (", ".join(content) or "none")
                if "text" in content:
                    got = f'"text" of the type {type(content["text"]).__name__}'
            allowed = 'an object with a string in the field "text"'
            raise _broken(span.path, place, f"got {got:.200}, allowed: {allowed}")
        yield content["text"]


def _read_parquet(span: Span) -> Iterator[str]:
    first = sum(rows for rows, _ in row_groups(span.path)[: span.start])
    rows = read_rows(span.path, ["text"], range(span.start, span.end))
    for row, (value,) in enumerate(rows, start=first + 1):
        # A row whose value is null has no text, like a row with an empty string.
        if value is not None and not isinstance(value, str):
            got = type(value).__name__
            raise ValueError(f'{span.path}, row {row}: "text" is {got}, allowed: a string')
        yield value or ""


def _decode(path: Path, place: int, line: bytes) -> str:
    try:
        return line.decode("utf-8" if place else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise _broken(path, place, f"not UTF-8: {error.reason}") from error


def _broken(path: Path, place: int, what: str) -> ValueError:
    """Return an error that names the line that begins at the byte `place` of the text."""
    return ValueError(f"{path}, line {1 + _line_ends(path, place)}: {what}")


def _line_ends(path: Path, place: int) -> int:
    """Return the number of line ends in the first `place` bytes of the text in UTF-8."""
    if not is_plain(path):
        sizes = itertools.accumulate(map(len, lines_in_utf8(path)))
        return sum(1 for _ in itertools.takewhile(lambda size: size <= place, sizes))
    count = 0
    with path.open("rb") as file:
        while place:
            chunk = file.read(min(place, _BLOCK))
            count += chunk.count(b"\n")
            place -= len(chunk)
    return count
