"""Batches for pre-training under a token budget, padded or packed, with new masks every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastbert.data.masking import IGNORED, mask_packed
from fastbert.data.pairs import EpochPairs, NextSentencePairs
from fastbert.data.tokenizer import WordPieceTokenizer

Batch = dict[str, Any]

# Padded sequences are sorted by length inside windows of about this many batches. A window is long
# enough to remove nearly all padding. Since a window is a random part of an epoch, the sequences of
# a batch come from the whole corpus.
_WINDOW_BATCHES = 50
# The seeds of the order and of the masks begin with different numbers, so that an epoch's order and
# its masks are drawn independently.
_ORDER, _MASKS = 1, 2


class PretrainingBatches:
    """Batches of next-sentence pairs; a batch has at most `tokens_per_batch` tokens.

    A packed batch has ``input_ids``, ``token_type_ids`` and ``labels``, all int64 of shape
    ``(T,)``, where ``T`` is the number of tokens. It also has ``cu_seqlens``, int32 of shape
    ``(B + 1,)``, where ``B`` is the number of pairs, and ``max_seqlen``, the number of tokens of
    the longest pair as an int.

    A padded batch has ``input_ids``, ``attention_mask`` (1 at a token, 0 at padding),
    ``token_type_ids`` and ``labels``, all int64 of shape ``(B, L)``. ``L`` is the length of the
    longest pair. Padding counts toward `tokens_per_batch`, so a padded batch gathers pairs of
    similar length.

    Packed and padded batches have ``next_sentence_label``, int64 of shape ``(B,)``. The label of a
    pair is 0 if the second text follows the first text, and 1 if the second text is from another
    document. ``labels`` has the original id of each predicted token, and -100 elsewhere.

    With the same documents and options, batch ``i`` of epoch ``k`` depends only on the seed of
    `pairs`, the seed of the batches, ``k`` and ``i``. A resumed run can therefore continue at
    ``epoch(k)[i]``.

    Examples:
        >>> from fastbert.data import NextSentencePairs, PretrainingBatches
        >>> from fastbert.data import stories, train_tokenizer
        >>> documents = list(stories(20, seed=0))
        >>> tokenizer = train_tokenizer(documents, 200)
        >>> pairs = NextSentencePairs(documents, tokenizer, max_length=64, seed=0)
        >>> batches = PretrainingBatches(pairs, tokenizer, tokens_per_batch=256, seed=0)
        >>> batch = batches.epoch(0)[0]
        >>> sorted(batch)  # doctest: +NORMALIZE_WHITESPACE
        ['cu_seqlens', 'input_ids', 'labels', 'max_seqlen', 'next_sentence_label',
         'token_type_ids']
        >>> batch["input_ids"].numel() <= 256
        True
    """

    def __init__(
        self,
        pairs: NextSentencePairs,
        tokenizer: WordPieceTokenizer,
        *,
        tokens_per_batch: int,
        seed: int,
        whole_word: bool = False,
        packed: bool = True,
        probability: float = 0.15,
    ) -> None:
        """Check and store the options.

        Args:
            pairs: The pairs of every epoch.
            tokenizer: The tokenizer of `pairs`, which has the ids of the mask token and of the
                special tokens.
            tokens_per_batch: Largest number of tokens in a batch, padding included.
            seed: Seed of the order of the pairs and of the masks; at least 0.
            whole_word: Whether all pieces of a word are predicted together.
            packed: Whether batches are packed instead of padded.
            probability: Share of the tokens that are predicted, in (0, 1].

        Raises:
            ValueError: If `tokens_per_batch` is less than ``pairs.max_length``, or if `seed` or
                `probability` is out of range.
        """
        if tokens_per_batch < pairs.max_length:
            raise ValueError(
                f"tokens_per_batch: got {tokens_per_batch}, allowed: at least the pairs' "
                f"max_length ({pairs.max_length}), so that each sequence fits"
            )
        if seed < 0:
            raise ValueError(f"seed: got {seed}, allowed: at least 0")
        if not 0.0 < probability <= 1.0:
            raise ValueError(f"probability: got {probability}, allowed: a number in (0, 1]")
        self.pairs, self.tokenizer = pairs, tokenizer
        self.tokens_per_batch, self.seed, self.packed = tokens_per_batch, seed, packed
        self.whole_word, self.probability = whole_word, probability

    def epoch(self, index: int) -> EpochBatches:
        """Return the batches of one epoch as a sequence that builds a batch on access.

        Args:
            index: Number of the epoch, from 0.

        Returns:
            The batches; ``len`` of the result is their number.
        """
        pairs = self.pairs.epoch(index)
        rng = np.random.default_rng((_ORDER, self.seed, index))
        order = rng.permutation(len(pairs))
        if self.packed:
            groups = _group_packed(order, pairs.lengths, self.tokens_per_batch)
        else:
            budget, longest = self.tokens_per_batch, self.pairs.max_length
            groups = group_padded(order, pairs.lengths, budget, longest, rng)
        return EpochBatches(self, index, pairs, groups)


class EpochBatches(Sequence[Batch]):
    """The batches of one epoch, each built on access.

    The object is also a map-style dataset of torch.
    """

    def __init__(
        self,
        source: PretrainingBatches,
        epoch: int,
        pairs: EpochPairs,
        groups: list[np.ndarray],
    ) -> None:
        """Store the parts of an epoch.

        Args:
            source: The `PretrainingBatches`, which has the options of the batches.
            epoch: Number of the epoch, which is part of the masks' seeds.
            pairs: The pairs of the epoch.
            groups: For each batch, the indices of its pairs.
        """
        self._source, self._epoch, self._pairs, self._groups = source, epoch, pairs, groups

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        """Build one batch, or a list of batches for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        source, group = self._source, self._groups[index]
        lengths = self._pairs.lengths[group]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.empty(cu_seqlens[-1], dtype=np.int64)
        token_types = np.zeros_like(ids)
        bounds = cu_seqlens.tolist()
        for row, pair in enumerate(group.tolist()):
            span = slice(bounds[row], bounds[row + 1])
            self._pairs.write(pair, ids[span], token_types[span])
        rng = np.random.default_rng((_MASKS, source.seed, self._epoch, index))
        ids, labels = mask_packed(
            ids,
            cu_seqlens,
            rng,
            source.tokenizer,
            probability=source.probability,
            whole_word=source.whole_word,
        )
        flat = {"input_ids": ids, "token_type_ids": token_types, "labels": labels}
        is_random = torch.from_numpy(self._pairs.is_random[group].astype(np.int64))
        if source.packed:
            return {
                **{name: torch.from_numpy(values) for name, values in flat.items()},
                "cu_seqlens": torch.from_numpy(cu_seqlens.astype(np.int32)),
                "max_seqlen": int(lengths.max()),
                "next_sentence_label": is_random,
            }
        fill = {"input_ids": source.tokenizer.pad_id, "token_type_ids": 0, "labels": IGNORED}
        return {**pad(flat, lengths, fill), "next_sentence_label": is_random}


def pad(
    flat: dict[str, np.ndarray], lengths: np.ndarray, fill: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Pad packed values of shape ``(T,)`` to the shape ``(B, L)``, and add the attention mask.

    The B sequences have the given `lengths`, and L is the largest of them. `fill` has the padding
    value for each name in `flat`.
    """
    present = np.arange(lengths.max()) < lengths[:, None]
    batch = {"attention_mask": torch.from_numpy(present.astype(np.int64))}
    for name, values in flat.items():
        padded = np.full(present.shape, fill[name], dtype=np.int64)
        padded[present] = values
        batch[name] = torch.from_numpy(padded)
    return batch


def _group_packed(order: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut `order` into consecutive groups of sequences, each of at most `budget` tokens."""
    cuts, total = [], 0
    for position, length in enumerate(lengths[order].tolist()):
        if total + length > budget:
            cuts.append(position)
            total = 0
        total += length
    return np.split(order, cuts)


def group_padded(
    order: np.ndarray,
    lengths: np.ndarray,
    budget: int,
    max_length: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Sort windows of `order` by length, cut them into groups, and shuffle the groups.

    In each group, the number of sequences times the length of the longest sequence is at most
    `budget`. A window fills `_WINDOW_BATCHES` batches if all its sequences have the length
    `max_length`.
    """
    groups = []
    window = _WINDOW_BATCHES * budget // max_length
    for begin in range(0, len(order), window):
        part = order[begin : begin + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        cuts, first = [], 0
        for position, length in enumerate(lengths[part].tolist()):
            # Lengths ascend, so the current sequence is the longest of its group.
            if (position - first + 1) * length > budget:
                cuts.append(position)
                first = position
        groups += np.split(part, cuts)
    return [groups[i] for i in rng.permutation(len(groups))]
