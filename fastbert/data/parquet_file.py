"""The rows of a parquet file, read in batches, distrusting what is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields a tuple per row with the values of ``columns``, None for a null.

    Raises ImportError without pyarrow, OSError when the file cannot be read, and ValueError naming
    the file when it is damaged, or does not have each column exactly once.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs pyarrow; install it, or fastbert's extra 'train'"
        ) from error
    with _damage_named(path):
        file = ParquetFile(path)
        names = file.schema_arrow.names
    with file:
        for column in columns:
            if (count := names.count(column)) != 1:
                found = f"{count} columns" if count else "no column"
                raise ValueError(f"{path} has {found} {column!r}, allowed: {', '.join(names)}")
        batches = file.iter_batches(batch_size=1024, columns=list(columns))
        while True:
            with _damage_named(path):
                batch = next(batches, None)
                if batch is None:
                    return
                values = [batch[column].to_pylist() for column in columns]
            yield from zip(*values, strict=True)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into a ValueError that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, LookupError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the file system's own
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
