"""x Wᵀ + b by one GEMM, with a gradient that launches nothing but GEMMs and our sums."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops.arguments import autocast_dtype, require_floating, transformed
from fastbert.ops.product import (
    check_parameters,
    gradient_of_rows,
    gradient_of_weight,
    needs_gradient,
    parameters_for,
    project,
    rows_of,
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
    require_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed: (..., K)")
    cast = autocast_dtype(x)
    check_parameters(x.shape[-1], x, cast, "weight", weight, "bias", bias)
    dtype = x.dtype if cast is None else cast
    request = backends.Request(x.device.type, dtype, transformed=transformed())
    choice = backends.resolve("linear", backend, request)
    if request.transformed:
        return reference.linear(x, weight, bias, return_residual=return_residual)
    weight, bias = parameters_for(choice.backend, dtype, weight, bias)
    differentiated = needs_gradient(x, weight, bias)
    if return_residual and differentiated and x.requires_grad:
        return with_residual("linear", x, dtype, (weight, bias), (choice.backend,))
    product = _linear if differentiated else project
    y = product(rows_of(x, dtype), weight, bias, choice.backend)
    y = y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
    return (y, x) if return_residual else y


# The operator: x (M, K) → y (M, N)


def _fake(x, weight, bias, backend):
    return x.new_empty(x.shape[0], weight.shape[0])


def _backward(dy, x, weight, bias, dresidual, needs, backend):
    needs_x, needs_weight, needs_bias = needs
    dx = gradient_of_rows(dy, weight, dresidual, backend) if needs_x else dy.new_empty(0)
    dweight = gradient_of_weight(dy, x, weight, backend) if needs_weight else dy.new_empty(0)
    sum_rows = backends.TABLES["linear"][backend].backward
    return dx, dweight, sum_rows(dy, bias.dtype) if needs_bias else dy.new_empty(0)


def _backward_fake(dy, x, weight, bias, dresidual, needs, backend):
    inputs = (x if dresidual is None else dresidual, weight, bias)
    return tuple(
        t.new_empty(t.shape) if need else dy.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


_linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, str backend) -> Tensor", project, _fake
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
    return project(x, weight, bias, backend), None


def _layer_backward(dy, x, weight, bias, saved, dresidual, needs, backend):
    return _linear_backward(dy, x, weight, bias, dresidual, needs, backend)


LAYERS["linear"] = Layer(_layer_forward, _layer_backward)


# Backends: how the bias gradient, dy (M, N) → (N,) in the bias's dtype, is summed; the products are
# those of ``product.py``


def _triton_backward(dy, dtype):
    from fastbert.kernels.reduction import sum_rows

    return sum_rows(dy, dtype)


def _reference_backward(dy, dtype):
    return dy.sum(dim=0, dtype=dtype)


backends.TABLES["linear"] = {
    "reference": backends.Implementation(F.linear, _reference_backward, backends.ALL_DTYPES),
    "triton": backends.Implementation(F.linear, _triton_backward),
    "cpu": backends.Implementation(project, _reference_backward),
}
