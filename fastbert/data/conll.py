"""Reading CoNLL files: one word per line with its tag, and a blank line after each sentence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import chain, dropwhile
from pathlib import Path
from typing import NamedTuple

from fastbert.data.records import DataWarning, NoField, Record
from fastbert.text_file import read_text

# A line whose first column is this text separates documents (Tjong Kim Sang and De Meulder 2003).
DOCUMENT = "-DOCSTART-"
# This pattern matches a tag of the scheme IOB, IOBES or BILOU.
_ENTITY = re.compile(r"O$|[BIESLU]-.")
# CoNLL-U has ten columns. The second column is the word, and the fourth is its part of speech.
_CONLL_U = 10
# The first column of CoNLL-U has the number of a word (3), of a multiword token (3-4) or of an
# empty node (3.1), which is a word that the text leaves out.
_NUMBER = re.compile(r"(\d+)([-.]\d+)?$")


class _Line(NamedTuple):
    number: int
    fields: list[str]


class Columns(NamedTuple):
    """The two columns that are read from a CoNLL file.

    Attributes:
        word: Number of the column of the words; the first column has the number 1.
        tag: Number of the column of the tags.
    """

    word: int
    tag: int


def read_conll(
    path: Path, *, tagged: bool = True, columns: Columns | None = None
) -> Iterator[Record]:
    r"""Read the sentences of a CoNLL file.

    The columns of a line are separated by tabs or, if the line has no tab, by blanks. The first
    column is the word, and the last column is its tag.

    If the first column counts the words of each sentence, the second column is the word instead.
    The tag is then in the fourth column of a CoNLL-U file. In a file of GermEval 2014, whose last
    two columns are tags of names, the tag is in the third column. In any other file of at most four
    columns, the tag is in the last column. If a file has more than two columns, a `DataWarning`
    names the columns that are read.

    A line whose first column is ``-DOCSTART-`` separates documents and is not read. At the start of
    a sentence, a line that begins with ``#`` is a comment in two cases: its number of columns
    differs from the number in other lines, or its first column is ``#`` alone and its last column
    is not the tag of another line.

    Args:
        path: Path of the file, which may be compressed; see `fastbert.text_file.read_text`.
        tagged: Whether the tags are read; if not, one column is enough.
        columns: The columns that are read; None infers them from the file.

    Yields:
        Records with two values: the words and their tags, as lists of the same length.
        ``Record.place`` names the first line of the sentence. The tags are empty if `tagged` is
        False.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not valid text or has no sentence, if a line has another number
            of columns than the first line, or if a column does not exist or cannot be inferred. The
            message names the file and, for a wrong line, the line.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastbert.data.conll import read_conll
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.conll")
        ...     _ = path.write_text("Ada NNP B-PER\nsings VBZ O\n\n", encoding="utf-8")
        ...     [record.values for record in read_conll(path)]
        [(['Ada', 'sings'], ['B-PER', 'O'])]
    """
    text = read_text(path)
    if text.startswith("#begin document") and columns is None:
        raise ValueError(
            f"{path}, line 1: the layout of CoNLL 2012, allowed: a word and its tag in each line, "
            "or the numbers of their columns"
        )
    sentences = _without_comments(list(_sentences(text)))
    if not sentences:
        raise ValueError(f"{path}: the file has no sentence, allowed: at least one")
    width = _width(path, sentences)
    numbered = columns is None and _are_numbered(sentences, 3 if tagged else 2)
    if numbered:
        # Lines of multiword tokens (3-4) and of empty nodes (3.1) are dropped.
        sentences = [[line for line in s if line.fields[0].isdecimal()] for s in sentences]
    columns = columns or (_after_numbers(path, sentences, width) if numbered else Columns(1, width))
    _check_columns(path, columns, sentences[0][0].number, width, tagged)
    for sentence in sentences:
        words = [line.fields[columns.word - 1] for line in sentence]
        tags = [line.fields[columns.tag - 1] for line in sentence] if tagged else []
        yield Record(f"{path}, line {sentence[0].number}", (words, tags))


def _sentences(text: str) -> Iterator[list[_Line]]:
    """Yield the lines of each sentence, split into columns; blank lines separate sentences."""
    sentence: list[_Line] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        # White space other than blanks and tabs, such as a no-break space, is a part of a word.
        line = line.rstrip(" \t\r")
        if "\t" in line:
            fields = [field.strip(" ") for field in line.split("\t")]
        else:
            fields = list(filter(None, line.split(" ")))
        if fields and fields[0] != DOCUMENT:
            sentence.append(_Line(number, fields))
        elif sentence:
            yield sentence
            sentence = []


def _without_comments(sentences: list[list[_Line]]) -> list[list[_Line]]:
    """Return the sentences without the comments at their start."""
    words = [line.fields for lines in sentences for line in lines if line.fields[0][:1] != "#"]
    width = len(words[0]) if words else 1
    tags = {fields[-1] for fields in words} if width > 1 else {"#"}

    def is_comment(line: _Line) -> bool:
        first, last = line.fields[0], line.fields[-1]
        other = len(line.fields) != width
        return first.startswith("#") and (other or (first == "#" and last not in tags))

    stripped = [list(dropwhile(is_comment, lines)) for lines in sentences]
    return list(filter(None, stripped))


def _width(path: Path, sentences: list[list[_Line]]) -> int:
    """Return the number of columns of the first line.

    Raises:
        ValueError: If another line has another number of columns, or if a column is empty.
    """
    width = len(sentences[0][0].fields)
    for number, fields in chain.from_iterable(sentences):
        if len(fields) != width or not all(fields):
            got = f"{len(list(filter(None, fields)))} columns"
            raise ValueError(f"{path}, line {number}: got {got}, allowed: {width}")
    return width


def _are_numbered(sentences: list[list[_Line]], columns: int) -> bool:
    """Return whether the first column counts the words of each sentence.

    The result is False if every sentence has one word, or if the file has fewer than `columns`
    columns.
    """
    longest = 0
    for sentence in sentences:
        matches = [_NUMBER.match(line.fields[0]) for line in sentence]
        counted = [int(match[1]) for match in matches if match and not match[2]]
        if not all(matches) or counted != list(range(1, len(counted) + 1)) or not counted:
            return False
        longest = max(longest, len(counted))
    return longest > 1 and len(sentences[0][0].fields) >= columns


def _after_numbers(path: Path, sentences: list[list[_Line]], width: int) -> Columns:
    """Return the columns of words and tags in a file whose first column counts words."""
    if width <= 3:
        return Columns(2, width)
    if width == 4:
        lines = chain.from_iterable(sentences)
        both = all(_ENTITY.match(field) for line in lines for field in line.fields[2:])
        return Columns(2, 3 if both else 4)
    if width == _CONLL_U:
        return Columns(2, 4)
    raise ValueError(
        f"{path}, line {sentences[0][0].number}: the first of {width} columns counts words, and "
        "which one has the tags is not known; allowed: 3 or 4 columns, the 10 of CoNLL-U, or the "
        "numbers of the columns"
    )


def _check_columns(path: Path, columns: Columns, number: int, width: int, tagged: bool) -> None:
    """Raise ValueError if a column does not exist; if the file has more than two columns, warn."""
    place = f"{path}, line {number}"
    if tagged and width < 2:
        raise NoField(f"{place}: got 1 column, allowed: a word and its tag", "tags")
    read = columns if tagged else columns[:1]
    for column in read:
        if not 1 <= column <= width:
            raise ValueError(f"{place}: no column {column}, allowed: 1 … {width}")
    if width > 2:
        tag = f", and column {columns.tag} has the tags" if tagged else ""
        warnings.warn(
            f"{path}: column {columns.word} of {width} has the words{tag}; the others are not read",
            DataWarning,
            stacklevel=2,
        )
