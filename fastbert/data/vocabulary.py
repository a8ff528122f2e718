"""Training a WordPiece vocabulary on documents, the same one every time."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers.trainers import WordPieceTrainer

from fastbert.data.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer, build_tokenizer

MAX_CHARACTERS = 1000


def _stands_alone(character: str) -> bool:
    """Whether BERT's word splitting makes a word of this character alone: punctuation, Chinese."""
    is_ascii_symbol = character.isascii() and not character.isalnum()
    return (
        is_ascii_symbol
        or unicodedata.category(character).startswith("P")
        or "\u4e00" <= character <= "\u9fff"
    )


def _alphabet(text_counts: Counter[str], limit: int) -> list[str]:
    """The ``limit`` most frequent characters (ties by code point), sorted."""
    ranked = sorted(text_counts, key=lambda character: (-text_counts[character], character))
    return sorted(ranked[:limit])


def train_tokenizer(
    documents: Iterable[Sequence[str]], vocab_size: int, *, lowercase: bool = True
) -> WordPieceTokenizer:
    """Learns a WordPiece vocabulary of at most ``vocab_size`` tokens, special tokens first.

    ``documents`` are lists of sentences, held in memory while training. Same documents, same
    vocabulary and ids. A small corpus can give fewer tokens than asked: use the result's
    ``vocab_size``. Raises ValueError when ``vocab_size`` is below 64 or there is no text.
    """
    if vocab_size < 64:
        raise ValueError(f"vocab_size: got {vocab_size}, allowed: at least 64")
    sentences = [sentence for document in documents for sentence in document]
    special = list(SPECIAL_TOKENS.values())
    tokenizer = build_tokenizer(
        {token: i for i, token in enumerate(special)}, SPECIAL_TOKENS, lowercase=lowercase
    )
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(tokenizer.normalizer.normalize_str(sentence))
    counts = Counter({c: n for c, n in counts.items() if not c.isspace()})
    if not counts:
        raise ValueError("documents: no text in them, allowed: at least one non-empty sentence")
    limit = min(MAX_CHARACTERS, (vocab_size - len(special)) // 2)
    alphabet = _alphabet(counts, limit)
    # The trainer numbers continuation pieces in the order of a hash map, and breaks ties between
    # merges by number: given as fixed first entries, they make the whole vocabulary reproducible.
    pieces = alphabet + ["##" + c for c in alphabet if not _stands_alone(c)]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=special + pieces,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    scratch = build_tokenizer(
        {token: i for i, token in enumerate(special)}, SPECIAL_TOKENS, lowercase=lowercase
    )
    scratch.train_from_iterator(sentences, trainer)
    # Built anew, because the trainer has marked the single characters as special tokens.
    vocab = dict(sorted(scratch.get_vocab().items(), key=lambda item: item[1]))
    return WordPieceTokenizer(build_tokenizer(vocab, SPECIAL_TOKENS, lowercase=lowercase))
