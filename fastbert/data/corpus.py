"""Reading text files as documents; a document is a list of sentences.

Three formats separate their documents. A ``.txt`` file has a blank line between documents. A
``.jsonl`` file has one object with the field ``text`` per line. A ``.parquet`` file has one
document per row in the column ``text``.

Every other plain text file, such as a licence or a README, is prose. The blank lines of prose
separate paragraphs, and consecutive paragraphs are joined into documents.
"""

from __future__ import annotations

import codecs
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from fastbert import json_file
from fastbert.data.parquet_file import read_rows
from fastbert.data.sentences import ends_sentence, split_sentences
from fastbert.text_file import COMPRESSED, content_suffix, is_plain, lines_in_utf8, open_text

Document: TypeAlias = list[str]

# Licences and documentation on a Linux machine have these suffixes, or no suffix (""). A number is
# accepted as a suffix too, as in LGPL-2.1.
PROSE_SUFFIXES = ("", ".text", ".md", ".rst", ".debian")
ALLOWED = ".txt, .jsonl, .parquet, or plain text (no suffix, " + ", ".join(PROSE_SUFFIXES[1:]) + ")"
# Paragraphs of prose are joined until a document has this many sentences. The document is then long
# enough for a next-sentence pair, and one file gives several documents.
PROSE_SENTENCES = 8
NOT_UTF8 = "not UTF-8"
_QUOTES = ('"', "”", "’")


class CorpusWarning(UserWarning):
    """Warning that files of a folder were skipped, with the number of files for each reason."""


def _is_text_name(path: Path) -> bool:
    suffix = content_suffix(path)
    return suffix == ".txt" or suffix in PROSE_SUFFIXES or suffix[1:].isdigit()


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (*COMPRESSED, ".bz2", ".zip")


def _problem(path: Path) -> str | None:
    """Return why a file is not text, or None if the file is text.

    Text is in UTF-8, or in UTF-16 or UTF-32 with a byte order mark.
    """
    if not is_plain(path):
        return NOT_UTF8 if _bad_line(path) else None
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
                return NOT_UTF8
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return NOT_UTF8
    return None


def _bad_line(path: Path) -> int:
    """Return the number of the first line that is not valid text, or 0 if all lines are valid."""
    for number, line in enumerate(lines_in_utf8(path), start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            return number
    return 0


def text_files(folder: Path) -> Iterator[Path]:
    """Yield each file below `folder` once, in sorted order.

    Hidden files and folders are left out. A file to which several links point is yielded once.
    """
    seen = set()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(root, name)
            if path.is_file() and (real := path.resolve()) not in seen:
                seen.add(real)
                yield path


def _readable(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files of `folder` to read, and count the other files in `skipped` by reason."""
    for path in text_files(folder):
        if content_suffix(path) in (".jsonl", ".parquet"):
            yield path
        elif not os.access(path, os.R_OK):
            skipped["not readable"] += 1
        elif _is_compressed(path) and content_suffix(path) != ".txt":
            skipped["compressed"] += 1
        elif not _is_text_name(path):
            skipped["other suffix"] += 1
        elif (problem := _problem(path)) is not None:
            skipped[problem] += 1
        else:
            yield path


def split_paragraph(lines: list[str]) -> Document:
    """Split consecutive lines into sentences; lines are joined unless each line ends a sentence."""
    if all(line.rstrip().endswith(_QUOTES) or ends_sentence(line.rstrip()) for line in lines):
        return [sentence for line in lines for sentence in split_sentences(line)]
    return split_sentences(" ".join(lines))


def _paragraphs(lines: Iterable[str]) -> Iterator[Document]:
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if filled and (sentences := split_paragraph(list(block))):
            yield sentences


def _read_text(path: Path) -> Iterator[Document]:
    with open_text(path) as file:
        if content_suffix(path) == ".txt":
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
    """Yield the document of one ``text`` value, in which blank lines separate paragraphs.

    A value without a sentence yields nothing.
    """
    if not isinstance(text, str):
        raise ValueError(f'{place}: "text" is {type(text).__name__}, allowed: a string')
    if document := [s for paragraph in _paragraphs(text.splitlines()) for s in paragraph]:
        yield document


def _read_jsonl(path: Path) -> Iterator[Document]:
    for number, line in enumerate(lines_in_utf8(path), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            content = json_file.parse(line.decode("utf-8"))
        except ValueError as error:
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
        # A row whose value is null has no text, like a row with an empty string.
        yield from _record("" if value is None else value, f"{path}, row {row}")


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_all(source: Path, files: Iterable[Path], skipped: Counter[str]) -> Iterator[Document]:
    any_text = False
    for path in files:
        for document in _READERS.get(content_suffix(path), _read_text)(path):
            any_text = True
            yield document
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not any_text:
        reasons = f"; files skipped: {reasons}" if reasons else ""
        raise ValueError(f"corpus: no text in {source}, allowed: {ALLOWED}{reasons}")
    if skipped:
        message = f"{source}: {skipped.total()} files skipped ({reasons}); allowed: {ALLOWED}"
        warnings.warn(message, CorpusWarning, stacklevel=2)


def read_documents(path: str | os.PathLike[str]) -> Iterator[Document]:
    r"""Read the documents of a file or folder; a document is a list of at least one sentence.

    A folder is read recursively in sorted order. Files in a folder that are not text, or have an
    unknown suffix, are skipped, and one `CorpusWarning` at the end gives their number. If `path` is
    a file, it may have any suffix, but it must be text. Text may be in UTF-16 or UTF-32 with a byte
    order mark, and .txt and .jsonl files may be compressed; see `fastbert.text_file.read_text`.

    - A ``.txt`` file has a blank line between documents.
    - A ``.jsonl`` file has one object with the field ``text`` per line.
    - A ``.parquet`` file has one document per row in the column ``text``.
    - Any other text file is prose. Its paragraphs are joined into documents of eight sentences or
      more, and only the last document of a file may be shorter.

    Args:
        path: File or folder.

    Returns:
        Iterator over the documents, which reads the files as it advances.

    Raises:
        FileNotFoundError: If `path` does not exist.
        ValueError: If there is no text, if a file is not text, or if a line of a ``.jsonl`` file or
            a row of a ``.parquet`` file is broken. The message names the file and the line or row.
        ImportError: If a ``.parquet`` or ``.zst`` file is read without pyarrow.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fastbert.data import read_documents
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "corpus.txt"
        ...     _ = file.write_text("It rains. We stay in.\n\nThe sun is out. We go out.\n")
        ...     list(read_documents(file))
        [['It rains.', 'We stay in.'], ['The sun is out.', 'We go out.']]
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"corpus: {source} does not exist, allowed: a file or folder")
    skipped: Counter[str] = Counter()
    if source.is_dir():
        return _read_all(source, _readable(source, skipped), skipped)
    if content_suffix(source) not in _READERS and (problem := _problem(source)) is not None:
        line = f", line {_bad_line(source)}," if problem == NOT_UTF8 else ""
        raise ValueError(f"corpus: {source}{line} is {problem}, allowed: {ALLOWED}, in UTF-8")
    return _read_all(source, [source], skipped)
