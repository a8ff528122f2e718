"""Dropout of a tensor, in differentiable PyTorch, for code outside of the fused operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import dropout_seed as draw_seed
from fastbert.ops.embedding import embedding


def dropout(
    x: Tensor,
    dropout_p: float,
    *,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Set elements of `x` to 0, each with probability `dropout_p`, and scale the others.

    Args:
        x: Input of shape ``(..., N)``, in a floating dtype.
        dropout_p: Probability with which an element is dropped. The scale of the other elements is
            ``1 / (1 - dropout_p)``.
        dropout_seed: Seed of the mask, int64 of shape ``(1,)``; None draws a seed from torch's
            generator of the device. The mask is that of ``reference.dropout`` for `x` flattened to
            rows ``(T, N)``.
        backend: Backend of ``ops.embedding``, which computes the mask. A backend that does not
            implement ``ops.embedding`` has the effect of None.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        ValueError: If `dropout_p` is outside [0, 1], or if the shape or the device of
            `dropout_seed` is not allowed.
        TypeError: If the dtype of the seed is not int64.
    """
    seed = draw_seed(dropout_p, dropout_seed, x.device)
    if seed is None:
        return x
    rows, columns = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    # With a scale of 0 and a shift of 1, every element of the layer norm of the embeddings is 1.
    # The dropout of the embeddings therefore gives 0 at dropped elements, and at no other element.
    token = torch.zeros(rows, dtype=torch.int64, device=x.device)
    table, zeros, ones = x.new_zeros(1, columns), x.new_zeros(columns), x.new_ones(columns)
    mask = embedding(
        token, token, token, table, table, table, zeros, ones,
        dropout_p=dropout_p, dropout_seed=seed, backend=backends.prefer("embedding", backend),
    )  # fmt: skip
    scale = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
    return (x * scale).masked_fill(mask.view(x.shape) == 0.0, 0.0)
