"""The feed-forward, its first half, and the activation between."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastbert.activations import ACTIVATIONS, APPROXIMATIONS


def activate(h: Tensor, activation: str) -> Tensor:
    """The activation between the two products; a gated one halves the columns (..., 2N)."""
    return ACTIVATIONS[activation](h)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none"
) -> Tensor:
    """gelu(x Wᵀ + b)."""
    return activate(F.linear(x, weight, bias), APPROXIMATIONS[approximate])


def feed_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    recompute: bool = False,
    return_residual: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """gelu(x W1ᵀ + b1) W2ᵀ + b2 (Vaswani et al. 2017, eq. 2, with GELU for ReLU).

    "geglu" and "swiglu" take w1 (2N, K), the gate first (Shazeer 2020). ``recompute``, which is
    about memory alone, changes nothing here.
    """
    y = F.linear(activate(F.linear(x, w1, b1), activation), w2, b2)
    return (y, x) if return_residual else y
