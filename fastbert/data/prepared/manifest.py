"""The file ``manifest.json``, which marks a folder as a prepared corpus."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert import json_file
from fastbert.atomic_file import write_durably
from fastbert.data.prepared.shards import ShardRecord, token_dtype

MANIFEST, SHARDS, TOKENIZER = "manifest.json", "shards", "tokenizer"
# ``run.json`` has the options of a preparation that is not finished; a finished corpus has no such
# file.
RUN = "run.json"
FORMAT = "fastbert prepared corpus"
# The version of the layout of the files; a corpus of another version is refused.
VERSION = 1
# The largest size of a vocabulary, because an id has at most 4 bytes.
MOST_PIECES = 1 << 32


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        options: The options of the preparation that determine its result.
        source: Number of the text files, their size in bytes, and the SHA-256 of their names and
            sizes.
        vocabulary: The entries ``size`` and ``sha256``, the SHA-256 of
            ``tokenizer/tokenizer.json``.
        dtype: dtype of the ids in the shards.
        shards: One `ShardRecord` for each shard.
    """

    options: dict[str, Any]
    source: dict[str, Any]
    vocabulary: dict[str, Any]
    dtype: str
    shards: list[ShardRecord]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content, which includes the checksums of all shards and the tokenizer."""
        text = json.dumps(self._plain(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def count(self, name: str) -> int:
        """Return the sum of ``tokens``, ``sentences`` or ``documents`` of all shards."""
        return sum(getattr(shard, name) for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into `folder`; the file appears complete or not at all."""
        content = {**self._plain(), "fingerprint": self.fingerprint}
        text = json_file.text(content)
        write_durably(
            folder / MANIFEST, lambda temporary: temporary.write_text(text, encoding="utf-8")
        )

    def _plain(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` of a folder.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, or of another format or version. The message names the
            file.
    """
    path = folder / MANIFEST
    content = json_file.read(path)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: got the format {content.get('format')!r}, allowed: {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: got the version {content.get('version')}, allowed: {VERSION}")
    try:
        manifest = _of(content)
    except ValueError as error:
        raise ValueError(f"{path}: not a whole manifest: {error}") from error
    if manifest.fingerprint != content.get("fingerprint"):
        raise ValueError(f"{path}: its content has another fingerprint than it says")
    return manifest


def _of(content: dict[str, Any]) -> Manifest:
    """Return the manifest from parsed JSON; raise ValueError for a value that is not allowed."""
    kinds = {"options": dict, "source": dict, "vocabulary": dict, "dtype": str, "shards": list}
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            got = type(content.get(name)).__name__
            raise ValueError(f"{name}: got a {got}, allowed: a {kind.__name__}")
    size, dtype = content["vocabulary"].get("size"), content["dtype"]
    if type(size) is not int or not 1 <= size <= MOST_PIECES:
        raise ValueError(f"vocabulary: size: got {size!r:.100}, allowed: from 1 to {MOST_PIECES}")
    if dtype != token_dtype(size):
        raise ValueError(f"dtype: got {dtype!r:.100}, allowed: {token_dtype(size)!r}")
    shards = [ShardRecord.of(shard) for shard in content["shards"]]
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError("shards: got the same name twice, allowed: different names")
    return Manifest(**{**{name: content[name] for name in kinds}, "shards": shards})
