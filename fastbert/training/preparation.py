"""Preparation of a run: documents, the held-out split, the tokenizer and the batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastbert.data import (
    NextSentencePairs,
    PretrainingBatches,
    WordPieceTokenizer,
    read_documents,
    train_tokenizer,
)
from fastbert.data.prepared.batches import PreparedBatches
from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.examples import PreparedExamples
from fastbert.training.evaluate import Batch
from fastbert.training.options import PretrainOptions

Documents = list[list[str]]
# The second text of a random pair is from another document, so one document alone gives no pairs.
FEWEST_DOCUMENTS = 2


class Batches(Protocol):
    """The batches of every epoch, such as `PretrainingBatches`."""

    def epoch(self, index: int) -> Sequence[Batch]:
        """Return the batches of one epoch."""
        ...


@dataclass(frozen=True)
class Prepared:
    """The tokenizer and the batches of a run.

    Attributes:
        tokenizer: The tokenizer.
        train: Batches of the training.
        short: Batches of shorter examples for the first steps; None without such steps.
        held_out: Batches of every evaluation; empty if no documents are held out.
        train_documents: Number of documents of the training.
        held_out_documents: Number of documents that are held out.
    """

    tokenizer: WordPieceTokenizer
    train: Batches
    short: Batches | None
    held_out: list[Batch]
    train_documents: int
    held_out_documents: int


def gather_documents(
    options: PretrainOptions, documents: Iterable[list[str]] | None
) -> Documents | PreparedCorpus:
    """Read or open the corpus of `options`, or return `documents` as a list.

    Raises:
        ValueError: If there are no documents, if both or neither of ``options.corpus`` and
            `documents` are None, if the objective needs a prepared corpus, or if
            ``options.tokenizer`` is set for a prepared corpus, which has its own tokenizer.
    """
    if documents is None:
        if options.corpus is None:
            raise ValueError("corpus: got None, allowed: a file or folder, or the documents given")
        if is_prepared(options.corpus):
            _check_tokenizer(options)
            return PreparedCorpus(options.corpus)
        documents = read_documents(options.corpus)
    elif options.corpus is not None:
        raise ValueError(f"corpus: got {options.corpus!r} and documents, allowed: one of the two")
    if options.objective != "nsp":
        raise ValueError(
            f"objective: got {options.objective!r} with text, allowed: nsp, or a corpus that "
            "`fastbert prepare` wrote"
        )
    gathered = list(documents)
    if not gathered:
        raise ValueError("documents: got none, allowed: at least 2 documents")
    return gathered


def split_documents(
    documents: Documents, *, fraction: float, seed: int
) -> tuple[Documents, Documents]:
    """Split the documents into a training part and a held-out part.

    The parts consist of whole documents, so no held-out document is used in training.

    Args:
        documents: The documents.
        fraction: Fraction of the documents to hold out. A fraction above 0 holds out at least two
            documents.
        seed: Seed of the random choice of held-out documents.

    Returns:
        The training documents and the held-out documents.

    Raises:
        ValueError: If fewer than two documents are left for training, because next-sentence pairs
            need two documents.
    """
    held = _held_out(len(documents), fraction)
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    chosen = set(order[:held])
    return (
        [document for i, document in enumerate(documents) if i not in chosen],
        [document for i, document in enumerate(documents) if i in chosen],
    )


def _held_out(count: int, fraction: float) -> int:
    """Return how many of `count` documents are held out."""
    held = round(count * fraction)
    if fraction > 0:
        held = max(held, FEWEST_DOCUMENTS)
    if count - held < FEWEST_DOCUMENTS:
        raise ValueError(
            f"held_out: got {fraction} of {count} documents, which leaves "
            f"{max(0, count - held)} for training; allowed: at least {FEWEST_DOCUMENTS} "
            "documents on each side (a random next sentence comes from another document), or 0"
        )
    return held


def _check_tokenizer(options: PretrainOptions) -> None:
    if options.tokenizer is not None:
        raise ValueError(
            f"tokenizer: got {options.tokenizer!r} with a prepared corpus, allowed: None, because "
            "the corpus has its tokenizer"
        )


def _batches(
    documents: Documents, tokenizer: WordPieceTokenizer, options: PretrainOptions, max_length: int
) -> PretrainingBatches:
    pairs = NextSentencePairs(documents, tokenizer, max_length=max_length, seed=options.seed)
    return PretrainingBatches(
        pairs,
        tokenizer,
        tokens_per_batch=options.tokens_per_batch,
        seed=options.seed,
        whole_word=options.whole_word,
        packed=options.packed,
    )


def _batches_of_folder(
    corpus: PreparedCorpus,
    documents: np.ndarray | None,
    options: PretrainOptions,
    max_length: int,
    batches_per_step: int,
) -> PreparedBatches:
    examples = PreparedExamples(
        corpus,
        max_length=max_length,
        seed=options.seed,
        objective=options.objective,
        documents=documents,
    )
    return PreparedBatches(
        examples,
        tokens_per_batch=options.tokens_per_batch,
        batches_per_step=batches_per_step,
        whole_word=options.whole_word,
        packed=options.packed,
    )


def fingerprint(documents: Documents | PreparedCorpus) -> str:
    """Return the SHA-256 of the text of all documents, or of the manifest of a prepared corpus."""
    if isinstance(documents, PreparedCorpus):
        return documents.fingerprint
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document)}\n".encode())
        for sentence in document:
            text = sentence.encode("utf-8", "surrogatepass")
            digest.update(f"{len(text)}\n".encode() + text)
    return digest.hexdigest()


def prepare(
    options: PretrainOptions,
    documents: Documents | PreparedCorpus,
    say: Callable[[str], None],
    tokenizer: WordPieceTokenizer | None = None,
    batches_per_step: int = 1,
) -> Prepared:
    """Split the documents, train or load the tokenizer, and build the batches.

    Args:
        options: Options of the run.
        documents: All documents, or a prepared corpus, which contains its tokenizer.
        say: Shows a line of text to the user.
        tokenizer: The tokenizer of a run that is resumed; None for a new run.
        batches_per_step: Number of batches that all processes take in one step; used only for a
            prepared corpus.

    Returns:
        The tokenizer and the batches. No file is written.

    Raises:
        ValueError: If the training part or the held-out part has too few documents, or if the
            tokenizer cannot be loaded or trained.
    """
    if isinstance(documents, PreparedCorpus):
        return _prepare_folder(options, documents, say, batches_per_step)
    train, held_out = split_documents(documents, fraction=options.held_out, seed=options.seed)
    say(f"{len(train):,} documents to train on, {len(held_out):,} held out")
    if tokenizer is not None:
        say(f"tokenizer of the run: {tokenizer.vocab_size:,} pieces")
    elif options.tokenizer is not None:
        tokenizer = WordPieceTokenizer.load(options.tokenizer)
        say(f"tokenizer of {options.tokenizer}: {tokenizer.vocab_size:,} pieces")
    else:
        tokenizer = train_tokenizer(train, options.vocab_size, lowercase=options.lowercase)
        say(f"tokenizer trained: {tokenizer.vocab_size:,} pieces")
    evaluation: list[Batch] = []
    if held_out:
        batches = _batches(held_out, tokenizer, options, options.max_length)
        evaluation = batches.epoch(0)[: options.eval_batches]
    short = None
    if options.short_steps:
        short = _batches(train, tokenizer, options, options.short_length)
    return Prepared(
        tokenizer=tokenizer,
        train=_batches(train, tokenizer, options, options.max_length),
        short=short,
        held_out=evaluation,
        train_documents=len(train),
        held_out_documents=len(held_out),
    )


def _prepare_folder(
    options: PretrainOptions,
    corpus: PreparedCorpus,
    say: Callable[[str], None],
    batches_per_step: int,
) -> Prepared:
    """Split the documents of a prepared corpus, and build the batches."""
    held = _held_out(len(corpus), options.held_out)
    say(f"{len(corpus) - held:,} documents to train on, {held:,} held out")
    say(f"tokenizer of {corpus.folder}: {corpus.tokenizer.vocab_size:,} pieces")
    train, evaluation = None, []
    if held:
        rng = np.random.default_rng((options.seed, held))
        chosen = np.sort(rng.choice(len(corpus), held, replace=False, shuffle=False))
        train = np.delete(np.arange(len(corpus)), chosen)
        batches = _batches_of_folder(corpus, chosen, options, options.max_length, 1)
        evaluation = batches.epoch(0)[: options.eval_batches]

    def batches_of(max_length: int) -> PreparedBatches:
        return _batches_of_folder(corpus, train, options, max_length, batches_per_step)

    return Prepared(
        tokenizer=corpus.tokenizer,
        train=batches_of(options.max_length),
        short=batches_of(options.short_length) if options.short_steps else None,
        held_out=evaluation,
        train_documents=len(corpus) - held,
        held_out_documents=held,
    )
