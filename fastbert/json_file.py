"""JSON files: settings, which are checked when they are read, and results."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fastbert.atomic_file import write_atomically

# The largest file of settings is the index of a sharded checkpoint, which has a few MB.
MAX_BYTES = 1 << 26


def read(path: Path, kind: type = dict) -> Any:
    """Return the content of a file that holds a JSON object (``dict``) or an array (``list``).

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is larger than ``MAX_BYTES``, is not JSON in UTF-8, or holds another
            kind of value. The message names the file.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: it has {size:,} bytes, allowed: at most {MAX_BYTES:,}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, expected {kind.__name__}")
    return content


def jsonable(value: Any) -> Any:
    """Return ``value`` with dataclasses as dicts, paths as strings, non-finite numbers as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def text(value: Any) -> str:
    """Return ``value`` as indented JSON text with a final newline."""
    return json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n"


def line(value: Any) -> str:
    """Return ``value`` as JSON text in one line, without a newline."""
    return json.dumps(jsonable(value), ensure_ascii=False)


def write(path: Path, value: Any) -> None:
    """Write ``value`` as JSON to ``path``; the file appears complete or not at all."""
    content = text(value)
    write_atomically(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))
