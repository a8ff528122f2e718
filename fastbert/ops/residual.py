"""A layer with a residual connection around it: one node of autograd for both uses of its input.

Where a tensor is used twice, autograd adds two gradients, which is a kernel of its own. A layer
that also returns its input gets both gradients at once, and adds one inside the product that
computes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops.product import rows_of


class Layer(NamedTuple):
    """The forward and the backward of a layer, below autograd.

    ``forward(rows, *parameters, *constants)`` returns y (M, N) and the tensor to save, or None.
    ``backward(dy, rows, *parameters, saved, dresidual, needs, *constants)`` returns the gradients
    of rows and parameters, with dresidual added to the first; a gradient that is not needed may be
    any tensor. dresidual may have another dtype than dy: under autocast the residual stream stays
    in fp32.
    """

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor | None, ...]]


# By the name of the operation: what torch.compile is to look through is passed as constants.
LAYERS: dict[str, Layer] = {}


def with_residual(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    parameters: tuple[Tensor | None, ...],
    constants: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Apply the layer `name` to x (..., K); return y (..., N), and x for the residual connection.

    The layer computes in ``dtype``; x and its gradient keep their dtypes. Nothing else may use the
    returned x.
    """
    return _WithResidual.apply(name, constants, dtype, x, *parameters)


class _WithResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        constants: tuple[Any, ...],
        dtype: torch.dtype,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows = rows_of(x, dtype)
        y, saved = LAYERS[name].forward(rows, *parameters, *constants)
        ctx.save_for_backward(rows, *parameters, saved)
        ctx.name, ctx.constants = name, constants
        ctx.set_materialize_grads(False)
        return y.view(*x.shape[:-1], y.shape[-1]), x

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[3:])
        if dy is None:
            return None, None, None, dresidual, *[None] * (len(needs) - 1)
        gradients = LAYERS[ctx.name].backward(
            dy.reshape(-1, dy.shape[-1]),
            *ctx.saved_tensors,
            None if dresidual is None else dresidual.reshape(-1, dresidual.shape[-1]),
            needs,
            *ctx.constants,
        )
        needed = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        dx = needed[0]
        if dx is not None:
            needed[0] = dx.view(*dy.shape[:-1], dx.shape[-1])
        return None, None, None, *needed
