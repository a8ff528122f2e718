"""Masked-language-model targets: 15 % of the tokens, of them 80 % [MASK], 10 % random, 10 % kept.

Devlin et al. 2019, section 3.1 and A.1.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fastbert.data.pairs import Instance

IGNORED = -100
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


class MaskingTokenizer(Protocol):
    """What masking asks of a tokenizer: the part of ``WordPieceTokenizer`` with these names."""

    mask_id: int
    is_special: np.ndarray
    ordinary_ids: np.ndarray

    def word_starts(self, ids: np.ndarray) -> np.ndarray: ...


def _choose(sizes: np.ndarray, rng: np.random.Generator, probability: float) -> np.ndarray:
    """For sequences of ``sizes`` (B,) units, bool (sum of sizes,): which units are predicted.

    Each sequence gets ``probability`` times its size, rounded up or down at random so that the
    expectation is exact, but at least one where it has any: so only sequences shorter than
    1 / probability exceed it.
    """
    wanted = np.floor(sizes * probability + rng.random(len(sizes))).astype(np.int64)
    wanted = np.minimum(np.maximum(wanted, 1), sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    # Sorting by sequence and, inside it, by a random number ranks the units of each at random.
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
    """Masks sequences that lie one after the other.

    ids: integers (T,). cu_seqlens: integers (B + 1,), from 0 to T. Returns new ids and labels, both
    int64 (T,); labels are the true id where a token is predicted and -100 elsewhere. Special tokens
    are never predicted, nor drawn as a random token. With ``whole_word`` the pieces of a word are
    predicted together (what each becomes is drawn piece by piece). Raises ValueError for a
    ``probability`` outside (0, 1].
    """
    if not 0.0 < probability <= 1.0:
        raise ValueError(f"probability: got {probability}, allowed: a number in (0, 1]")
    row = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    positions = np.flatnonzero(~tokenizer.is_special[ids])
    # starts: where a unit (token or word) begins, among the positions that may be predicted.
    starts = np.ones(len(positions), dtype=bool)
    if whole_word and len(positions):
        # A piece whose word was cut off before it, or replaced by [UNK], begins a unit itself.
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
    """Masks one pair of n tokens: new ids and labels, both int64 (n,); see ``mask_packed``."""
    bounds = np.array([0, len(instance.ids)])
    return mask_packed(
        instance.ids, bounds, rng, tokenizer, probability=probability, whole_word=whole_word
    )
