"""Read and check the texts of INPUT, and read and write parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import json_file
from fastbert.jobs.reporter import SILENT, Reporter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = (".txt", ".jsonl", ".parquet")


class Texts:
    r"""The texts of a .txt, .jsonl or .parquet file.

    An iteration yields a tuple for each line, with a text for each field. It may be repeated, and
    at most a block of lines is in memory. The attributes ``count`` and ``digest`` are the number of
    lines and the SHA-256 digest of the texts in the last complete iteration. The first iteration
    takes place in the constructor.

    Args:
        path: Path of the file.
        fields: Names of the fields of a .jsonl file or of the columns of a .parquet file. A .txt
            file has the only field "text", which is its line.
        reporter: Its ``reading`` is entered while the file is read for the first time.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has another suffix or no lines, or if a field is not a text in
            Unicode. The message names the line.
        ImportError: If the file is a .parquet file and pyarrow is not installed.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastbert.jobs.texts import Texts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "lines.jsonl")
        ...     _ = path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
        ...     list(Texts(path, ("text",)))
        [('one',), ('two',)]
    """

    def __init__(self, path: Path, fields: tuple[str, ...], reporter: Reporter = SILENT) -> None:
        """Check the arguments and read the file once."""
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"INPUT: got {str(path)!r}, allowed: a {', '.join(FORMATS)} file")
        if path.suffix.lower() == ".txt" and fields != ("text",):
            raise ValueError(
                f"--field, --pair-field: got {', '.join(fields)} of a .txt, "
                "allowed: fields of a .jsonl or columns of a .parquet"
            )
        self.path, self.fields = path, fields
        self.count, self.digest = 0, ""
        with reporter.reading(path):
            for _ in self:
                pass
        if not self.count:
            raise ValueError(f"INPUT: {str(path)!r} has no lines, allowed: at least one")

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each line; at the end, set ``count`` and ``digest``."""
        readers = {".txt": self._lines, ".jsonl": self._objects, ".parquet": self._rows}
        digest, count = hashlib.sha256(), 0
        for count, values in enumerate(readers[self.path.suffix.lower()](), 1):
            for field, value in zip(self.fields, values, strict=True):
                digest.update(self._checked(field, value, count))
            yield values
        self.count, self.digest = count, digest.hexdigest()

    def _checked(self, field: str, value: Any, number: int) -> bytes:
        """Return a text in UTF-8 after its length, so that no two inputs give the same bytes."""
        place = f"INPUT: {self.path}, line {number}"
        if not isinstance(value, str):
            wanted = "an object with a string field" if self._is_jsonl else "a string in the column"
            raise ValueError(f"{place}: expected {wanted} {field}")
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: expected text in UTF-8") from error
        return b"%d:%b" % (len(text), text)

    @property
    def _is_jsonl(self) -> bool:
        return self.path.suffix.lower() == ".jsonl"

    def _lines(self) -> Iterator[tuple[str]]:
        # Bytes that are not UTF-8 become surrogates, which `_checked` refuses with the number of
        # the line.
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for line in file:
                yield (line.rstrip("\n"),)

    def _objects(self) -> Iterator[tuple[Any, ...]]:
        for (line,) in self._lines():
            try:
                content = json_file.parse(line)
            except ValueError:
                content = None
            if not isinstance(content, dict):
                content = {}
            yield tuple(content.get(field) for field in self.fields)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        require_parquet("INPUT")
        from fastbert.data.parquet_file import read_rows

        try:
            yield from read_rows(self.path, self.fields)
        except ValueError as error:
            raise ValueError(f"INPUT: {error}") from error


def check_output(target: Path, source: Path, formats: tuple[str, ...]) -> None:
    """Check before any work that OUT can be written.

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
    if target.is_dir() or target.resolve() == source.resolve():
        what = "a folder" if target.is_dir() else "INPUT itself"
        raise ValueError(f"OUT: got {str(target)!r}, {what}; allowed: another name")
    if target.suffix.lower() == ".parquet":
        require_parquet("OUT")


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


def write_parquet(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches of pyarrow to a parquet file, each as a row group.

    Args:
        path: Path of the file.
        schema: The schema of pyarrow.
        batches: The record batches.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    with require_parquet("OUT").ParquetWriter(path, schema) as file:
        for batch in batches:
            file.write_batch(batch)


def blocks(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield consecutive parts of some rows, for writers that keep one part at a time in memory.

    Args:
        rows: fp32 of shape ``(count, width)``.

    Yields:
        Parts of at most 8192 rows.
    """
    for start in range(0, len(rows), 8192):
        yield rows[start : start + 8192]
