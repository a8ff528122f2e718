"""``manifest.json`` of a prepared corpus, by which its folder is recognised."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert import json_file
from fastbert.atomic_file import write_durably
from fastbert.data.prepared.shards import ShardRecord

MANIFEST, SHARDS, TOKENIZER = "manifest.json", "shards", "tokenizer"
# The options of a preparation that is not finished; a finished corpus has no such file.
RUN = "run.json"
FORMAT = "fastbert prepared corpus"
# The layout of the files; a corpus of another layout is refused.
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        options: The options of the preparation that decide about its result.
        source: Number, size in bytes and SHA-256 of the names and sizes of the text files.
        vocabulary: ``size``, and ``sha256`` of ``tokenizer/tokenizer.json``.
        dtype: dtype of the ids in the shards.
        shards: The entries of the shards.
    """

    options: dict[str, Any]
    source: dict[str, Any]
    vocabulary: dict[str, Any]
    dtype: str
    shards: list[ShardRecord]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content, which has the checksums of all files of the corpus."""
        text = json.dumps(self._plain(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def count(self, name: str) -> int:
        """Return the sum of ``tokens``, ``sentences`` or ``documents`` of all shards."""
        return sum(getattr(shard, name) for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write the file; it appears complete or not at all."""
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
        ValueError: If the file is damaged, or of another format or version. The message names it.
    """
    path = folder / MANIFEST
    content = json_file.read(path)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: got the format {content.get('format')!r}, allowed: {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: got the version {content.get('version')}, allowed: {VERSION}")
    try:
        fields = {field.name: content[field.name] for field in dataclasses.fields(Manifest)}
        fields["shards"] = [ShardRecord(**shard) for shard in fields["shards"]]
        manifest = Manifest(**fields)
        fingerprint = manifest.fingerprint
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole manifest: {error}") from error
    if fingerprint != content.get("fingerprint"):
        raise ValueError(f"{path}: its content has another fingerprint than it says")
    return manifest
