"""A layer with a residual connection around it, as one autograd node for both uses of its input.

If a tensor is used twice, autograd adds its two gradients in a separate kernel. A layer that also
returns its input gets both gradients at once. The layer adds the gradient of the residual
connection inside the product that computes the other gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops.arguments import as_matrix
from fastbert.ops.product import rows_of


class Layer(NamedTuple):
    """The forward and the backward of a layer, below autograd.

    Args:
        forward: ``forward(rows, *parameters, *constants)`` returns y (M, N), and a tensor that the
            backward needs, or None.
        backward: ``backward(dy, rows, *parameters, saved, dresidual, needs, *constants)`` returns
            the gradients of rows and parameters, with dresidual added to the gradient of rows. If
            ``needs`` is False for a gradient, the result may be any tensor. Under autocast the
            residual stream stays in fp32, so dresidual may have another dtype than dy.
    """

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor | None, ...]]


# The layers by the name of the operation. The name of a layer, unlike the layer itself, is a
# constant that torch.compile can pass to an autograd function.
LAYERS: dict[str, Layer] = {}


def with_residual(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    parameters: tuple[Tensor | None, ...],
    constants: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Apply a layer to `x`, and return `x` as well for the residual connection.

    Args:
        name: Name of the layer in ``LAYERS``.
        x: Input of shape (..., K). The gradient of `x` has the dtype of `x`.
        dtype: Dtype in which the layer computes.
        parameters: Parameters of the layer.
        constants: Further arguments of the layer, which are not tensors.

    Returns:
        The result of the layer, of shape (..., N), and `x`. Only the residual connection may use
        the returned `x`.
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
            as_matrix(dy),
            *ctx.saved_tensors,
            None if dresidual is None else as_matrix(dresidual),
            needs,
            *ctx.constants,
        )
        needed = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        dx = needed[0]
        if dx is not None:
            needed[0] = dx.view(*dy.shape[:-1], dx.shape[-1])
        return None, None, None, *needed
