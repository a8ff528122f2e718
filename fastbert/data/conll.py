"""Reading CoNLL files: one word per line with its tag, and a blank line after each sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastbert.data.records import Record, read_text

# A line of this kind separates documents (Tjong Kim Sang and De Meulder 2003).
DOCUMENT = "-DOCSTART-"


def read_conll(path: Path, *, tagged: bool = True) -> Iterator[Record]:
    r"""Read the sentences of a CoNLL file.

    The columns are separated by tabs or, if the line has no tab, by spaces. The first column is the
    word, and the last column is its tag. Lines that begin with ``-DOCSTART-`` do not count.

    Args:
        path: Path of the file.
        tagged: Whether the last column is a tag; if not, one column is enough.

    Yields:
        Records with two values: the words and their tags, as lists of the same length. The place is
        the first line of the sentence. The tags are empty if `tagged` is False.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not UTF-8 or has no sentence, or if a line has another number of
            columns than the first one. The message names the file and the line.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastbert.data.conll import read_conll
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.conll")
        ...     _ = path.write_text("Ada NNP B-PER\nsings VBZ O\n\n", encoding="utf-8")
        ...     [record.values for record in read_conll(path)]
        [(['Ada', 'sings'], ['B-PER', 'O'])]
    """
    columns = None
    words: list[str] = []
    tags: list[str] = []
    start = 0
    found = False
    for number, line in enumerate([*read_text(path).split("\n"), ""], start=1):
        fields = line.rstrip("\r").split("\t") if "\t" in line else line.split()
        if not line.strip() or fields[0] == DOCUMENT:
            if words:
                found = True
                yield Record(f"{path}, line {start}", (words, tags))
                words, tags = [], []
            continue
        columns = columns or len(fields)
        if len(fields) != columns or not all(fields):
            got = f"{len(list(filter(None, fields)))} columns"
            raise ValueError(f"{path}, line {number}: got {got}, allowed: {columns}")
        if tagged and columns < 2:
            raise ValueError(f"{path}, line {number}: got 1 column, allowed: a word and its tag")
        if not words:
            start = number
        words.append(fields[0])
        if tagged:
            tags.append(fields[-1])
    if not found:
        raise ValueError(f"{path}: the file has no sentence, allowed: at least one")
