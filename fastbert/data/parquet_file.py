"""Reading the rows of a parquet file in batches; a damaged file raises ValueError."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Return the number of rows and the uncompressed size in bytes of each row group.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the file cannot be read.
        ValueError: If the file is damaged. The message names the file.
    """
    parquet_file = _parquet_file(path)
    with _damage_named(path), parquet_file(path) as file:
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


def column_names(path: Path) -> list[str]:
    """Return the column names of a file; raise the same errors as `row_groups`."""
    parquet_file = _parquet_file(path)
    with _damage_named(path), parquet_file(path) as file:
        return list(file.schema_arrow.names)


def read_rows(
    path: Path, columns: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield one tuple per row with the values of `columns`; a null becomes None.

    Args:
        path: The file.
        columns: Names of the columns.
        groups: Numbers of the row groups to read; None reads all.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or does not have each column exactly once. The message
            names the file.
    """
    parquet_file = _parquet_file(path)
    with _damage_named(path):
        file = parquet_file(path)
        names = file.schema_arrow.names
    with file:
        for column in columns:
            if (count := names.count(column)) != 1:
                present = f"{count} columns" if count else "no column"
                raise ValueError(f"{path} has {present} {column!r}, allowed: {', '.join(names)}")
        # A row can hold a whole book, so a batch has few rows.
        batches = file.iter_batches(batch_size=256, columns=list(columns), row_groups=groups)
        while True:
            with _damage_named(path):
                batch = next(batches, None)
                if batch is None:
                    return
                values = [batch[column].to_pylist() for column in columns]
            yield from zip(*values, strict=True)


def _parquet_file(path: Path) -> Any:
    """Return the class of pyarrow that opens a parquet file."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs pyarrow; install it, or fastbert's extra 'train'"
        ) from error
    return ParquetFile


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow for a damaged file into a ValueError that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, LookupError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # This error is from the file system.
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
