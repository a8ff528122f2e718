"""Reading the rows of .csv, .tsv, .jsonl and .parquet files; an error names the file and line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastbert import json_file
from fastbert.data.parquet_file import read_rows
from fastbert.file_size import check_file

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
# A file is in memory as a whole.
MOST_BYTES = 1 << 33


class Record(NamedTuple):
    """The values of one row.

    Attributes:
        place: The file and the line or row, for error messages.
        values: The value of each field that was asked for, in their order. A value of a .csv or
            .tsv file is a string; a value that is absent in a .parquet file is None.
    """

    place: str
    values: tuple[Any, ...]


def read_records(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    r"""Read some fields of each row of a file.

    A .csv or .tsv file has the names of its columns in the first line. A .jsonl file has one object
    per line; blank lines do not count.

    Args:
        path: A .csv, .tsv, .jsonl or .parquet file.
        fields: Names of the columns or of the fields.

    Yields:
        One record per row.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another suffix, is not UTF-8 or has no rows, or if a row is
            broken or lacks a field. The message names the file and the line.
        ImportError: If the file is a .parquet file and pyarrow is not installed.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastbert.data.records import read_records
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "reviews.csv")
        ...     _ = path.write_text("id,text,label\n1,\"good, cheap\",pos\n", encoding="utf-8")
        ...     [record.values for record in read_records(path, ("text", "label"))]
        [('good, cheap', 'pos')]
    """
    readers = {".csv": _separated, ".tsv": _separated, ".jsonl": _objects, ".parquet": _table}
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: got the suffix {suffix!r}, allowed: {', '.join(FORMATS)}")
    found = False
    for record in readers[suffix](path, fields):
        found = True
        yield record
    if not found:
        raise ValueError(f"{path}: the file has no rows, allowed: at least one")


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Args:
        path: Path of the file.

    Returns:
        The text, with the line ends of the file.

    Raises:
        ValueError: If the file is not UTF-8, or is larger than ``MOST_BYTES``. The message names
            the file, and the line if there is one.
    """
    # A pipe has no size, and is read to its end.
    if path.is_file():
        check_file(path, MOST_BYTES)
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8: {error.reason}") from error


def _separated(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # Lines keep their ends, because a quoted field may contain line breaks.
    lines = io.StringIO(read_text(path), newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {line}: a broken row: {error}") from error
        if row is None:
            return
        if columns is None:
            columns = row
            chosen = [_column(path, columns, field) for field in fields]
        elif row:
            if len(row) != len(columns):
                raise ValueError(
                    f"{path}, line {line}: got {len(row)} fields, allowed: {len(columns)}, as in "
                    "the first line"
                )
            yield Record(f"{path}, line {line}", tuple(row[i] for i in chosen))


def _column(path: Path, columns: list[str], field: str) -> int:
    if (count := columns.count(field)) != 1:
        found = f"{count} columns" if count else "no column"
        raise ValueError(f"{path}, line 1: {found} {field!r}, allowed: {', '.join(columns):.200}")
    return columns.index(field)


def _objects(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            content = json_file.parse(line)
        except ValueError as error:
            raise ValueError(f"{place}: not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{place}: got a {type(content).__name__}, allowed: an object")
        for field in fields:
            if field not in content:
                names = ", ".join(content) or "none"
                raise ValueError(f"{place}: no field {field!r}; the fields are: {names:.200}")
        yield Record(place, tuple(content[field] for field in fields))


def _table(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    for number, values in enumerate(read_rows(path, fields), start=1):
        yield Record(f"{path}, row {number}", values)
