"""RMS norm of a residual sum."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Divide ``x + residual`` by its root mean square and multiply the result by `weight`.

    See ``fastbert.ops.rms_norm``.
    """
    if residual is not None:
        x = x + residual
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * rstd * weight).to(x.dtype)
