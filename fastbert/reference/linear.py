"""A linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, return_residual: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``x Wᵀ + b``; see ``fastbert.ops.linear``.

    With `return_residual`, the function also returns `x`.
    """
    y = F.linear(x, weight, bias)
    return (y, x) if return_residual else y
