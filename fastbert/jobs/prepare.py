"""Turn text files into a prepared corpus, in several processes; a stopped job can be resumed.

The work is cut into pieces of text, and each piece becomes one shard. The pieces depend only on the
files, so the result has the same bytes for any number of processes. After the shard of a piece, its
record is written, such as ``shards/00000.json``; the piece is finished when its record exists. The
manifest is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert import json_file
from fastbert.checksum import checksum
from fastbert.data.passages import Dropped, passages
from fastbert.data.pieces import Piece, cut, find_text, read_piece
from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.data.prepared.manifest import (
    MANIFEST,
    RUN,
    SHARDS,
    TOKENIZER,
    Manifest,
    read_manifest,
)
from fastbert.data.prepared.shards import ShardRecord, token_dtype
from fastbert.data.tokenizer import WordPieceTokenizer
from fastbert.data.vocabulary import train_tokenizer
from fastbert.folder_lock import locked
from fastbert.jobs.corpus_summary import CHART, SUMMARY, draw, read_summary, summarise
from fastbert.jobs.prepare_piece import PieceRecord, pool_of, prepare_piece
from fastbert.jobs.reporter import SILENT, Reporter

# Intended size of a piece, and therefore of the text of a shard, in bytes.
PIECE_BYTES = 32 << 20
# A vocabulary is trained on about this number of characters. If the files have more bytes than this
# number, the characters are from random parts of the files.
SAMPLE_BYTES = 128 << 20
_SAMPLE_PIECE_BYTES = 1 << 20
_OURS = (MANIFEST, RUN, SUMMARY, CHART, TOKENIZER, SHARDS)


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `prepare`.

    Args:
        text: A .txt, .jsonl or .parquet file, or a folder of such files.
        output: Folder of the prepared corpus.
        tokenizer: Folder of a WordPiece tokenizer; None trains a vocabulary on the text.
        vocab_size: Largest size of a vocabulary that is trained.
        lowercase: Whether a tokenizer that is trained converts texts to lower case.
        workers: Number of processes; None starts one per core.
        seed: Seed that chooses the parts of the input on which a vocabulary is trained, if the
            input is too large to use all of it.
        overwrite: Whether an earlier preparation in `output` is replaced.

    Raises:
        ValueError: If an option is not allowed.
    """

    text: Path
    output: Path
    tokenizer: Path | None = None
    vocab_size: int = 30522
    lowercase: bool = True
    workers: int | None = None
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Check the options that do not depend on files."""
        for name, least in (("vocab_size", 64), ("workers", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, allowed: an integer >= {least}")
        text, output = self.text.resolve(), self.output.resolve()
        if output == text or (text.is_dir() and output.is_relative_to(text)):
            raise ValueError(f"OUT: {self.output} lies in the text, allowed: a folder elsewhere")

    def decisive(self, given: WordPieceTokenizer | None) -> dict[str, Any]:
        """Return the options that determine the content of the corpus, as JSON values.

        Args:
            given: The tokenizer in the folder of the option `tokenizer`, or None.
        """
        if given is not None:
            return {"tokenizer": _digest(given.backend.to_str(pretty=True))}
        return {
            "tokenizer": None,
            "vocab_size": self.vocab_size,
            "lowercase": self.lowercase,
            "seed": self.seed,
        }


def prepare(options: PrepareOptions, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Prepare a corpus, or continue a preparation that was stopped.

    A finished corpus is not prepared again; its checksums are verified.

    Args:
        options: Options of the preparation.
        reporter: Receives notes and the progress in bytes of text.

    Returns:
        The content of ``summary.json``.

    Raises:
        ImportError: If a .parquet file is read without pyarrow, or if matplotlib is not installed.
        OSError: If a file cannot be read or written.
        ValueError: If a text file is damaged, if `output` has a corpus that was prepared with other
            options or from other files, or if a shard is damaged.
    """
    _require_matplotlib()
    files, skipped = find_text(options.text)
    if skipped:
        reporter.note(f"{skipped} files of {options.text} have another suffix and are not read")
    given = None if options.tokenizer is None else WordPieceTokenizer.load(options.tokenizer)
    output = options.output
    _refuse_foreign(output)
    with locked(output, "OUT"):
        if options.overwrite:
            _forget(output)
        _refuse_links(output)
        run = _Run(options, files, given, reporter)
        return run.verified() if (output / MANIFEST).exists() else run.work()


class _Run:
    """One call of `prepare`."""

    def __init__(
        self,
        options: PrepareOptions,
        files: list[Path],
        given: WordPieceTokenizer | None,
        reporter: Reporter,
    ) -> None:
        self.options, self.given, self.reporter = options, given, reporter
        self.output = options.output
        self.files = files
        self.decisive = {**options.decisive(given), "piece_bytes": PIECE_BYTES}
        self.source = _source(options.text, files)

    def verified(self) -> dict[str, Any]:
        """Return the summary of a finished corpus whose options, text files and checksums match."""
        manifest = read_manifest(self.output)
        _refuse_other(self.output, {**manifest.options, **manifest.source}, self._all())
        # A run that was killed after it wrote the manifest may have left its temporary files.
        self._clean()
        self.reporter.note(f"{self.output} is complete already; its checksums are compared")
        corpus = PreparedCorpus(self.output)
        with self.reporter.progress(sum(shard.bytes() for shard in corpus.shards), 0) as advance:
            corpus.verify(advance)
        return read_summary(self.output / SUMMARY)

    def work(self) -> dict[str, Any]:
        """Prepare the pieces that are missing, and finish the corpus."""
        self._begin()
        tokenizer = self._tokenizer()
        pieces = cut(self.files, PIECE_BYTES)
        done = self._done(pieces)
        if done:
            self.reporter.note(f"resuming after {len(done):,} of {len(pieces):,} pieces")
        self._prepare(pieces, done, tokenizer)
        records = [done[number] for number in range(len(pieces))]
        manifest = Manifest(
            options=self.decisive,
            source=self.source,
            vocabulary={
                "size": tokenizer.vocab_size,
                "sha256": checksum(self.output / TOKENIZER / "tokenizer.json"),
            },
            dtype=token_dtype(tokenizer.vocab_size),
            shards=[ShardRecord(**record.shard) for record in records],
        )
        if not manifest.count("tokens"):
            raise self._no_passage()
        summary = summarise(manifest, records)
        json_file.write(self.output / SUMMARY, summary)
        draw(summary, self.output / CHART)
        manifest.write(self.output)
        self._clean()
        return summary

    def _no_passage(self) -> ValueError:
        return ValueError(
            f"text: {self.options.text} has no passage, allowed: files with sentences that end "
            "with a mark such as a full stop"
        )

    def _all(self) -> dict[str, Any]:
        return {**self.decisive, **self.source}

    def _begin(self) -> None:
        """Compare the options with the options of a stopped run, or write them for a new run."""
        path = self.output / RUN
        if path.exists():
            _refuse_other(self.output, json_file.read(path), self.decisive)
        else:
            json_file.write(path, self.decisive)
        (self.output / SHARDS).mkdir(exist_ok=True)
        for partial in (self.output / SHARDS).glob(".*"):
            partial.unlink()

    def _tokenizer(self) -> WordPieceTokenizer:
        """Return the tokenizer in the output folder; if there is none, store a tokenizer first.

        The stored tokenizer is that of the options, or is trained on the text.
        """
        folder = self.output / TOKENIZER
        if folder.exists():
            return WordPieceTokenizer.load(folder)
        tokenizer = self.given
        if tokenizer is None:
            options = self.options
            with self.reporter.reading(options.text):
                sample = [passages(text, Dropped()) for text in self._sample()]
                if not any(sample):
                    raise self._no_passage()
                tokenizer = train_tokenizer(sample, options.vocab_size, lowercase=options.lowercase)
            self.reporter.note(
                f"a vocabulary of {tokenizer.vocab_size:,} pieces was trained on {len(sample):,} "
                "documents"
            )
        partial = self.output / f".{TOKENIZER}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save(partial)
        partial.rename(folder)
        # The tokenizer is loaded from the folder, as in the other processes and in a resumed run.
        return WordPieceTokenizer.load(folder)

    def _sample(self) -> Iterator[str]:
        """Yield documents until they have `SAMPLE_BYTES` characters.

        If the text has more bytes than `SAMPLE_BYTES`, the documents are from random pieces of it.
        """
        pieces = cut(self.files, _SAMPLE_PIECE_BYTES)
        if sum(span.size for piece in pieces for span in piece) > SAMPLE_BYTES:
            random.Random(f"vocabulary/{self.options.seed}").shuffle(pieces)
        size = 0
        for piece in pieces:
            for text in read_piece(piece):
                yield text
                size += len(text)
                if size >= SAMPLE_BYTES:
                    return

    def _done(self, pieces: list[Piece]) -> dict[int, PieceRecord]:
        """Return the records of the finished pieces, except pieces whose files were changed."""
        finished = {}
        for number, piece in enumerate(pieces):
            path = self._record(number)
            if path.exists():
                record = PieceRecord.load(path)
                if record.key == _key(piece):
                    finished[number] = record
        return finished

    def _prepare(
        self, pieces: list[Piece], done: dict[int, PieceRecord], tokenizer: WordPieceTokenizer
    ) -> None:
        sizes = [sum(span.size for span in piece) for piece in pieces]
        missing = [number for number in range(len(pieces)) if number not in done]
        before = sum(sizes[number] for number in done)
        with self.reporter.progress(sum(sizes), before) as advance:
            for number, record in self._records(pieces, missing, tokenizer):
                done[number] = record
                advance(sizes[number])

    def _records(
        self, pieces: list[Piece], missing: list[int], tokenizer: WordPieceTokenizer
    ) -> Iterator[tuple[int, PieceRecord]]:
        """Prepare pieces in this process or in a pool, and yield each record when it is done."""
        home = self.output / SHARDS
        tasks = {number: (pieces[number], home, f"{number:05d}") for number in missing}
        keys = {number: _key(pieces[number]) for number in missing}
        workers = min(self.options.workers or len(os.sched_getaffinity(0)), len(missing))
        if workers <= 1:
            for number, task in tasks.items():
                yield number, prepare_piece(*task, keys[number], tokenizer)
            return
        with pool_of(workers, self.output / TOKENIZER) as run:
            yield from run({number: (*task, keys[number]) for number, task in tasks.items()})

    def _record(self, number: int) -> Path:
        return self.output / SHARDS / f"{number:05d}.json"

    def _clean(self) -> None:
        for path in (self.output / RUN, *(self.output / SHARDS).glob("*.json")):
            path.unlink(missing_ok=True)
        # Shards of an earlier division into pieces remain if files were changed during the run.
        names = {shard.name for shard in read_manifest(self.output).shards}
        for path in (self.output / SHARDS).iterdir():
            if path.stem not in names:
                path.unlink()


def _key(piece: Piece) -> str:
    """Return a digest of the file parts that a piece reads and of the files' modification times."""
    parts = [(os.fspath(s.path), s.start, s.end, s.path.stat().st_mtime_ns) for s in piece]
    return _digest(json.dumps(parts))


def _source(text: Path, files: list[Path]) -> dict[str, Any]:
    """Return the number and the size of the files, and a digest of their names and sizes.

    The names are relative to the folder of the text.
    """
    home = text if text.is_dir() else text.parent
    names = [(path.relative_to(home).as_posix(), path.stat().st_size) for path in files]
    return {
        "files": len(files),
        "bytes": sum(size for _, size in names),
        "names and sizes of the files, by their SHA-256": _digest(json.dumps(names)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_other(output: Path, earlier: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"{name}: got {value!r}, but the corpus in {output} has {earlier.get(name)!r}; "
                "allowed: the same, another folder, or --overwrite, which starts anew"
            )


def _refuse_foreign(output: Path) -> None:
    """Raise ValueError if `output` is a file, or a folder that has files but no preparation."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"OUT: {output} is a file, allowed: a folder, or an unused name")
    if output.is_dir() and not any((output / name).exists() for name in (RUN, MANIFEST)):
        others = sorted(path.name for path in output.iterdir())
        if others:
            raise ValueError(
                f"OUT: {output} has files of something else ({others[0]}), allowed: an empty or "
                "new folder"
            )


def _refuse_links(output: Path) -> None:
    """Raise ValueError for a link instead of a folder in which a run deletes files."""
    for name in (SHARDS, TOKENIZER):
        if (output / name).is_symlink():
            raise ValueError(
                f"OUT: {output / name} is a link, allowed: a folder, because a run deletes files "
                "in it; or --overwrite, which deletes the link and starts anew"
            )


def _forget(output: Path) -> None:
    """Delete an earlier preparation, the manifest first."""
    for name in _OURS:
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"preparing needs {error.name}: pip install 'fastbert[train]'") from error
