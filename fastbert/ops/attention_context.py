"""Attention outputs from softmax weights that were computed before, in differentiable PyTorch."""

from __future__ import annotations

from torch import Tensor

from fastbert import reference
from fastbert.ops.arguments import (
    dropout_seed as draw_seed,
)
from fastbert.reference import hide_unattended

__all__ = ["attention_context", "hide_unattended"]


def attention_context(
    weights: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Multiply the values by `dropout(weights)`, so that a gradient passes through `weights`.

    The fused operators compute the output and the returned weights separately, so the gradient of
    the output does not reach the returned weights. This function is for callers who need the
    gradient of the output with respect to the weights.

    Args:
        weights: Softmax weights before dropout, of shape ``(B, H, Lq, Lk)``; 0 at padding.
        v: Values of shape ``(B, H, Lk, D)``, or packed ``(T, H, D)`` with `cu_seqlens`.
        cu_seqlens: Cumulative lengths of the packed sequences, int32 of shape ``(B + 1,)``.
        dropout_p: Probability with which a weight is dropped.
        dropout_seed: Seed of the dropout mask, int64 of shape ``(1,)``; None draws a seed from
            torch's generator of the device. The mask is that of ``ops.attention`` for this seed.

    Returns:
        Tensor of shape ``(B, H, Lq, D)``, or packed ``(T, H, D)``. A query whose weights are all 0
        has an output of exactly 0. A value whose weight is 0 for every query does not change the
        result, even if it is NaN.
    """
    seed = draw_seed(dropout_p, dropout_seed, weights.device)
    dropped = reference.dropout(weights, dropout_p, seed, tuple(weights.shape))
    unseen = (weights == 0.0).all(dim=-2).unsqueeze(-1)
    if cu_seqlens is None:
        return dropped @ v.masked_fill(unseen, 0.0)
    padded, slot, used = reference.pad_rows(v, cu_seqlens, weights.shape[-1])
    out = dropped @ padded.transpose(1, 2).masked_fill(unseen, 0.0)
    return reference.unpad_rows(out.transpose(1, 2), slot, used)
