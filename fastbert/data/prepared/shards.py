"""One shard of a prepared corpus: three files of little-endian integers.

For the shard ``00000``, the file ``00000.tokens`` has the ids of all tokens. ``00000.sentences``
has the index of the first token of each sentence, followed by the number of tokens.
``00000.documents`` has the index of the first sentence of each document, followed by the number of
sentences.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch

from fastbert.atomic_file import sync
from fastbert.checksum import checksum

PARTS = ("tokens", "sentences", "documents")
OFFSETS = "<u4"
MOST_TOKENS = 2**32 - 1
# The number of array elements that are checked at once.
_BLOCK = 1 << 20


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
        """Return the size of the file `part` in bytes; `dtype` is the dtype of the ids."""
        if part == "tokens":
            return self.tokens * np.dtype(dtype).itemsize
        count = self.sentences if part == "sentences" else self.documents
        return (count + 1) * np.dtype(OFFSETS).itemsize

    @classmethod
    def of(cls, content: Any) -> ShardRecord:
        """Convert the parsed JSON of one shard's entry to a `ShardRecord`.

        Raises:
            ValueError: If a value is missing, of another type or out of range. The message names
                the value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(content, dict) or content.keys() != set(names):
            raise ValueError(f"shard: got {content!r:.100}, allowed: {', '.join(names)}")
        name, sums = content["name"], content["sha256"]
        # A name of digits has no separator of paths, so the files are in the folder of the shards.
        if not isinstance(name, str) or not re.fullmatch(r"[0-9]{5,12}", name):
            raise ValueError(f"name: got {name!r:.100}, allowed: at least 5 digits")
        most = MOST_TOKENS
        for part in PARTS:
            value = content[part]
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(
                    f"shard {name}: {part}: got {value!r:.100}, allowed: from 0 to {most}"
                )
            # A sentence has at least one token, and a document has at least one sentence. There are
            # therefore at most as many sentences as tokens, and as many documents as sentences.
            most = value
        if not isinstance(sums, dict) or any(not isinstance(sums.get(p), str) for p in PARTS):
            raise ValueError(f"shard {name}: sha256: got {sums!r:.100}, allowed: one for each file")
        return cls(**content)


class ShardWriter:
    """A context manager that writes one shard.

    The files have temporary names until `finish` has flushed them. If the ``with`` block ends
    without a call of `finish`, the files are deleted.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        """Store the arguments; `dtype` is the dtype of the ids."""
        self._folder, self._name, self._dtype = folder, name, dtype
        self._files: dict[str, IO[bytes]] = {}
        self._sums = {part: hashlib.sha256() for part in PARTS}
        self._tokens = self._sentences = self._documents = 0

    def __enter__(self) -> ShardWriter:
        """Create the files."""
        for part in PARTS:
            # Without a buffer, a disk error is raised by the write that causes it.
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
        """Add documents; a document is a list of sentences, each a list of at least one id.

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
        """Flush the files, give them their final names, and return the shard's manifest entry."""
        for part, file in self._files.items():
            self._named(part, lambda file=file: os.fsync(file.fileno()))
        for part in PARTS:
            os.replace(self._partial(part), self._folder / f"{self._name}.{part}")
        sync(self._folder)
        sums = {part: digest.hexdigest() for part, digest in self._sums.items()}
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
        """Call `act` and return its result; an OSError, such as for a full disk, names the file."""
        try:
            return act()
        except OSError as error:
            path = str(self._folder / f"{self._name}.{part}")
            raise OSError(error.errno, error.strerror, path) from error


class Shard:
    """The files of one shard, mapped into memory.

    The files are verified when `tokens`, `sentences` or `documents` is used for the first time.
    """

    def __init__(
        self, folder: Path, record: ShardRecord, dtype: str, vocab_size: int | None = None
    ) -> None:
        """Map the files, and compare their sizes and first and last offsets with the manifest.

        Args:
            folder: Folder of the files.
            record: The entry of the shard in the manifest.
            dtype: dtype of the ids.
            vocab_size: Size of the vocabulary; every id must be below it. None allows all ids.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file is truncated or of another shard. The message names the file.
        """
        self.record = record
        self._paths = {part: folder / f"{record.name}.{part}" for part in PARTS}
        self._vocab_size = vocab_size
        # Whether the files have been verified against the manifest.
        self.verified = False
        self._maps = {
            part: _map(path, record.bytes(part, dtype), dtype if part == "tokens" else OFFSETS)
            for part, path in self._paths.items()
        }
        for part, end in (("sentences", record.tokens), ("documents", record.sentences)):
            values = self._maps[part]
            if values[0] != 0 or values[-1] != end:
                raise ValueError(
                    f"{self._paths[part]}: counts from {values[0]} to {values[-1]}, allowed: from "
                    f"0 to {end}, as in the manifest; the file is damaged or of another corpus"
                )

    @property
    def tokens(self) -> np.ndarray:
        """Ids of the tokens, of shape ``(T,)``."""
        return self._map("tokens")

    @property
    def sentences(self) -> np.ndarray:
        """Index of the first token of each sentence, then the token count; shape ``(S + 1,)``."""
        return self._map("sentences")

    @property
    def documents(self) -> np.ndarray:
        """Index of each document's first sentence, then the sentence count; shape ``(D + 1,)``."""
        return self._map("documents")

    def bytes(self) -> int:
        """Return the size of the files in bytes."""
        return sum(values.nbytes for values in self._maps.values())

    def verify(self, advance: Callable[[int], object] = lambda size: None) -> None:
        """Compare the files' checksums with the manifest, and check the numbers in the files.

        Args:
            advance: Called after each block of a file with the number of bytes of the block.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file was changed, if offsets decrease, or if an id is outside of the
                vocabulary. The message names the file.
        """
        for part, path in self._paths.items():
            if checksum(path, advance) != self.record.sha256[part]:
                raise ValueError(
                    f"{path}: its SHA-256 is not the one in the manifest; the file is damaged or "
                    "of another corpus"
                )
        for part in ("sentences", "documents"):
            self._check_order(part)
        if self._vocab_size is not None:
            self._check_ids(self._vocab_size)
        self.verified = True

    def _map(self, part: str) -> np.ndarray:
        if not self.verified:
            self.verify()
        return self._maps[part]

    def _check_order(self, part: str) -> None:
        values = self._maps[part]
        for start in range(0, len(values) - 1, _BLOCK):
            block = values[start : start + _BLOCK + 1]
            if (block[1:] < block[:-1]).any():
                raise ValueError(
                    f"{self._paths[part]}: a number is smaller than the one before it, allowed: "
                    "offsets that do not decrease"
                )

    def _check_ids(self, vocab_size: int) -> None:
        values = self._maps["tokens"]
        for start in range(0, len(values), _BLOCK):
            largest = int(values[start : start + _BLOCK].max())
            if largest >= vocab_size:
                raise ValueError(
                    f"{self._paths['tokens']}: got the id {largest}, allowed: ids below "
                    f"{vocab_size}, the size of the vocabulary"
                )


def _map(path: Path, size: int, dtype: str) -> np.ndarray:
    size_on_disk = path.stat().st_size
    if size_on_disk != size:
        raise ValueError(
            f"{path}: has {size_on_disk:,} bytes, allowed: {size:,}, as in the manifest; the file "
            "is truncated or of another corpus"
        )
    # An empty file cannot be mapped.
    if not size:
        return np.empty(0, dtype)
    try:
        # np.memmap would hold a file descriptor for each file, and the limit of a process is often
        # 1,024 descriptors.
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{path}: it cannot be mapped into memory: {error}") from error
    values = mapped.numpy().view(dtype)
    values.flags.writeable = False
    return values
