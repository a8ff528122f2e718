"""Reading a user's text as documents, each a list of sentences.

Three forms have a fixed meaning: ``.txt`` (a blank line between documents), ``.jsonl`` (one object
per line, field ``text``) and ``.parquet`` (column ``text``). Any other plain text (a licence, a
README, a .md) is prose: its blank lines separate paragraphs, so paragraphs are gathered into
documents.
"""

from __future__ import annotations

import codecs
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from fastbert.data.parquet_file import read_rows
from fastbert.data.sentences import split_sentences

Document: TypeAlias = list[str]

# Licences and documentation on a Linux machine: names without a suffix, README.Debian, LGPL-2.1.
PROSE_SUFFIXES = ("", ".text", ".md", ".rst", ".debian")
ALLOWED = ".txt, .jsonl, .parquet, or plain text (no suffix, " + ", ".join(PROSE_SUFFIXES[1:]) + ")"
# Paragraphs of prose are gathered until a document has this many sentences: enough for a next
# sentence to exist, while one file still gives several documents.
PROSE_SENTENCES = 8
_TERMINAL = (".", "!", "?", "…", "。", "！", "？", '"', "”", "’")


class CorpusWarning(UserWarning):
    """Some files of a folder were not read; the message counts them and says why."""


def _is_text_name(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix == ".txt" or suffix in PROSE_SUFFIXES or suffix[1:].isdigit()


def _problem(path: Path) -> str | None:
    """Why ``path`` cannot be read as UTF-8 text; None when it can."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if chunk.startswith(b"\x1f\x8b"):
                return "compressed"
            if b"\0" in chunk:
                return "binary or UTF-16 (NUL bytes)"
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError:
                return "not UTF-8"
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _files(folder: Path) -> Iterator[Path]:
    """Files below ``folder``, sorted, without hidden ones, each once however often linked."""
    seen = set()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(root, name)
            if path.is_file() and (real := path.resolve()) not in seen:
                seen.add(real)
                yield path


def _readable(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """The files of ``folder`` to read; the others are counted by reason in ``skipped``."""
    for path in _files(folder):
        if path.suffix.lower() in (".jsonl", ".parquet"):
            yield path
        elif not os.access(path, os.R_OK):
            skipped["not readable"] += 1
        elif path.suffix.lower() in (".gz", ".xz", ".bz2", ".zst", ".zip"):
            skipped["compressed"] += 1
        elif not _is_text_name(path):
            skipped["other suffix"] += 1
        elif (problem := _problem(path)) is not None:
            skipped[problem] += 1
        else:
            yield path


def _paragraph(lines: list[str]) -> Document:
    """Sentences of consecutive lines, joined unless each of them ends a sentence."""
    if all(line.rstrip().endswith(_TERMINAL) for line in lines):
        return [sentence for line in lines for sentence in split_sentences(line)]
    return split_sentences(" ".join(lines))


def _paragraphs(lines: Iterable[str]) -> Iterator[Document]:
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if filled and (sentences := _paragraph(list(block))):
            yield sentences


def _read_text(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig") as file:
        if path.suffix.lower() == ".txt":
            yield from _paragraphs(file)
            return
        document: Document = []
        for sentences in _paragraphs(file):
            document += sentences
            if len(document) >= PROSE_SENTENCES:
                yield document
                document = []
        if document:
            yield document


def _record(text: object, place: str) -> Iterator[Document]:
    """The document of one ``text`` value: blank lines inside it separate paragraphs only."""
    if not isinstance(text, str):
        raise ValueError(f'{place}: "text" is {type(text).__name__}, allowed: a string')
    if document := [s for paragraph in _paragraphs(text.splitlines()) for s in paragraph]:
        yield document


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                content = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not valid JSON in UTF-8: {error}") from error
            if not isinstance(content, dict):
                got = type(content).__name__
                raise ValueError(f'{place}: got a {got}, allowed: an object with a "text" field')
            if "text" not in content:
                got = ", ".join(sorted(content)) or "none"
                raise ValueError(f'{place}: no "text" field; the fields are: {got:.200}')
            yield from _record(content["text"], place)


def _read_parquet(path: Path) -> Iterator[Document]:
    for row, (value,) in enumerate(read_rows(path, ["text"]), start=1):
        # A null is a row without text, as an empty string is.
        yield from _record("" if value is None else value, f"{path}, row {row}")


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_all(source: Path, files: Iterable[Path], skipped: Counter[str]) -> Iterator[Document]:
    found = False
    for path in files:
        for document in _READERS.get(path.suffix.lower(), _read_text)(path):
            found = True
            yield document
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not found:
        reasons = f"; files skipped: {reasons}" if reasons else ""
        raise ValueError(f"corpus: no text in {source}, allowed: {ALLOWED}{reasons}")
    if skipped:
        message = f"{source}: {skipped.total()} files skipped ({reasons}); read are {ALLOWED}"
        warnings.warn(message, CorpusWarning, stacklevel=2)


def read_documents(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Yields the documents of a file or folder, each a list of at least one sentence.

    A folder is read recursively in sorted order. Files in it that are no UTF-8 text, are
    compressed, or have another suffix are skipped, and one CorpusWarning at the end counts them. A
    file that is named itself is read whatever its suffix is, and must be readable.

    Raises FileNotFoundError when ``path`` does not exist; ValueError when it holds no text, is not
    UTF-8, or has a broken record (naming the file and line or row); ImportError for parquet without
    pyarrow.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"corpus: {source} does not exist, allowed: a file or folder")
    skipped: Counter[str] = Counter()
    if source.is_dir():
        return _read_all(source, _readable(source, skipped), skipped)
    if source.suffix.lower() not in _READERS and (problem := _problem(source)) is not None:
        raise ValueError(f"corpus: {source} is {problem}, allowed: {ALLOWED}, in UTF-8")
    return _read_all(source, [source], skipped)
