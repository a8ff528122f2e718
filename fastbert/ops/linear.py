"""x Wᵀ + b by the library's GEMM, with a gradient that launches nothing but GEMMs and our sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    autocast,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator
from fastbert.ops.residual import LAYERS, Layer, with_residual


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x Wᵀ + b, the bias in the GEMM's epilogue and its gradient a deterministic sum.

    x (..., K), weight (N, K), bias (N,) or None, one floating dtype. Returns (..., N) in x's dtype
    (autocast's under autocast). With return_residual also x, for a residual connection around this
    layer: the gradient that comes back through it is added inside the GEMM that makes x's, where
    autograd would launch an addition. Raises ValueError or TypeError naming the argument;
    ValueError when ``backend`` cannot serve.
    """
    given = x
    x, weight, bias = autocast(x, weight, bias)
    _check(x, weight, bias)
    request = backends.Request(x.device.type, x.dtype)
    choice = backends.resolve("linear", backend, request)
    if return_residual and given.requires_grad and torch.is_grad_enabled():
        return with_residual("linear", given, (weight, bias), (choice.backend,))
    if torch.is_grad_enabled():
        y = _linear(x.reshape(-1, x.shape[-1]), weight, bias, choice.backend)
        y = y.view(*x.shape[:-1], weight.shape[0])
    else:
        y = F.linear(x, weight, bias)  # the same product, sooner launched
    return (y, given) if return_residual else y


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_floating("x", x)
    require(x.dim() >= 1, "x", f"shape {tuple(x.shape)}", "(..., K)")
    columns = x.shape[-1]
    shape = f"shape {tuple(weight.shape)}"
    require(weight.dim() == 2, "weight", shape, f"shape (N, {columns})")
    require_shape("weight", weight, (weight.shape[0], columns))
    require(weight.dtype == x.dtype, "weight", weight.dtype, f"{x.dtype}, as x")
    require_same_device("x", x.device, weight=weight, bias=bias)
    if bias is not None:
        require_shape("bias", bias, (weight.shape[0],))
        require(bias.dtype == x.dtype, "bias", bias.dtype, f"{x.dtype}, as x")


# The operator: x (M, K) → y (M, N)


def _forward(x, weight, bias, backend):
    return F.linear(x, weight, bias)


def _fake(x, weight, bias, backend):
    return x.new_empty(x.shape[0], weight.shape[0])


def _backward(dy, x, weight, bias, dresidual, needs, backend):
    nothing = dy.new_empty(0)
    needs_x, needs_weight, needs_bias = needs
    dx = nothing
    if needs_x:
        dx = dy @ weight if dresidual is None else torch.addmm(dresidual, dy, weight)
    dweight = dy.t() @ x if needs_weight else nothing
    sum_rows = backends.TABLES["linear"][backend].backward
    return dx, dweight, sum_rows(dy) if needs_bias else nothing


def _backward_fake(dy, x, weight, bias, dresidual, needs, backend):
    inputs = zip((x, weight, bias), needs, strict=True)
    return tuple(dy.new_empty(t.shape if need else (0,)) for t, need in inputs)


_linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, str backend) -> Tensor", _forward, _fake
)
# Gradients of x (the residual's among them where there is one), weight and bias; empty where
# ``needs`` says that nobody asks.
_linear_backward = operator(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? dresidual, "
    "bool[] needs, str backend) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = _linear_backward(dy, *ctx.saved_tensors, None, needs, ctx.backend)
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), None


differentiable("linear", _gradient, _setup_context)
once_differentiable("linear_backward")


def _layer_forward(x, weight, bias, backend):
    return F.linear(x, weight, bias), None


def _layer_backward(dy, x, weight, bias, saved, dresidual, needs, backend):
    return _linear_backward(dy, x, weight, bias, dresidual, needs, backend)


LAYERS["linear"] = Layer(_layer_forward, _layer_backward)


# Backends: how the bias gradient is summed; the products are the library's in each


def _triton_backward(dy):
    from fastbert.kernels.reduction import sum_rows

    return sum_rows(dy, dy.dtype)


def _reference_backward(dy):
    return dy.sum(dim=0)


backends.TABLES["linear"] = {
    "reference": backends.Implementation(F.linear, _reference_backward, backends.ALL_DTYPES),
    "triton": backends.Implementation(F.linear, _triton_backward),
}
