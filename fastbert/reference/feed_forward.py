"""The feed-forward, its first product with the activation, and the activation alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastbert.activations import ACTIVATIONS, APPROXIMATIONS


def activate(h: Tensor, activation: str) -> Tensor:
    """Apply an activation; a gated activation maps ``(..., 2N)`` to ``(..., N)``."""
    return ACTIVATIONS[activation](h)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none"
) -> Tensor:
    """Compute ``gelu(x Wᵀ + b)``; see ``fastbert.ops.linear_gelu``."""
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
    """Compute ``activation(x W1ᵀ + b1) W2ᵀ + b2``; see ``fastbert.ops.feed_forward``.

    ``recompute`` saves memory in other backends and is ignored here.
    """
    y = F.linear(activate(F.linear(x, w1, b1), activation), w2, b2)
    return (y, x) if return_residual else y
