"""One shard of a prepared corpus: three files of little-endian integers.

``00000.tokens`` has the ids of all tokens. ``00000.sentences`` has the number of the first token of
each sentence, and last the number of tokens. ``00000.documents`` has the number of the first
sentence of each document, and last the number of sentences.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from fastbert.atomic_file import sync
from fastbert.checksum import checksum

PARTS = ("tokens", "sentences", "documents")
OFFSETS = "<u4"
MOST_TOKENS = 2**32 - 1


def token_dtype(vocab_size: int) -> str:
    """Return the dtype of the ids of a vocabulary: 2 bytes if they are enough, and 4 otherwise."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


@dataclass(frozen=True)
class ShardRecord:
    """The entry of one shard in the manifest.

    Attributes:
        name: Stem of the files, such as ``"00000"``.
        tokens: Number of tokens.
        sentences: Number of sentences.
        documents: Number of documents.
        sha256: SHA-256 of each file, by its suffix.
    """

    name: str
    tokens: int
    sentences: int
    documents: int
    sha256: dict[str, str]

    def bytes(self, part: str, dtype: str) -> int:
        """Return the size of a file in bytes; `dtype` is that of the ids."""
        if part == "tokens":
            return self.tokens * np.dtype(dtype).itemsize
        count = self.sentences if part == "sentences" else self.documents
        return (count + 1) * np.dtype(OFFSETS).itemsize


class ShardWriter:
    """Writes one shard; a context manager.

    The files have temporary names until `finish` has flushed them. If the block raises an error,
    they are deleted.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        """Keep the arguments; `dtype` is that of the ids."""
        self._folder, self._name, self._dtype = folder, name, dtype
        self._files: dict[str, IO[bytes]] = {}
        self._sums = {part: hashlib.sha256() for part in PARTS}
        self._tokens = self._sentences = self._documents = 0

    def __enter__(self) -> ShardWriter:
        """Create the files."""
        for part in PARTS:
            # Without a buffer, an error of the disk is raised by the write that it concerns.
            self._files[part] = self._partial(part).open("wb", buffering=0)
        for part in ("sentences", "documents"):
            self._write(part, np.zeros(1, OFFSETS))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files, and delete those that still have a temporary name."""
        for part, file in self._files.items():
            file.close()
            self._partial(part).unlink(missing_ok=True)

    def add(self, documents: Sequence[Sequence[Sequence[int]]]) -> None:
        """Add documents, each a list of sentences, which are lists of at least one id.

        Raises:
            OSError: If a file cannot be written. The error names the file.
            ValueError: If the shard would have more tokens than its offsets can count.
        """
        sentences = [sentence for document in documents for sentence in document]
        sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
        starts = self._tokens + np.cumsum(sizes)
        if len(starts) and starts[-1] > MOST_TOKENS:
            raise ValueError(f"shard {self._name}: got {starts[-1]:,} tokens, allowed: 2**32 - 1")
        counts = np.fromiter(map(len, documents), np.int64, len(documents))
        flat = np.fromiter(
            (token for sentence in sentences for token in sentence), self._dtype, int(sizes.sum())
        )
        self._write("tokens", flat)
        self._write("sentences", starts.astype(OFFSETS))
        self._write("documents", (self._sentences + np.cumsum(counts)).astype(OFFSETS))
        self._tokens += len(flat)
        self._sentences += len(sentences)
        self._documents += len(documents)

    def finish(self) -> ShardRecord:
        """Flush the files, give them their names and return the entry of the shard."""
        for part, file in self._files.items():
            self._named(part, lambda file=file: os.fsync(file.fileno()))
        for part in PARTS:
            os.replace(self._partial(part), self._folder / f"{self._name}.{part}")
        sync(self._folder)
        sums = {part: found.hexdigest() for part, found in self._sums.items()}
        return ShardRecord(self._name, self._tokens, self._sentences, self._documents, sums)

    def _partial(self, part: str) -> Path:
        return self._folder / f".{self._name}.{part}.partial"

    def _write(self, part: str, values: np.ndarray) -> None:
        content = memoryview(values.tobytes())
        self._sums[part].update(content)
        while content:
            content = content[
                self._named(part, lambda rest=content: self._files[part].write(rest)) :
            ]

    def _named(self, part: str, act: Any) -> Any:
        """Return the result of `act`; an OSError, as of a full disk, names the file."""
        try:
            return act()
        except OSError as error:
            path = str(self._folder / f"{self._name}.{part}")
            raise OSError(error.errno, error.strerror, path) from error


class Shard:
    """The files of one shard, mapped into memory.

    Attributes:
        tokens: Ids of the tokens, of shape ``(T,)``.
        sentences: Number of the first token of each sentence, and last T; of shape ``(S + 1,)``.
        documents: Number of the first sentence of each document, and last S; of shape ``(D + 1,)``.
    """

    def __init__(self, folder: Path, record: ShardRecord, dtype: str) -> None:
        """Map the files after a comparison of their sizes and ends with the record.

        Args:
            folder: Folder of the files.
            record: The entry of the shard in the manifest.
            dtype: dtype of the ids.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file is truncated or of another shard. The message names the file.
        """
        self.record = record
        self._paths = {part: folder / f"{record.name}.{part}" for part in PARTS}
        self.tokens, self.sentences, self.documents = (
            _map(path, record.bytes(part, dtype), dtype if part == "tokens" else OFFSETS)
            for part, path in self._paths.items()
        )
        for part, values, end in (
            ("sentences", self.sentences, record.tokens),
            ("documents", self.documents, record.sentences),
        ):
            if values[0] != 0 or values[-1] != end:
                raise ValueError(
                    f"{self._paths[part]}: counts from {values[0]} to {values[-1]}, allowed: from "
                    f"0 to {end}, as in the manifest; the file is damaged or of another corpus"
                )

    def verify(self) -> None:
        """Compare the checksums of the files with the record.

        Raises:
            ValueError: If a file was changed. The message names the file.
        """
        for part, path in self._paths.items():
            if checksum(path) != self.record.sha256[part]:
                raise ValueError(
                    f"{path}: its SHA-256 is not the one in the manifest; the file is damaged or "
                    "of another corpus"
                )


def _map(path: Path, size: int, dtype: str) -> np.ndarray:
    found = path.stat().st_size
    if found != size:
        raise ValueError(
            f"{path}: has {found:,} bytes, allowed: {size:,}, as in the manifest; the file is "
            "truncated or of another corpus"
        )
    # A file without a byte cannot be mapped.
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
