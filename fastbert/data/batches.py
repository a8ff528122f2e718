"""Batches for pre-training under a token budget, padded or packed, masked afresh each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastbert.data.masking import IGNORED, mask_packed
from fastbert.data.pairs import EpochPairs, NextSentencePairs
from fastbert.data.tokenizer import WordPieceTokenizer

Batch = dict[str, Any]

# Sequences are sorted by length inside windows of about this many batches: enough that padding
# nearly vanishes, few enough that batches still mix the whole corpus.
_WINDOW_BATCHES = 50
# First numbers of the seeds, so that the order and the masks of an epoch are drawn independently.
_ORDER, _MASKS = 1, 2


class PretrainingBatches:
    """Cuts the pairs of an epoch into batches of at most ``tokens_per_batch`` tokens.

    Padded (the padding counts): input_ids, attention_mask (1 = token), token_type_ids, labels, all
    int64 (B, L) with L the longest pair of the batch, and next_sentence_label int64 (B,). Sequences
    of similar length meet in a batch.

    Packed: input_ids, token_type_ids, labels int64 (T,), cu_seqlens int32 (B + 1,), max_seqlen (a
    Python int), next_sentence_label int64 (B,).

    labels are -100 where nothing is predicted; next_sentence_label is 0 for a true next half, 1 for
    a random one. Batch ``i`` of epoch ``k`` depends on the seeds, k and i alone, so a run resumes
    at ``epoch(k)[i]``. Raises ValueError when ``tokens_per_batch`` is less than the pairs'
    ``max_length`` or a seed is negative.
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
        """The batches of epoch ``index``: a sequence, so that its length is known."""
        pairs = self.pairs.epoch(index)
        rng = np.random.default_rng((_ORDER, self.seed, index))
        order = rng.permutation(len(pairs))
        if self.packed:
            groups = _group_packed(order, pairs.lengths, self.tokens_per_batch)
        else:
            window = _WINDOW_BATCHES * self.tokens_per_batch // self.pairs.max_length
            groups = _group_padded(order, pairs.lengths, self.tokens_per_batch, window)
            groups = [groups[i] for i in rng.permutation(len(groups))]
        return EpochBatches(self, index, pairs, groups)


class EpochBatches(Sequence[Batch]):
    """The batches of one epoch, built when they are asked for; also a map-style torch dataset."""

    def __init__(
        self,
        source: PretrainingBatches,
        epoch: int,
        pairs: EpochPairs,
        groups: list[np.ndarray],
    ) -> None:
        self._source, self._epoch, self._pairs, self._groups = source, epoch, pairs, groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
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
        return {**_pad(flat, lengths, fill), "next_sentence_label": is_random}


def _pad(
    flat: dict[str, np.ndarray], lengths: np.ndarray, fill: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Values (T,) of sequences of ``lengths`` to (B, L), and their attention_mask."""
    present = np.arange(lengths.max()) < lengths[:, None]
    batch = {"attention_mask": torch.from_numpy(present.astype(np.int64))}
    for name, values in flat.items():
        padded = np.full(present.shape, fill[name], dtype=np.int64)
        padded[present] = values
        batch[name] = torch.from_numpy(padded)
    return batch


def _group_packed(order: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cuts ``order`` into runs whose lengths sum to at most ``budget``."""
    cuts, total = [], 0
    for position, length in enumerate(lengths[order].tolist()):
        if total + length > budget:
            cuts.append(position)
            total = 0
        total += length
    return np.split(order, cuts)


def _group_padded(
    order: np.ndarray, lengths: np.ndarray, budget: int, window: int
) -> list[np.ndarray]:
    """Sorts windows of ``order`` by length and cuts them so that count times longest fits."""
    groups = []
    for begin in range(0, len(order), window):
        part = order[begin : begin + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        cuts, first = [], 0
        for position, length in enumerate(lengths[part].tolist()):
            # Sorted upwards: the newest sequence is the longest.
            if (position - first + 1) * length > budget:
                cuts.append(position)
                first = position
        groups += np.split(part, cuts)
    return groups
