"""Reading a settings file in JSON, distrusting what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Settings are far smaller; the largest of them, the index of a sharded checkpoint, has a few MB.
MAX_BYTES = 1 << 26


def read(path: Path, kind: type = dict) -> Any:
    """The content of a file that holds a JSON object (``dict``) or an array (``list``).

    Raises OSError when the file cannot be read, and ValueError naming the file when it is larger
    than ``MAX_BYTES``, no JSON in UTF-8, or another kind of value.
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
