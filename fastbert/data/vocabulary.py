"""Training a WordPiece vocabulary on documents, with reproducible ids."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers.trainers import WordPieceTrainer

from fastbert.data.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer, build_tokenizer

MAX_CHARACTERS = 1000


def _stands_alone(character: str) -> bool:
    """Return whether BERT's word splitting isolates this character (punctuation or Chinese)."""
    is_ascii_symbol = character.isascii() and not character.isalnum()
    return (
        is_ascii_symbol
        or unicodedata.category(character).startswith("P")
        or "\u4e00" <= character <= "\u9fff"
    )


def _alphabet(text_counts: Counter[str], limit: int) -> list[str]:
    """Return the `limit` most frequent characters, sorted; ties are broken by code point."""
    ranked = sorted(text_counts, key=lambda character: (-text_counts[character], character))
    return sorted(ranked[:limit])


def train_tokenizer(
    documents: Iterable[Sequence[str]], vocab_size: int, *, lowercase: bool = True
) -> WordPieceTokenizer:
    """Train a WordPiece tokenizer on documents.

    The special tokens have the first ids. The same documents give the same vocabulary and ids.

    Args:
        documents: Documents, each a list of sentences. All of them are in memory during training.
        vocab_size: Largest size of the vocabulary; at least 64. A small corpus can give fewer
            tokens.
        lowercase: Whether texts are converted to lower case.

    Returns:
        The tokenizer, whose `vocab_size` is the size of the vocabulary.

    Raises:
        ValueError: If `vocab_size` is below 64, or if there is no text.

    Examples:
        >>> from fastbert.data import stories, train_tokenizer
        >>> tokenizer = train_tokenizer(stories(20, seed=0), 200)
        >>> tokenizer.vocab_size
        200
        >>> tokenizer.id_to_token(0)
        '[PAD]'
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
    # The trainer numbers continuation pieces in the order of a hash map, and it breaks ties between
    # merges by these numbers. To make the vocabulary reproducible, this function passes all pieces
    # of one character as special tokens, whose numbers are fixed.
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
    # The tokenizer is built again, because the trainer marked single characters as special tokens.
    vocab = dict(sorted(scratch.get_vocab().items(), key=lambda item: item[1]))
    return WordPieceTokenizer(build_tokenizer(vocab, SPECIAL_TOKENS, lowercase=lowercase))
