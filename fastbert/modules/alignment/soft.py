"""Soft attention: the softmax of the scores, and the sum of the values that it weights."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastbert import ops
from fastbert.ops.attention_arguments import MAX_HEAD_DIM
from fastbert.ops.attention_context import attention_context, hide_unattended


class Products(NamedTuple):
    """The scores ``q kᵀ scale``, as operands of the attention operation.

    Args:
        q: Left operands of shape ``(B, Lq, D)``.
        k: Right operands of shape ``(B, Lk, D)``.
        scale: Factor of the products, above 0.
    """

    q: Tensor
    k: Tensor
    scale: float


Scores: TypeAlias = "Products | Tensor"


def softmax(scores: Scores, mask: Tensor | None, backend: str | None) -> Tensor:
    """Compute the softmax of the scores over the keys of each query.

    Args:
        scores: Scores of ``(B, Lq, Lk)`` pairs.
        mask: Bool mask that is broadcastable to ``(B, Lq, Lk)``, or None.
        backend: Backend of the attention operation, or None.

    Returns:
        Tensor of shape ``(B, Lq, Lk)``. The row of a query that attends to no key is exactly 0.
    """
    bias = None
    if isinstance(scores, Products) and scores.q.shape[-1] > MAX_HEAD_DIM:
        scores = (scores.q * scores.scale) @ hide_unattended(scores.k, mask).mT
    if isinstance(scores, Tensor):
        # The scores are the bias of products that are 0.
        bias = scores.to(torch.promote_types(scores.dtype, torch.float32)).unsqueeze(1)
        batch, rows, columns = scores.shape
        scores = Products(bias.new_zeros(batch, rows, 1), bias.new_zeros(batch, columns, 1), 1.0)
    q, k = scores.q.unsqueeze(1), scores.k.unsqueeze(1)
    mask = None if mask is None else mask.unsqueeze(1)
    weights = ops.attention_weights(q, k, mask=mask, bias=bias, scale=scores.scale, backend=backend)
    return weights.squeeze(1)


def attend(
    scores: Scores,
    values: Tensor,
    mask: Tensor | None,
    factors: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute the weights ``softmax(scores) · factors`` and the sums of the values.

    Products whose operands are as wide as the values, and no wider than the attention operation
    allows, are one call of the operation if there are no factors.

    Args:
        scores: Scores of ``(B, Lq, Lk)`` pairs.
        values: Values of shape ``(B, Lk, Dv)``.
        mask: Bool mask that is broadcastable to ``(B, Lq, Lk)``, or None.
        factors: Factors of the weights, of shape ``(B, Lq, Lk)``, or None.
        backend: Backend of the attention operation, or None.

    Returns:
        The output of shape ``(B, Lq, Dv)`` and the weights of shape ``(B, Lq, Lk)``, in the dtype
        of `values`.
    """
    if factors is None and _is_one_call(scores, values):
        q, k, v = (x.unsqueeze(1) for x in (scores.q, scores.k, values))
        mask = None if mask is None else mask.unsqueeze(1)
        output, weights = ops.attention(
            q, k, v, mask=mask, scale=scores.scale, return_weights=True, backend=backend
        )
        return output.squeeze(1), weights.squeeze(1)
    weights = softmax(scores, mask, backend)
    weights = (weights if factors is None else weights * factors).to(values.dtype)
    output = attention_context(weights.unsqueeze(1), values.unsqueeze(1))
    return output.squeeze(1), weights


def _is_one_call(scores: Scores, values: Tensor) -> bool:
    """Tell whether one call of the attention operation can compute the output."""
    return isinstance(scores, Products) and (scores.q.shape[-1] == values.shape[-1] <= MAX_HEAD_DIM)
