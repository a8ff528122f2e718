"""Targets of permutation language modelling (Yang et al. 2019, sections 2.2 and 2.3).

Spans of tokens are predicted, in a random order. A predicted token sees the tokens that are not
predicted, and the predicted tokens before it in the order. It does not see itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastbert.data.masking import IGNORED


class PermutationBatch(NamedTuple):
    """The arguments of ``XLNetLMHeadModel``; N is the largest number of predictions.

    Attributes:
        input_ids: Ids in which predicted tokens are the mask token, int64 of shape ``(B, L)``.
        perm_mask: 1 where token i must not attend to token j, float32 of shape ``(B, L, L)``.
        target_mapping: 1 where prediction i is at token j, float32 of shape ``(B, N, L)``. Rows
            after the last prediction of a sequence are 0.
        labels: Original ids of the predicted tokens, int64 of shape ``(B, N)``; -100 after the last
            prediction of a sequence.
    """

    input_ids: np.ndarray
    perm_mask: np.ndarray
    target_mapping: np.ndarray
    labels: np.ndarray


def permute(
    ids: np.ndarray,
    may_predict: np.ndarray,
    rng: np.random.Generator,
    mask_id: int,
    *,
    probability: float = 1 / 6,
    longest_span: int = 5,
) -> PermutationBatch:
    """Choose spans to predict and an order of prediction for each sequence.

    The sequence is divided into contexts. A context has ``span / probability`` tokens for a span of
    1 to `longest_span` tokens at a random place in the context.

    Args:
        ids: Ids of the tokens, integers of shape ``(B, L)``.
        may_predict: Whether a token may be predicted, bool of shape ``(B, L)``: False for padding
            and special tokens.
        rng: Source of randomness.
        mask_id: Id of the mask token.
        probability: Share of the tokens that are predicted, in (0, 1].
        longest_span: Length of the longest span, at least 1.

    Returns:
        The arguments of the model. A sequence without a token that may be predicted has none.

    Raises:
        ValueError: If a shape or a value is not allowed. The message names the argument.
    """
    if ids.ndim != 2 or ids.shape != may_predict.shape:
        raise ValueError(f"may_predict: got shape {may_predict.shape}, allowed: {ids.shape}, 2-D")
    if not 0.0 < probability <= 1.0:
        raise ValueError(f"probability: got {probability}, allowed: a number in (0, 1]")
    if longest_span < 1:
        raise ValueError(f"longest_span: got {longest_span}, allowed: an integer >= 1")
    batch, length = ids.shape
    predicted = np.zeros((batch, length), dtype=bool)
    for row in predicted:
        at = 0
        while at < length:
            span = int(rng.integers(1, longest_span + 1))
            context = max(int(span / probability), span)
            start = at + int(rng.integers(context - span + 1))
            row[start : start + span] = True
            at += context
    predicted &= may_predict
    order = rng.random((batch, length)).argsort(1).argsort(1)
    # A token that is not predicted comes before all predicted tokens, and sees none of them.
    order = np.where(predicted, order, -1)
    hidden = (order[:, :, None] <= order[:, None, :]) & predicted[:, None, :]
    most = max(int(predicted.sum(1).max(initial=0)), 1)
    mapping = np.zeros((batch, most, length), dtype=np.float32)
    labels = np.full((batch, most), IGNORED, dtype=np.int64)
    for number in range(batch):
        places = predicted[number].nonzero()[0]
        mapping[number, np.arange(len(places)), places] = 1.0
        labels[number, : len(places)] = ids[number, places]
    masked = np.where(predicted, mask_id, ids).astype(np.int64)
    return PermutationBatch(masked, hidden.astype(np.float32), mapping, labels)
