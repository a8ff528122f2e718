"""Pairs of a source text and a target text, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastbert.data.records import FORMATS, read_records
from fastbert.text_file import content_suffix


class Pair(NamedTuple):
    """A source with its target.

    Attributes:
        place: The file and the line, or the paragraph, for error messages.
        source: The text that the model reads.
        target: The text that the model writes.
        group: The pairs of a group are held out together.
    """

    place: str
    source: str
    target: str
    group: str


def read_pairs(path: Path, source_field: str, target_field: str) -> list[Pair]:
    """Read the pairs of a file. Pairs with the same source have the same group.

    Args:
        path: A .csv, .tsv, .jsonl or .parquet file; see `read_records`.
        source_field: Name of the column or field of the sources; its number in a file without names
            of columns.
        target_field: Name or number of the column or field of the targets.

    Returns:
        The pairs in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another suffix or no rows, or if a row is broken, lacks a field
            or has an empty text. The message names the file and the line.
        ImportError: If the file is a .parquet or .zst file and pyarrow is not installed.
    """
    suffix = content_suffix(path)
    if suffix not in FORMATS:
        allowed = f"a {', '.join(FORMATS)} file"
        raise ValueError(f"pairs: got {str(path)!r}, allowed: {allowed}")
    if not path.is_file():
        raise FileNotFoundError(f"pairs: {path} does not exist, allowed: a file")
    fields = (source_field, target_field)
    pairs = []
    for place, values in read_records(path, fields):
        for field, value in zip(fields, values, strict=True):
            if not isinstance(value, str) or not value:
                got = f"got {value!r:.200} in {field}"
                raise ValueError(f"{place}: {got}, allowed: a text that is not empty")
        source, target = values
        pairs.append(Pair(place, source, target, group=source))
    return pairs
