"""Targets of masked language modelling (Devlin et al. 2019, sections 3.1 and A.1).

By default 15 % of the tokens are predicted. Of the predicted tokens, 80 % become ``[MASK]``, 10 %
become a random token and 10 % stay unchanged.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fastbert.data.pairs import Instance

IGNORED = -100
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


class MaskingTokenizer(Protocol):
    """The part of a tokenizer's interface that masking needs; `WordPieceTokenizer` has it.

    Attributes:
        mask_id: Id of the mask token.
        is_special: bool of shape ``(vocab_size,)``, True at the ids of special tokens.
        ordinary_ids: The ids of all tokens that are not special.
    """

    mask_id: int
    is_special: np.ndarray
    ordinary_ids: np.ndarray

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return a bool array of the shape of `ids`, True where a word begins."""
        ...


def _choose(sizes: np.ndarray, rng: np.random.Generator, probability: float) -> np.ndarray:
    """Choose the units to predict in several sequences; `sizes` has each sequence's unit count.

    A unit is a token or a word. The number of chosen units of a sequence is `probability` times its
    size, rounded up or down at random, so that the expected number is exact. If a sequence has any
    units, at least one is chosen. Only in a sequence of fewer than ``1 / probability`` units does
    the expected share therefore exceed `probability`.

    Returns:
        bool of shape ``(sizes.sum(),)``, True at the units to predict.
    """
    wanted = np.floor(sizes * probability + rng.random(len(sizes))).astype(np.int64)
    wanted = np.minimum(np.maximum(wanted, 1), sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    # The sort orders units by sequence and, inside a sequence, by a random number. Every unit then
    # has a random rank in its sequence.
    order = np.argsort(row + rng.random(len(row)))
    rank = np.empty(len(row), dtype=np.int64)
    rank[order] = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank < wanted[row]


def mask_packed(
    ids: np.ndarray,
    cu_seqlens: np.ndarray,
    rng: np.random.Generator,
    tokenizer: MaskingTokenizer,
    *,
    probability: float = 0.15,
    whole_word: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask the sequences of a packed batch.

    Special tokens are neither predicted nor drawn as random tokens.

    Args:
        ids: Ids of the tokens, integers of shape ``(T,)``.
        cu_seqlens: Cumulative lengths of the sequences, integers of shape ``(B + 1,)``.
        rng: Source of randomness.
        tokenizer: The tokenizer, which has the ids of the mask token, the special tokens and the
            ordinary tokens.
        probability: Share of the tokens that are predicted, in (0, 1].
        whole_word: Whether all pieces of a word are predicted together. The replacement of each
            piece is drawn independently.

    Returns:
        The masked ids and the labels, both int64 of shape ``(T,)``. The label of a predicted token
        is its original id, and all other labels are -100.

    Raises:
        ValueError: If `probability` is out of range.
    """
    if not 0.0 < probability <= 1.0:
        raise ValueError(f"probability: got {probability}, allowed: a number in (0, 1]")
    row = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    positions = np.flatnonzero(~tokenizer.is_special[ids])
    # `starts` is True where a unit (a token or a word) begins; it has one value per ordinary token.
    starts = np.ones(len(positions), dtype=bool)
    if whole_word and len(positions):
        # A piece also begins a unit if the start of its word was truncated or replaced by [UNK].
        follows = (np.diff(positions) == 1) & (np.diff(row[positions]) == 0)
        starts[1:] = tokenizer.word_starts(ids[positions[1:]]) | ~follows
    sizes = np.bincount(row[positions[starts]], minlength=len(cu_seqlens) - 1)
    picked = positions[_choose(sizes, rng, probability)[np.cumsum(starts) - 1]]

    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[picked] = ids[picked]
    masked = ids.astype(np.int64)
    draw = rng.random(len(picked))
    masked[picked[draw < MASKED_SHARE]] = tokenizer.mask_id
    randomised = picked[(draw >= MASKED_SHARE) & (draw < MASKED_SHARE + RANDOM_SHARE)]
    masked[randomised] = rng.choice(tokenizer.ordinary_ids, size=len(randomised))
    return masked, labels


def mask_tokens(
    instance: Instance,
    rng: np.random.Generator,
    tokenizer: MaskingTokenizer,
    *,
    probability: float = 0.15,
    whole_word: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask one next-sentence pair.

    Of the predicted tokens, 80 % become the mask token, 10 % become a random token and 10 % stay
    unchanged (Devlin et al. 2019). Special tokens are neither predicted nor drawn as random tokens.

    Args:
        instance: The pair, which has n tokens.
        rng: Source of randomness.
        tokenizer: The tokenizer of the pair.
        probability: Share of the tokens that are predicted, in (0, 1].
        whole_word: Whether all pieces of a word are predicted together.

    Returns:
        The masked ids and the labels, both int64 of shape ``(n,)``. The label of a predicted token
        is its original id, and all other labels are -100.

    Raises:
        ValueError: If `probability` is out of range.

    Examples:
        >>> import numpy as np
        >>> from fastbert.data import NextSentencePairs, mask_tokens, stories, train_tokenizer
        >>> documents = list(stories(20, seed=0))
        >>> tokenizer = train_tokenizer(documents, 200)
        >>> pair = NextSentencePairs(documents, tokenizer, max_length=64, seed=0).epoch(0)[0]
        >>> ids, labels = mask_tokens(pair, np.random.default_rng(0), tokenizer)
        >>> predicted = labels != -100
        >>> bool((labels[predicted] == pair.ids[predicted]).all())
        True
        >>> bool((ids[~predicted] == pair.ids[~predicted]).all())
        True
    """
    bounds = np.array([0, len(instance.ids)])
    return mask_packed(
        instance.ids, bounds, rng, tokenizer, probability=probability, whole_word=whole_word
    )
