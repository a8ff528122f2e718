"""The texts of INPUT, one by one and checked, and parquet files in and out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.jobs.reporter import SILENT, Reporter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = (".txt", ".jsonl", ".parquet")


class Texts:
    """The texts of a .txt (its lines), a .jsonl or a .parquet (a field or column of each line).

    Iterating gives a tuple per line, with as many texts as there are ``fields``, and may be done
    again; memory holds a block of lines at most. ``count`` and ``digest`` are those of the last
    iteration that came to the end, the first one in the constructor.

    Raises FileNotFoundError, or ValueError naming the line that is no string in Unicode.
    """

    def __init__(self, path: Path, fields: tuple[str, ...], reporter: Reporter = SILENT) -> None:
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"INPUT: got {str(path)!r}, allowed: a {', '.join(FORMATS)} file")
        if path.suffix.lower() == ".txt" and fields != ("text",):
            raise ValueError(
                f"--field, --pair-field: got {', '.join(fields)} of a .txt, "
                "allowed: those of a .jsonl or .parquet"
            )
        self.path, self.fields = path, fields
        self.count, self.digest = 0, ""
        with reporter.reading(path):
            for _ in self:
                pass
        if not self.count:
            raise ValueError(f"INPUT: {str(path)!r} has no lines, allowed: at least one")

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        readers = {".txt": self._lines, ".jsonl": self._objects, ".parquet": self._rows}
        digest, count = hashlib.sha256(), 0
        for count, values in enumerate(readers[self.path.suffix.lower()](), 1):
            for field, value in zip(self.fields, values, strict=True):
                digest.update(self._checked(field, value, count))
            yield values
        self.count, self.digest = count, digest.hexdigest()

    def _checked(self, field: str, value: Any, number: int) -> bytes:
        """The text in UTF-8, its length in front, so that no two inputs give the same bytes."""
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
        # Bytes that are no UTF-8 become surrogates, which _checked refuses with the line's number.
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for line in file:
                yield (line.rstrip("\n"),)

    def _objects(self) -> Iterator[tuple[Any, ...]]:
        for (line,) in self._lines():
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
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
    """Raises ValueError for an OUT that could not be written, before any work is done."""
    if target.suffix.lower() not in formats:
        raise ValueError(f"OUT: got {str(target)!r}, allowed: a name in {' or '.join(formats)}")
    if target.is_dir() or target.resolve() == source.resolve():
        what = "a folder" if target.is_dir() else "INPUT itself"
        raise ValueError(f"OUT: got {str(target)!r}, {what}; allowed: another name")
    if target.suffix.lower() == ".parquet":
        require_parquet("OUT")


def require_parquet(argument: str) -> Any:
    """``pyarrow.parquet``. Raises ImportError that says what to install."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"{argument}: parquet needs pyarrow; install it, or fastbert's extra 'train'"
        ) from error
    return parquet


def write_parquet(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Writes pyarrow's record batches, each a row group."""
    with require_parquet("OUT").ParquetWriter(path, schema) as file:
        for batch in batches:
            file.write_batch(batch)


def blocks(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Consecutive parts of ``rows``, for writers that hold one at a time in memory."""
    for start in range(0, len(rows), 8192):
        yield rows[start : start + 8192]
