"""A function behind a result whose gradient is None, which autograd takes for zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WithoutGradient(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None
