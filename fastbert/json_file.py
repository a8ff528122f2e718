"""JSON files: settings, which are checked when they are read, and results."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastbert.atomic_file import write_atomically
from fastbert.file_size import check_file

# The largest file, in bytes, that `read` accepts. Parsed JSON needs up to 30 bytes of memory for
# each byte of the file. The index of a sharded checkpoint, the largest file of settings, has a few
# MB.
MAX_BYTES = 1 << 23
# The largest number of values in a JSON text. Each parsed value needs up to 120 bytes of memory.
MAX_VALUES = 1 << 22
# The largest number of nested arrays and objects in a JSON text; settings have at most ten levels.
# The functions that walk through parsed settings call themselves once or a few times per level, so
# this number keeps them below Python's recursion limit.
MAX_DEPTH = 100
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read(path: Path, kind: type = dict) -> Any:
    """Return the content of a file that holds a JSON object (``dict``) or an array (``list``).

    Args:
        path: The file.
        kind: The expected Python type of the content, ``dict`` or ``list``.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is larger than ``MAX_BYTES``, is not JSON in UTF-8, has more values
            or levels than `parse` allows, or holds a value of another type. The message names the
            file.
    """
    check_file(path, MAX_BYTES)
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, expected {kind.__name__}")
    return content


def parse(text: str, most_values: int = MAX_VALUES) -> Any:
    """Return the value of a JSON text, after a check of its number of values and levels.

    Args:
        text: The text.
        most_values: Largest number of values; the values are counted approximately.

    Raises:
        ValueError: If the text is not JSON, if it has more than `most_values` values or more than
            ``MAX_DEPTH`` levels of arrays and objects, or if a string has half of a surrogate pair.
    """
    opened = text.count("[") + text.count("{")
    # The count includes commas and brackets inside strings, which are few.
    values = opened + text.count(",")
    if values > most_values:
        raise ValueError(f"it has {values:,} values, allowed: at most {most_values:,}")
    if opened > MAX_DEPTH:
        _check_depth(text)
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if _SURROGATE.search(text):
        _check_text(content)
    return content


def _check_text(content: Any) -> None:
    """Raise ValueError if a string has half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"a string has \\u{ord(half):04x}, half of a surrogate pair, which is no character"
        ) from error


def _check_depth(text: str) -> None:
    """Raise ValueError if arrays and objects are nested in more than ``MAX_DEPTH`` levels."""
    # Escaped quotation marks are removed before the split at quotation marks. The parts at even
    # indices are then outside of strings.
    parts = text.replace(r"\\", "").replace(r"\"", "").split('"')
    nested = re.sub(r"[^][{}]+", "", "".join(parts[::2])).replace("{", "[").replace("}", "]")
    for _ in range(MAX_DEPTH):
        if not nested:
            return
        nested = nested.replace("[]", "")
    # Unmatched brackets are no error here, because the parser refuses them.
    if "[]" in nested:
        raise ValueError(f"it is nested more deeply than allowed: at most {MAX_DEPTH} levels")


def jsonable(value: Any) -> Any:
    """Convert ``value`` to JSON's types: dataclasses become dicts, and tuples become lists.

    NaN and infinity become None. Keys of dicts become strings, and so do objects of other types,
    such as paths.
    """
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


def record(value: Mapping[str, Any]) -> str:
    """Return the record of a measurement as JSON text, with one line for each entry or row.

    If the values of an entry are all arrays or objects, each of these values is a row with a line
    of its own. Any other entry is written on one line.
    """
    lines = []
    for key, entry in jsonable(value).items():
        values = entry.values() if isinstance(entry, dict) else entry
        has_rows = isinstance(entry, (dict, list)) and bool(entry)
        if not has_rows or not all(isinstance(each, (dict, list)) for each in values):
            lines.append(f"{line(key)}: {line(entry)}")
        elif isinstance(entry, dict):
            rows = ",\n  ".join(f"{line(name)}: {line(row)}" for name, row in entry.items())
            lines.append(f"{line(key)}: {{\n  {rows}\n }}")
        else:
            lines.append(f"{line(key)}: [\n  " + ",\n  ".join(map(line, entry)) + "\n ]")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def write(path: Path, value: Any, form: Callable[[Any], str] = text) -> None:
    """Write ``value`` as JSON to ``path``; the file appears complete or not at all.

    Args:
        path: The file.
        value: The value.
        form: The function that returns the text: `text` or `record`.
    """
    content = form(value)
    write_atomically(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))
