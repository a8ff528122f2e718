"""Preparation of a run: documents, the held-out split, the tokenizer and the batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastbert.data import (
    NextSentencePairs,
    PretrainingBatches,
    WordPieceTokenizer,
    read_documents,
    train_tokenizer,
)
from fastbert.training.evaluate import Batch
from fastbert.training.options import PretrainOptions

Documents = list[list[str]]
# A random second half is from another document, so one document alone gives no pairs.
FEWEST_DOCUMENTS = 2


@dataclass(frozen=True)
class Prepared:
    """The tokenizer and the batches of a run.

    Attributes:
        tokenizer: The tokenizer.
        train: Batches of the training.
        held_out: Batches of every evaluation; empty if no documents are held out.
        train_documents: Number of documents of the training.
        held_out_documents: Number of documents that are held out.
        fingerprint: SHA-256 of the text of all documents.
    """

    tokenizer: WordPieceTokenizer
    train: PretrainingBatches
    held_out: list[Batch]
    train_documents: int
    held_out_documents: int
    fingerprint: str


def gather_documents(options: PretrainOptions, documents: Iterable[list[str]] | None) -> Documents:
    """Read the corpus of `options`, or return `documents` as a list.

    Raises:
        ValueError: If there are no documents, or if both sources or neither source is given.
    """
    if documents is None:
        if options.corpus is None:
            raise ValueError("corpus: got None, allowed: a file or folder, or the documents given")
        documents = read_documents(options.corpus)
    elif options.corpus is not None:
        raise ValueError(f"corpus: got {options.corpus!r} and documents, allowed: one of the two")
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
        seed: Seed of the choice.

    Returns:
        The training documents and the held-out documents.

    Raises:
        ValueError: If a part has too few documents for next-sentence pairs.
    """
    held = round(len(documents) * fraction)
    if fraction > 0:
        held = max(held, FEWEST_DOCUMENTS)
    if len(documents) - held < FEWEST_DOCUMENTS:
        raise ValueError(
            f"held_out: got {fraction} of {len(documents)} documents, which leaves "
            f"{max(0, len(documents) - held)} for training; allowed: at least {FEWEST_DOCUMENTS} "
            "documents on each side (a random next sentence comes from another document), or 0"
        )
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    chosen = set(order[:held])
    return (
        [document for i, document in enumerate(documents) if i not in chosen],
        [document for i, document in enumerate(documents) if i in chosen],
    )


def _batches(
    documents: Documents, tokenizer: WordPieceTokenizer, options: PretrainOptions, seed: int
) -> PretrainingBatches:
    pairs = NextSentencePairs(documents, tokenizer, max_length=options.max_length, seed=seed)
    return PretrainingBatches(
        pairs,
        tokenizer,
        tokens_per_batch=options.tokens_per_batch,
        seed=seed,
        whole_word=options.whole_word,
        packed=options.packed,
    )


def fingerprint(documents: Documents) -> str:
    """Return the SHA-256 of the text of all documents."""
    found = hashlib.sha256()
    for document in documents:
        found.update(f"{len(document)}\n".encode())
        for sentence in document:
            text = sentence.encode("utf-8", "surrogatepass")
            found.update(f"{len(text)}\n".encode() + text)
    return found.hexdigest()


def prepare(
    options: PretrainOptions,
    documents: Documents,
    say: Callable[[str], None],
    tokenizer: WordPieceTokenizer | None = None,
) -> Prepared:
    """Split the documents, train or load the tokenizer, and build the batches.

    Args:
        options: Options of the run.
        documents: All documents.
        say: Shows a line of text to the user.
        tokenizer: The tokenizer of a run that is resumed.

    Returns:
        The tokenizer and the batches. No file is written.

    Raises:
        ValueError: If the documents or the tokenizer are not usable.
    """
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
        batches = _batches(held_out, tokenizer, options, options.seed)
        evaluation = batches.epoch(0)[: options.eval_batches]
    return Prepared(
        tokenizer=tokenizer,
        train=_batches(train, tokenizer, options, options.seed),
        held_out=evaluation,
        train_documents=len(train),
        held_out_documents=len(held_out),
        fingerprint=fingerprint(documents),
    )
