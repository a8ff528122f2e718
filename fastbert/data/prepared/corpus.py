"""Reading a prepared corpus from memory-mapped files, of which only the used parts are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from fastbert.checksum import checksum
from fastbert.data.prepared.manifest import MANIFEST, RUN, SHARDS, TOKENIZER, read_manifest
from fastbert.data.prepared.shards import Shard
from fastbert.data.tokenizer import MOST_TOKENIZER_BYTES, WordPieceTokenizer
from fastbert.file_size import check_file


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that ``fastbert prepare`` wrote.

    Args:
        path: Any path.

    Returns:
        Whether `path` has a ``manifest.json``. The content of this file is not read.

    Raises:
        ValueError: If the folder has a preparation that is not finished.
    """
    finished = (Path(path) / MANIFEST).is_file()
    if not finished and (Path(path) / RUN).is_file() and (Path(path) / SHARDS).is_dir():
        raise ValueError(
            f"corpus: {path} is not finished, allowed: a corpus after the same `fastbert prepare` "
            "command has ended"
        )
    return finished


# Largest number of threads that verify shards; more threads read no faster from most disks.
THREADS = 8


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class PreparedCorpus:
    """The documents of a folder that ``fastbert prepare`` wrote, as ids in mapped files.

    The checksums of a shard are compared with the manifest when the shard is used for the first
    time, or earlier by `verify`.

    Attributes:
        folder: The folder.
        manifest: Content of ``manifest.json``.
        tokenizer: The tokenizer that encoded the documents.
        shards: The shards, in the order of the documents.
        fingerprint: SHA-256 of the manifest, which has the checksums of all files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the manifest and the tokenizer, and map the shards.

        Args:
            folder: A folder that ``fastbert prepare`` wrote.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file is damaged, truncated or of another corpus. The message names the
                file.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.fingerprint = self.manifest.fingerprint
        self._check_vocabulary()
        self.tokenizer = WordPieceTokenizer.load(self.folder / TOKENIZER)
        home = self.folder / SHARDS
        size = self.tokenizer.vocab_size
        if size != self.manifest.vocabulary["size"]:
            raise ValueError(
                f"{self.folder / MANIFEST}: vocabulary: size: got "
                f"{self.manifest.vocabulary['size']}, allowed: {size}, that of the tokenizer"
            )
        dtype = self.manifest.dtype
        self.shards = [Shard(home, record, dtype, size) for record in self.manifest.shards]
        self._starts = np.cumsum([0, *(record.documents for record in self.manifest.shards)])

    def __len__(self) -> int:
        """Return the number of documents."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> list[np.ndarray]:
        """Return the sentences of a document, each as an array of token ids."""
        index = range(len(self))[index]
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard, own = self.shards[number], index - int(self._starts[number])
        first, last = shard.documents[own : own + 2].tolist()
        bounds = shard.sentences[first : last + 1].tolist()
        return [shard.tokens[a:b] for a, b in pairwise(bounds)]

    def verify(
        self,
        advance: Callable[[int], object] = lambda size: None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Read all shards, several at a time, and compare their checksums with the manifest.

        Processes can share the work. Each process verifies its own share and then treats all shards
        as verified, so the processes must wait for each other before they use the shards.

        Args:
            advance: Called in several threads, after each block of a file, with the number of bytes
                of the block.
            share: Index of this process, from 0, and number of processes.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file was changed, or has an id or an offset that is out of range. The
                message names the file.
        """
        index, count = share
        # The checksums and the comparisons of arrays release the lock of the interpreter (GIL).
        with ThreadPoolExecutor(max(1, min(THREADS, _cores() // count))) as pool:
            own = [pool.submit(shard.verify, advance) for shard in self.shards[index::count]]
            try:
                for future in own:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for shard in self.shards:
            shard.verified = True

    def _check_vocabulary(self) -> None:
        path = self.folder / TOKENIZER / "tokenizer.json"
        check_file(path, MOST_TOKENIZER_BYTES)
        if checksum(path) != self.manifest.vocabulary.get("sha256"):
            raise ValueError(
                f"{path}: its SHA-256 is not the one in the manifest; the vocabulary was changed "
                "or is of another corpus"
            )
