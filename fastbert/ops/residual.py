"""A layer with a residual connection around it: one node of autograd for both uses of its input.

Where a tensor is used twice autograd adds two gradients, which is a kernel of its own. A layer
that hands its input on gets both gradients at once, and adds one inside the GEMM that makes the
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layer(NamedTuple):
    """``forward(rows, *parameters, *constants)`` → y (M, N) and what to save, None or a tensor;
    ``backward(dy, rows, *parameters, saved, dresidual, needs, *constants)`` → gradients of rows and
    parameters, dresidual's added to the first; those that are not needed may be anything."""

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor | None, ...]]


# By the name of the operation: what torch.compile is to look through is passed as constants.
LAYERS: dict[str, Layer] = {}


def with_residual(
    name: str, x: Tensor, parameters: tuple[Tensor | None, ...], constants: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """x (..., K) → y (..., N) and x, to be used for the residual connection and nothing else.

    The layer computes in the dtype of its first parameter; x, and its gradient, keep theirs.
    """
    return _WithResidual.apply(name, constants, x, *parameters)


class _WithResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, constants: tuple[Any, ...], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert parameters[0] is not None
        rows = x.reshape(-1, x.shape[-1]).to(parameters[0].dtype)
        y, saved = LAYERS[name].forward(rows, *parameters, *constants)
        ctx.save_for_backward(rows, *parameters, saved)
        ctx.name, ctx.constants = name, constants
        ctx.set_materialize_grads(False)
        return y.view(*x.shape[:-1], y.shape[-1]), x

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[2:])
        if dy is None:
            return None, None, dresidual, *[None] * (len(needs) - 1)
        flat = None if dresidual is None else dresidual.reshape(-1, dresidual.shape[-1])
        # Under autocast the residual stream stays in fp32, which no GEMM adds to bf16.
        mixed = flat is not None and flat.dtype != dy.dtype
        gradients = LAYERS[ctx.name].backward(
            dy.reshape(-1, dy.shape[-1]),
            *ctx.saved_tensors,
            None if mixed else flat,
            needs,
            *ctx.constants,
        )
        needed = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        dx = needed[0]
        if dx is not None:
            dx = flat + dx if mixed else dx
            needed[0] = dx.view(*dy.shape[:-1], dx.shape[-1])
        return None, None, *needed
