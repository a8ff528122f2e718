"""Reading the rows of .csv, .tsv, .jsonl and .parquet files; errors name the line or row."""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastbert import json_file
from fastbert.data.parquet_file import column_names, read_rows
from fastbert.text_file import MOST_BYTES, content_suffix, read_text

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
# The separators that a .csv file may have. In some languages, spreadsheets write semicolons.
SEPARATORS = (",", ";", "\t")


class DataWarning(UserWarning):
    """Warning that data may have been read differently from what their owner expects."""


class NoField(ValueError):
    """Error for a file that has no column or field of a requested name.

    Attributes:
        field: Name of the missing column or field.
    """

    def __init__(self, message: str, field: str) -> None:
        """Store the message and the name of the missing field."""
        super().__init__(message)
        self.field = field


class Record(NamedTuple):
    """The values of one row.

    Attributes:
        place: The file and the line or row, for error messages.
        values: The values of the requested fields, in the order of the request. A value of a .csv
            or .tsv file is a string; a null of a .jsonl or .parquet file is None.
    """

    place: str
    values: tuple[Any, ...]


def read_records(
    path: Path, fields: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Record]:
    r"""Read some fields of each row of a file.

    A .csv or .tsv file has the names of its columns in the first line. If all `fields` are numbers
    and none is the name of a column, the first line is a row, and the numbers count the columns
    from 1. A .csv file is quoted as in RFC 4180, and separated by commas, semicolons or tabs. In a
    .tsv file, quotation marks are ordinary characters (IANA text/tab-separated-values), unless all
    names of columns are in quotation marks. A .jsonl file has one object per line, and its blank
    lines are skipped.

    Args:
        path: A .csv, .tsv, .jsonl or .parquet file. A .csv, .tsv or .jsonl file may be compressed,
            and may be in UTF-16 or UTF-32 with a byte order mark; see
            `fastbert.text_file.read_text`.
        fields: Names of the columns or fields, which every row must have.
        optional: Names of further columns or fields; if a field is absent, its value is None.

    Yields:
        One `Record` per row, with the values of `fields` and then of `optional`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another suffix, is not text or has no rows, or if a row is
            broken or lacks a field (`NoField`). The message names the file, and the line or row
            that is at fault, if there is one.
        ImportError: If the file is a .parquet or .zst file and pyarrow is not installed.

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
    suffix = content_suffix(path)
    if suffix not in FORMATS:
        raise ValueError(f"{path}: got the suffix {suffix!r}, allowed: {', '.join(FORMATS)}")
    any_record = False
    for record in readers[suffix](path, fields, optional):
        any_record = True
        yield record
    if not any_record:
        raise ValueError(f"{path}: the file has no rows, allowed: at least one")


class _Line(NamedTuple):
    number: int
    fields: list[str]


def _separated(path: Path, fields: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
    text = read_text(path)
    first = next((line for line in text.split("\n") if line.strip()), "").rstrip("\r")
    if content_suffix(path) == ".tsv":
        quoted = all(len(name) > 1 and name[0] == name[-1] == '"' for name in first.split("\t"))
        lines = _quoted(path, text, "\t") if quoted else _unquoted(path, text)
    else:
        lines = _quoted(path, text, _separator(path, first, fields))
    start = next(lines, None)
    if start is None:
        return
    names = [name.strip() for name in start.fields]
    rows = lines
    if fields and all(field.isdecimal() and field not in names for field in fields):
        # The file has no names of columns, so its first line is a row.
        names = [str(number) for number in range(1, len(names) + 1)]
        rows = itertools.chain([start], lines)
    chosen: list[int | None] = [_column(path, names, field) for field in fields]
    chosen += [names.index(field) if field in names else None for field in optional]
    for number, values in rows:
        if len(values) != len(names):
            raise ValueError(
                f"{path}, line {number}: got {len(values)} fields, allowed: {len(names)}, as in "
                f"the first line{_cause(path, values)}"
            )
        yield Record(
            f"{path}, line {number}", tuple(None if i is None else values[i] for i in chosen)
        )


def _separator(path: Path, first: str, fields: Sequence[str]) -> str:
    """Return the first separator that cuts `first` into names with all `fields`; else a comma."""
    for separator in SEPARATORS:
        line = next(_quoted(path, first, separator), None)
        names = [name.strip() for name in line.fields] if line else []
        if len(names) > 1 and all(field in names for field in fields):
            return separator
    return ","


def _quoted(path: Path, text: str, separator: str) -> Iterator[_Line]:
    """Yield the rows of a text in which quotation marks enclose fields."""
    # Lines keep their ends, because a quoted field may contain line breaks.
    lines = io.StringIO(text, newline="")
    rows = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        number = rows.line_num + 1
        # The csv module has one limit on the size of a field for the whole process, so the earlier
        # limit is restored after each row.
        limit = csv.field_size_limit(MOST_BYTES)
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: a broken row: {error}") from error
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if row:
            yield _Line(number, row)


def _unquoted(path: Path, text: str) -> Iterator[_Line]:
    """Yield the rows of a text in which quotation marks have no meaning."""
    enclosed = 0
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.rstrip("\r").split("\t")
        if fields != [""]:
            enclosed += any(map(_is_enclosed, fields))
            yield _Line(number, fields)
    if enclosed:
        warnings.warn(
            f'{path}: {enclosed:,} rows have fields such as "so ""quoted""", whose quotation marks '
            "were read as text, as in every .tsv; if a program put them around its fields, let it "
            "write a .csv",
            DataWarning,
            stacklevel=2,
        )


def _is_enclosed(field: str) -> bool:
    """Return whether a field looks as if a program had enclosed it in quotation marks."""
    inner = field[1:-1]
    return (
        len(field) > 1
        and field[0] == field[-1] == '"'
        and '""' in inner
        and '"' not in inner.replace('""', "")
    )


def _cause(path: Path, values: Sequence[str]) -> str:
    """Return why a row of a .tsv probably has a wrong number of fields, or "" if not known."""
    if content_suffix(path) == ".tsv" and any('"' in value for value in values):
        return (
            "; quotation marks have no meaning in a .tsv: a text with a tab or a line break needs "
            "a .csv"
        )
    return ""


def _column(path: Path, columns: list[str], field: str) -> int:
    if (count := columns.count(field)) != 1:
        present = f"{count} columns" if count else "no column"
        message = f"{path}, line 1: {present} {field!r}, allowed: {', '.join(columns):.200}"
        raise NoField(message, field) if not count else ValueError(message)
    return columns.index(field)


def _objects(path: Path, fields: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
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
                message = f"{place}: no field {field!r}; the fields are: {names:.200}"
                raise NoField(message, field)
        yield Record(place, tuple(content.get(field) for field in (*fields, *optional)))


def _table(path: Path, fields: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    names = column_names(path)
    for field in fields:
        if field not in names:
            message = f"{path} has no column {field!r}, allowed: {', '.join(names):.200}"
            raise NoField(message, field)
    there = [field for field in optional if field in names]
    for number, values in enumerate(read_rows(path, (*fields, *there)), start=1):
        row = dict(zip(there, values[len(fields) :], strict=True))
        more = tuple(row.get(field) for field in optional)
        yield Record(f"{path}, row {number}", (*values[: len(fields)], *more))
