"""Batches of examples of a prepared corpus under a token budget, for any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastbert.data.batches import Batch, group_padded, pad
from fastbert.data.masking import IGNORED, mask_packed
from fastbert.data.prepared.examples import EpochExamples, PreparedExamples

_ORDER, _MASKS = 4, 5


class PreparedBatches:
    """Batches of examples, each with at most `tokens_per_batch` tokens.

    A batch has the entries of a batch of `fastbert.data.PretrainingBatches`. If the examples are
    not pairs, a batch has no ``next_sentence_label``.

    One step of the training takes `batches_per_step` batches, over all processes. The number of
    batches of an epoch is a multiple of `batches_per_step`, and all steps of an epoch together take
    every example exactly once. The numbers of tokens of the packed batches of one step differ by
    less than the length of the longest example, except in the last step of an epoch.

    The masks of an example depend only on the seed, the epoch and the number of the example. The
    masks are therefore the same for any number of processes that train or that prepare batches.
    """

    def __init__(
        self,
        examples: PreparedExamples,
        *,
        tokens_per_batch: int,
        batches_per_step: int = 1,
        whole_word: bool = False,
        packed: bool = True,
        probability: float = 0.15,
    ) -> None:
        """Check and store the options.

        Args:
            examples: The examples of every epoch, whose seed also determines the order and the
                masks.
            tokens_per_batch: Largest number of tokens of a batch, padding included.
            batches_per_step: Number of batches that all processes take in one step.
            whole_word: Whether all pieces of a word are predicted together.
            packed: Whether batches are packed instead of padded.
            probability: Share of the tokens that are predicted, in (0, 1].

        Raises:
            ValueError: If an option is out of range.
        """
        if tokens_per_batch < examples.max_length:
            raise ValueError(
                f"tokens_per_batch: got {tokens_per_batch}, allowed: at least max_length "
                f"({examples.max_length}), so that each example fits"
            )
        if batches_per_step < 1:
            raise ValueError(f"batches_per_step: got {batches_per_step}, allowed: at least 1")
        if not 0.0 < probability <= 1.0:
            raise ValueError(f"probability: got {probability}, allowed: a number in (0, 1]")
        self.examples, self.tokens_per_batch = examples, tokens_per_batch
        self.batches_per_step = batches_per_step
        self.whole_word, self.packed, self.probability = whole_word, packed, probability
        # `_last` stores the number and the batches of the epoch that was last asked for, so that
        # repeated calls of `epoch` plan this epoch only once.
        self._last: tuple[int, PreparedEpoch] | None = None

    def epoch(self, index: int) -> PreparedEpoch:
        """Return the batches of one epoch as a sequence that builds a batch on access.

        Args:
            index: Number of the epoch, from 0.

        Returns:
            The batches, whose number is a multiple of `batches_per_step`.

        Raises:
            ValueError: If there are fewer examples than `batches_per_step`.
        """
        if self._last is None or self._last[0] != index:
            self._last = None
            self._last = index, self._plan(index)
        return self._last[1]

    def _plan(self, index: int) -> PreparedEpoch:
        examples = self.examples.epoch(index)
        rng = np.random.default_rng((_ORDER, self.examples.seed, index))
        order = rng.permutation(len(examples)).astype(np.min_scalar_type(len(examples)))
        if self.packed:
            bounds = _bounds(examples.lengths[order], self.tokens_per_batch)
        else:
            budget, longest = self.tokens_per_batch, self.examples.max_length
            groups = group_padded(order, examples.lengths, budget, longest, rng)
            order = np.concatenate(groups)
            bounds = np.cumsum([0, *map(len, groups)])
        return PreparedEpoch(
            self, index, examples, order, _divisible(bounds, self.batches_per_step)
        )


class PreparedEpoch(Sequence[Batch]):
    """The batches of one epoch, each built on access.

    The object is also a map-style dataset of torch.
    """

    def __init__(
        self,
        source: PreparedBatches,
        epoch: int,
        examples: EpochExamples,
        order: np.ndarray,
        bounds: np.ndarray,
    ) -> None:
        """Store the parts of an epoch.

        Args:
            source: The `PreparedBatches`, which has the options of the batches.
            epoch: Number of the epoch.
            examples: The examples of the epoch.
            order: Numbers of the n examples, batch after batch, of shape ``(n,)``.
            bounds: Index in `order` of the first example of each batch, followed by n.
        """
        self._source, self._epoch, self._examples = source, epoch, examples
        self._order, self._bounds = order, bounds

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._bounds) - 1

    def chosen(self, index: int) -> np.ndarray:
        """Return the numbers of the examples in a batch."""
        return self._order[self._bounds[index] : self._bounds[index + 1]].astype(np.int64)

    def __getitem__(self, index: Any) -> Any:
        """Build one batch, or a list of batches for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source, group = self._source, self.chosen(range(len(self))[index])
        lengths = self._examples.lengths[group].astype(np.int64)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.empty(cu_seqlens[-1], dtype=np.int64)
        flat = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "labels": ids.copy()}
        bounds = cu_seqlens.tolist()
        for row, example in enumerate(group.tolist()):
            self._write(example, {n: x[bounds[row] : bounds[row + 1]] for n, x in flat.items()})
        batch: Batch
        if source.packed:
            batch = {name: torch.from_numpy(values) for name, values in flat.items()}
            batch["cu_seqlens"] = torch.from_numpy(cu_seqlens.astype(np.int32))
            batch["max_seqlen"] = int(lengths.max())
        else:
            pad_id = source.examples.corpus.tokenizer.pad_id
            fill = {"input_ids": pad_id, "token_type_ids": 0, "labels": IGNORED}
            batch = dict(pad(flat, lengths, fill))
        if self._examples.pairs:
            label = self._examples.label[group].astype(np.int64)
            batch["next_sentence_label"] = torch.from_numpy(label)
        return batch

    def _write(self, example: int, views: dict[str, np.ndarray]) -> None:
        """Write one example and its labels into `views`, which are parts of a batch's arrays."""
        source, ids = self._source, views["input_ids"]
        self._examples.write(example, ids, views["token_type_ids"])
        rng = np.random.default_rng((_MASKS, source.examples.seed, self._epoch, example))
        ids[:], views["labels"][:] = mask_packed(
            ids,
            np.array([0, len(ids)]),
            rng,
            source.examples.corpus.tokenizer,
            probability=source.probability,
            whole_word=source.whole_word,
        )


def _bounds(lengths: np.ndarray, budget: int) -> np.ndarray:
    """Return the bounds of consecutive batches, each of at most `budget` tokens.

    `lengths` has the numbers of tokens of the examples.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(lengths):
        taken = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, taken + budget, side="right")))
    return np.array(bounds)


def _divisible(bounds: np.ndarray, share: int) -> np.ndarray:
    """Return `bounds` after halving batches until the last step also has `share` batches."""
    if bounds[-1] < share:
        raise ValueError(
            f"corpus: {bounds[-1]} examples for {share} batches per step, allowed: at least one "
            "each"
        )
    while last := (len(bounds) - 1) % share:
        sizes = np.diff(bounds[-last - 1 :])
        if sizes.max() < 2:
            # The batches of the last step have one example each, so an earlier batch is halved.
            sizes = np.diff(bounds)
        place = len(bounds) - 1 - len(sizes) + int(sizes.argmax())
        middle = (bounds[place] + bounds[place + 1]) // 2
        bounds = np.insert(bounds, place + 1, middle)
    return bounds
