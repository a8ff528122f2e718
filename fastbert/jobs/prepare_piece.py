"""Preparing one piece of text as one shard, in this process or in a pool of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from fastbert import json_file
from fastbert.atomic_file import write_durably
from fastbert.data.passages import passages
from fastbert.data.pieces import Piece, read_piece
from fastbert.data.prepared.shards import ShardRecord, ShardWriter, token_dtype
from fastbert.data.tokenizer import WordPieceTokenizer

# The approximate number of sentences that are encoded in one call.
_AT_ONCE = 4096
# Lengths are counted in classes. The bounds of the classes are the powers of the square root of 2,
# rounded: 1, 2, 3, 4, 6, 8, 11, …
EDGES = sorted({round(2 ** (power / 2)) for power in range(64)})


@dataclass(frozen=True)
class PieceRecord:
    """The result of the preparation of one piece.

    Attributes:
        key: Digest of the file parts that were read and of the files' modification times.
        shard: Fields of a `ShardRecord`.
        read: Number of documents that were read, including documents without a passage.
        dropped: Number of lines that were left out, by reason, and of removed tags and parts of
            markup.
        lengths: Number of ``"sentences"`` and number of ``"documents"`` in each class of lengths in
            tokens; ``EDGES`` has the smallest length of each class.
    """

    key: str
    shard: dict[str, Any]
    read: int
    dropped: dict[str, int]
    lengths: dict[str, list[int]]

    @classmethod
    def load(cls, path: Path) -> PieceRecord:
        """Read the record of a piece.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If the file is damaged. The message names the file.
        """
        content = json_file.read(path)
        try:
            record = cls(**content)
            ShardRecord.of(record.shard)
            counts = [record.read, *record.dropped.values()]
            lengths = [record.lengths[part] for part in ("sentences", "documents")]
            counts += [count for classes in lengths for count in classes]
            if not isinstance(record.key, str) or any(len(c) != len(EDGES) for c in lengths):
                raise ValueError("it has no key, or another number of classes of lengths")
            if not all(type(count) is int and 0 <= count < 1 << 53 for count in counts):
                raise ValueError("it has a count that is not an integer from 0 to 2**53 - 1")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}: not the record of a piece: {error}; without this file, the same command "
                "prepares the piece again"
            ) from error
        return record


class Stopped(Exception):
    """Error of a piece that is abandoned because the run ends after an error or a signal."""


def prepare_piece(
    piece: Piece,
    folder: Path,
    name: str,
    key: str,
    tokenizer: WordPieceTokenizer,
    stopped: Callable[[], bool] = lambda: False,
) -> PieceRecord:
    """Write the shard of a piece, and then its record ``name.json``.

    Args:
        piece: The piece of text.
        folder: Folder of the shards.
        name: Stem of the files of the shard.
        key: The attribute `key` of the record.
        tokenizer: The tokenizer that encodes the sentences.
        stopped: Function that returns whether the run has been stopped.

    Returns:
        The record.

    Raises:
        OSError: If a file cannot be read or written. The error names the file.
        ValueError: If the text file is damaged. The message names the file and the line.
        Stopped: If the run was stopped.
    """
    dropped: Counter[str] = Counter()
    lengths = {part: np.zeros(len(EDGES), np.int64) for part in ("sentences", "documents")}
    read = 0

    def count() -> Iterator[str]:
        nonlocal read
        for text in read_piece(piece):
            read += 1
            yield text

    with ShardWriter(folder, name, token_dtype(tokenizer.vocab_size)) as writer:
        for documents in _batches(passages(text, dropped) for text in count()):
            if stopped():
                raise Stopped
            encoded = _encode(documents, tokenizer)
            writer.add(encoded)
            _count(lengths["sentences"], [len(s) for document in encoded for s in document])
            _count(lengths["documents"], [sum(map(len, document)) for document in encoded])
        shard = writer.finish()
    record = PieceRecord(
        key=key,
        shard=asdict(shard),
        read=read,
        dropped=dict(sorted(dropped.items())),
        lengths={part: counts.tolist() for part, counts in lengths.items()},
    )
    text = json_file.text(record)
    write_durably(folder / f"{name}.json", lambda path: path.write_text(text, encoding="utf-8"))
    return record


def _batches(documents: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    """Yield lists of documents that have about `_AT_ONCE` sentences together."""
    batch: list[list[str]] = []
    count = 0
    for document in documents:
        if document:
            batch.append(document)
            count += len(document)
        if count >= _AT_ONCE:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _encode(documents: list[list[str]], tokenizer: WordPieceTokenizer) -> list[list[list[int]]]:
    """Return the ids of each sentence; a sentence or document without a token is left out."""
    flat = iter(tokenizer.encode_sentences([s for document in documents for s in document]))
    encoded = ([ids for _ in document if (ids := next(flat))] for document in documents)
    return [document for document in encoded if document]


def _count(counts: np.ndarray, sizes: list[int]) -> None:
    classes = np.searchsorted(EDGES, sizes, side="right") - 1
    counts += np.bincount(classes, minlength=len(EDGES))


# A process of the pool stores its tokenizer and its stop event here.
_own: dict[str, Any] = {}


def _begin(tokenizer: Path, stop: Any) -> None:
    """Prepare a process of the pool; the process ends by itself if the main process is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _own.update(tokenizer=WordPieceTokenizer.load(tokenizer), stop=stop)


def _work(piece: Piece, folder: Path, name: str, key: str) -> PieceRecord:
    return prepare_piece(piece, folder, name, key, _own["tokenizer"], _own["stop"].is_set)


Tasks = Mapping[int, tuple[Piece, Path, str, str]]


@contextlib.contextmanager
def pool_of(
    workers: int, tokenizer: Path
) -> Iterator[Callable[[Tasks], Iterator[tuple[int, PieceRecord]]]]:
    """Start processes, and yield a function that prepares pieces in these processes.

    Args:
        workers: Number of processes.
        tokenizer: Folder of the tokenizer.

    Yields:
        A function that takes tasks by number, and yields the number and the record of each task
        when the task is done. The first error ends all processes and is raised.
    """
    methods = multiprocessing.get_all_start_methods()
    # A fork of this process would copy the locks of its threads, and a lock that another thread
    # holds would never be released in the copy.
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__])
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(tokenizer, stop))

    def run(tasks: Tasks) -> Iterator[tuple[int, PieceRecord]]:
        futures = {pool.submit(_work, *task): number for number, task in tasks.items()}
        try:
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        except BrokenProcessPool as error:
            raise OSError(
                "a process of the preparation was killed, perhaps for lack of memory; the same "
                "command continues after the finished pieces, with --workers 1 in less memory"
            ) from error

    try:
        yield run
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
