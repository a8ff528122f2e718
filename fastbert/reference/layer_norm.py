"""Layer norm of a residual sum."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.reference.dropout import dropout


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Normalize ``residual + dropout(x + x_bias)``; see ``fastbert.ops.layer_norm``."""
    columns = x.shape[-1]
    if x_bias is not None:
        x = x + x_bias
    x = dropout(x, dropout_p, dropout_seed, (x.numel() // max(columns, 1), columns))
    if residual is not None:
        x = residual + x
    # The mean and the variance are computed in at least fp32 and one after the other, as in every
    # kernel. torch's layer norm computes both in one pass and gives NaN for elements around 1e30.
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = total - total.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * weight
    return (y if bias is None else y + bias).to(x.dtype)
