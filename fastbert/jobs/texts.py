"""Read and check the texts of INPUT, and write parquet files.

INPUT and OUT are the file arguments of a command.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastbert import json_file
from fastbert.jobs.reporter import SILENT, Reporter
from fastbert.text_file import content_suffix, lines_in_utf8

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEPARATED = (".csv", ".tsv")
FORMATS = (".txt", ".jsonl", *SEPARATED, ".parquet")
LARGEST_ID = 1 << 63

Id = str | int


class Row(NamedTuple):
    """The values of the requested fields of a line; `place` names the file and the line."""

    place: str
    values: tuple[Any, ...]


class Texts:
    r"""The texts of a .txt, .jsonl, .csv, .tsv or .parquet file, and the ids of its lines.

    An iteration yields a tuple for each line, with a text for each field. The file can be iterated
    over several times. A .csv or .tsv file is read into memory as a whole; of any other file, at
    most a block of lines is in memory.

    The attribute ``count`` is the number of lines in the last complete iteration. The attribute
    ``digest`` is the SHA-256 digest of the texts of this iteration, and of the ids if there are
    any. The first iteration takes place in the constructor.

    Args:
        path: Path of the file. A file other than .parquet may be compressed, and may be in UTF-16
            or UTF-32 with a byte order mark; see `read_text`.
        fields: Names of the fields of a .jsonl file or of the columns of a .csv, .tsv or .parquet
            file. A .txt file has the single field "text", which is the whole line.
        reporter: Object whose context manager ``reading`` surrounds the first reading of the file.
        id_field: Name of the field or column of the ids, which are texts or integers, but not both
            in one file; None means that there are no ids. The attribute ``id_type`` is ``str`` or
            ``int``; it is None if there are no ids.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another suffix or no lines, if a field is not a text in Unicode,
            or if an id is not allowed. The message names the line.
        ImportError: If the file is a .parquet or .zst file and pyarrow is not installed.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastbert.jobs.texts import Texts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "lines.jsonl")
        ...     _ = path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
        ...     list(Texts(path, ("text",)))
        [('one',), ('two',)]
    """

    def __init__(
        self,
        path: Path,
        fields: tuple[str, ...],
        reporter: Reporter = SILENT,
        id_field: str | None = None,
    ) -> None:
        """Check the arguments and read the file once."""
        if content_suffix(path) not in FORMATS:
            raise ValueError(f"INPUT: got {str(path)!r}, allowed: a {', '.join(FORMATS)} file")
        if content_suffix(path) == ".txt" and (fields != ("text",) or id_field is not None):
            given = ", ".join(fields if id_field is None else (*fields, id_field))
            raise ValueError(
                f"--field, --pair-field, --id-field: got {given} of a .txt, "
                "allowed: fields of a .jsonl or columns of a .csv, .tsv or .parquet"
            )
        self.path, self.fields, self.id_field = path, fields, id_field
        self.count, self.digest = 0, ""
        self.id_type: type | None = None
        with reporter.reading(path):
            for _ in self:
                pass
        if not self.count:
            raise ValueError(f"INPUT: {str(path)!r} has no lines, allowed: at least one")

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each line; at the end, set ``count`` and ``digest``."""
        for texts, _ in self._read():
            yield texts

    def ids(self) -> Iterator[Id]:
        """Yield the id of each line; each call reads the file again.

        Raises:
            ValueError: At the end, if the file has changed since the last complete iteration.
        """
        digest = self.digest
        for _, own in self._read():
            assert own is not None
            yield own
        if self.digest != digest:
            raise ValueError(f"INPUT: {self.path} changed while it was read, allowed: no change")

    def _read(self) -> Iterator[tuple[tuple[str, ...], Id | None]]:
        """Yield the checked texts of each line with its id."""
        readers = {
            ".txt": self._lines,
            ".jsonl": self._objects,
            ".parquet": self._rows,
            **dict.fromkeys(SEPARATED, self._records),
        }
        # One column may be both the text and the id.
        names = dict.fromkeys((*self.fields, *([self.id_field] if self.id_field else ())))
        columns = tuple(names)
        digest, count = hashlib.sha256(), 0
        for count, row in enumerate(readers[content_suffix(self.path)](columns), 1):
            values = dict(zip(columns, row.values, strict=True))
            for field in self.fields:
                digest.update(self._checked(row.place, field, values[field]))
            own = None
            if self.id_field is not None:
                own = self._checked_id(row.place, values[self.id_field], first=count == 1)
                digest.update(self._checked(row.place, self.id_field, str(own)))
            yield tuple(values[field] for field in self.fields), own
        self.count, self.digest = count, digest.hexdigest()

    def _checked(self, place: str, field: str, value: Any) -> bytes:
        """Check a text, and return its length and its UTF-8 bytes as the input of a digest."""
        if not isinstance(value, str):
            wanted = "an object with a string field" if self._is_jsonl else "a string in the column"
            raise ValueError(f"INPUT: {place}: expected {wanted} {field}")
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"INPUT: {place}: expected text in UTF-8") from error
        return b"%d:%b" % (len(text), text)

    def _checked_id(self, place: str, value: Any, *, first: bool) -> Id:
        """Return an id after a check; all ids must have the type of the first id, str or int."""
        kind = type(value)
        sound = kind is str or (kind is int and -LARGEST_ID <= value < LARGEST_ID)
        if first and sound:
            self.id_type = kind
        if not sound or kind is not self.id_type:
            allowed = "a text or an integer of 64 bits, of one type in all lines"
            raise ValueError(
                f"INPUT: {place}: got {value!r:.100} in {self.id_field}, allowed: {allowed}"
            )
        return value

    @property
    def _is_jsonl(self) -> bool:
        return content_suffix(self.path) == ".jsonl"

    def _lines(self, _: tuple[str, ...]) -> Iterator[Row]:
        # Bytes that are not UTF-8 become surrogates. `_checked` refuses a text with surrogates and
        # names its line.
        for number, line in enumerate(lines_in_utf8(self.path), 1):
            text = line.decode("utf-8", "surrogateescape")
            yield Row(f"{self.path}, line {number}", (text.removesuffix("\n").removesuffix("\r"),))

    def _objects(self, fields: tuple[str, ...]) -> Iterator[Row]:
        for place, (line,) in self._lines(fields):
            try:
                content = json_file.parse(line)
            except ValueError as error:
                wanted = f"expected an object with a string field {fields[0]}"
                raise ValueError(f"INPUT: {place}: {wanted}: {error}") from error
            if not isinstance(content, dict):
                content = {}
            yield Row(place, tuple(content.get(field) for field in fields))

    def _records(self, fields: tuple[str, ...]) -> Iterator[Row]:
        from fastbert.data.records import read_records

        try:
            for place, values in read_records(self.path, fields):
                yield Row(place, values)
        except ValueError as error:
            raise ValueError(f"INPUT: {error}") from error

    def _rows(self, fields: tuple[str, ...]) -> Iterator[Row]:
        require_parquet("INPUT")
        from fastbert.data.parquet_file import read_rows

        try:
            for number, values in enumerate(read_rows(self.path, fields), 1):
                yield Row(f"{self.path}, line {number}", values)
        except ValueError as error:
            raise ValueError(f"INPUT: {error}") from error


def check_output(target: Path, source: Path, formats: tuple[str, ...]) -> None:
    """Check whether OUT may be written, before the job starts.

    Args:
        target: The path of OUT.
        source: The path of INPUT.
        formats: The suffixes that OUT may have.

    Raises:
        ValueError: If OUT has another suffix, is a folder, or is INPUT itself.
        ImportError: If OUT is a .parquet file and pyarrow is not installed.
    """
    if target.suffix.lower() not in formats:
        raise ValueError(f"OUT: got {str(target)!r}, allowed: a name in {' or '.join(formats)}")
    refuse_replacing(target, source, "OUT", "INPUT itself")
    if target.suffix.lower() == ".parquet":
        require_parquet("OUT")


def refuse_replacing(target: Path, source: Path, argument: str, itself: str) -> None:
    """Raise ValueError if writing a file would replace a folder or the source itself.

    Args:
        target: The file that is written.
        source: The file or folder that is read.
        argument: Name of the command's argument that has the value `target`, for the message.
        itself: Name of `source` in the message.
    """
    if target.is_dir() or target.resolve() == source.resolve():
        what = "a folder" if target.is_dir() else itself
        raise ValueError(f"{argument}: got {str(target)!r}, {what}; allowed: another name")


def require_parquet(argument: str) -> Any:
    """Import ``pyarrow.parquet``.

    Args:
        argument: Name of the argument that needs parquet, for the message.

    Returns:
        The module.

    Raises:
        ImportError: If pyarrow is not installed. The message states how to install it.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"{argument}: parquet needs pyarrow; install it, or fastbert's extra 'train'"
        ) from error
    return parquet


def id_column(ids: Texts | None) -> dict[str, Any]:
    """Return a dict with the pyarrow type of the column ``id`` of a parquet file.

    Args:
        ids: The texts whose ids the file receives; None gives an empty dict.
    """
    import pyarrow as pa

    return {} if ids is None else {"id": pa.int64() if ids.id_type is int else pa.string()}


def write_parquet(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches of pyarrow to a parquet file, each as a row group.

    Args:
        path: Path of the file.
        schema: The pyarrow schema of the record batches.
        batches: The record batches, which all have this schema.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    with require_parquet("OUT").ParquetWriter(path, schema) as file:
        for batch in batches:
            file.write_batch(batch)


def blocks(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield consecutive parts of `rows`, so that a writer has only one part in memory at a time.

    Args:
        rows: The rows, fp32 of shape ``(count, width)``.

    Yields:
        Parts of at most 8192 rows.
    """
    for start in range(0, len(rows), 8192):
        yield rows[start : start + 8192]
