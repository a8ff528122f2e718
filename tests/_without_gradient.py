"""An autograd function whose backward returns None, which autograd treats as zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WithoutGradient(torch.autograd.Function):
    """The identity function, with None as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None
