"""A linear layer, x Wᵀ + b: public function, operator, gradient, backends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops.arguments import autocast_dtype, require, require_floating, transformed
from fastbert.ops.product import (
    PRODUCTS,
    Products,
    check_parameters,
    needs_gradient,
    parameters_for,
    rows_of,
)
from fastbert.ops.register import (
    differentiable,
    empty_like_needed,
    once_differentiable,
    operator,
    or_empty,
)
from fastbert.ops.residual import LAYERS, Layer, with_residual


def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``x Wᵀ + b`` with the bias in the epilogue of the matrix product.

    Args:
        x: Input of shape ``(..., K)``.
        weight: Weight of shape ``(N, K)`` in the dtype of `x`, or under autocast in fp32, fp16 or
            bf16. A sequence of weights of shapes ``(N_i, K)`` acts as their concatenation along the
            rows. Outside torch.compile, the CPU backend reads the weights without concatenating
            them if no gradient is wanted or if `x` requires a gradient.
        bias: Bias of shape ``(N,)`` in a dtype that is allowed for `weight`, or None. For a
            sequence of weights, `bias` is a sequence of equal length, or None.
        return_residual: Whether `x` is returned too, for a residual connection around the layer.
            The gradient that reaches `x` through the residual connection is then added inside the
            product that computes the other part of the gradient of `x`, which saves a separate
            addition.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(..., N)`` in the dtype of `x`, or in autocast's dtype under autocast.
        With `return_residual`, also `x`. The gradient of `bias` is summed in a fixed order.

    Raises:
        ValueError: If a shape, a device or the dtype of a parameter is not allowed, or if `backend`
            cannot serve the call. The message names the argument, its value and what is allowed.
        TypeError: If the dtype of `x` is not floating.
    """
    require_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed: (..., K)")
    weights, biases = _parts(weight, bias)
    cast = autocast_dtype(x)
    for w, b in zip(weights, biases, strict=True):
        check_parameters(x.shape[-1], x, cast, "weight", w, "bias", b)
    dtype = x.dtype if cast is None else cast
    request = backends.Request(x.device.type, dtype, transformed=transformed())
    choice = backends.resolve("linear", backend, request)
    differentiated = needs_gradient(x, *weights, *biases)
    if len(weights) > 1:
        if not (differentiated or request.transformed or torch.compiler.is_compiling()):
            parameters = parameters_for(choice.backend, dtype, *weights, *biases)
            y = PRODUCTS[choice.backend].project_parts(
                rows_of(x, dtype), parameters[: len(weights)], parameters[len(weights) :]
            )
            y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
            return (y, x) if return_residual else y
        if _reads_parts(choice.backend, x, request.transformed):
            parameters = parameters_for(choice.backend, dtype, *weights, *biases)
            result = with_residual("linear_of_parts", x, dtype, parameters, (choice.backend,))
            return result if return_residual else result[0]
        weights, biases = (
            [torch.cat(weights)],
            [None if biases[0] is None else torch.cat(biases)],
        )
    if request.transformed or x.shape[-1] == 0:
        # Transforms of torch.func and forward-mode AD need plain PyTorch. A product with K = 0
        # needs no kernel.
        return reference.linear(x, weights[0], biases[0], return_residual=return_residual)
    given = parameters_for(choice.backend, dtype, weights[0], biases[0])
    if return_residual and differentiated and x.requires_grad:
        return with_residual("linear", x, dtype, given, (choice.backend,))
    rows = rows_of(x, dtype)
    if differentiated:
        y = _linear(rows, *given, choice.backend)
    else:
        y = PRODUCTS[choice.backend].project(rows, *given)
    y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
    return (y, x) if return_residual else y


def _reads_parts(backend: str, x: Tensor, transformed: bool) -> bool:
    """Return whether a layer whose gradient is wanted reads several weights without torch.cat."""
    eager = not (transformed or torch.compiler.is_compiling())
    return eager and backend == "cpu" and x.requires_grad and torch.is_grad_enabled()


def _parts(weight: Any, bias: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the weights and the biases as lists of equal length; a bias may be None."""
    if isinstance(weight, Tensor):
        return [weight], [bias]
    weights = list(weight)
    biases = [None] * len(weights) if bias is None else list(bias)
    allowed = "as many tensors as weights, at least 1, or no bias"
    fits = len(weights) == len(biases) > 0 and (bias is None or None not in biases)
    require(fits, "weight, bias", f"{len(weights)} and {len(biases)} tensors", allowed)
    return weights, biases


# The operator maps x (M, K) to y (M, N).


def _fake(a: Any) -> Tensor:
    return a.x.new_empty(a.x.shape[0], a.weight.shape[0])


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    dx_like = a.x if a.dresidual is None else a.dresidual
    return empty_like_needed(a.dy, a.needs, dx_like, a.weight, a.bias)


_linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, str backend) -> Tensor", _fake, table="linear"
)
# The results are the gradients of x, weight and bias. dresidual, the gradient that reaches x
# through a residual connection, is added to the gradient of x. A gradient is empty if ``needs`` is
# False for it.
_linear_backward = operator(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? dresidual, "
    "bool[] needs, str backend) -> (Tensor, Tensor, Tensor)",
    _backward_fake,
    table="linear",
)


def _setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.backend = a.backend
    ctx.save_for_backward(a.x, a.weight, a.bias)


def _gradient(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    x, weight, bias = ctx.saved_tensors
    needs = [ctx.needs.x, ctx.needs.weight, ctx.needs.bias]
    dx, dweight, dbias = _linear_backward(dy, x, weight, bias, None, needs, ctx.backend)
    return {"x": dx, "weight": dweight, "bias": dbias}


differentiable("linear", _gradient, _setup_context)
once_differentiable("linear_backward")


def _layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, backend: str
) -> tuple[Tensor, None]:
    return PRODUCTS[backend].project(x, weight, bias), None


def _layer_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: None,
    dresidual: Tensor | None,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    return _linear_backward(dy, x, weight, bias, dresidual, needs, backend)


LAYERS["linear"] = Layer(_layer_forward, _layer_backward)


def _parts_forward(rows: Tensor, *rest: Any) -> tuple[Tensor, None]:
    *parameters, backend = rest
    count = len(parameters) // 2
    return PRODUCTS[backend].project_parts(rows, parameters[:count], parameters[count:]), None


def _parts_backward(dy: Tensor, rows: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *parameters, _, dresidual, needs, backend = rest
    products, count = PRODUCTS[backend], len(parameters) // 2
    weights, biases = parameters[:count], parameters[count:]
    parts = dy.split([weight.shape[0] for weight in weights], dim=1)
    dx = None
    if needs[0]:
        dtype = dy.dtype if dresidual is None else dresidual.dtype
        # The products of all parts are summed in fp32, so that the sum is rounded once.
        dx = rows.new_zeros(rows.shape, dtype=torch.float32) if dresidual is None else dresidual
        dx = dx.float()
        for part, weight in zip(parts, weights, strict=True):
            dx = products.gradient_of_rows(part, weight, dx)
        dx = dx.to(dtype)
    of_weights = [
        products.gradient_of_weight(part, rows, weight) if need else None
        for part, weight, need in zip(parts, weights, needs[1 : count + 1], strict=True)
    ]
    of_biases = [
        products.sum_rows(part, bias.dtype) if need and bias is not None else None
        for part, bias, need in zip(parts, biases, needs[count + 1 :], strict=True)
    ]
    return dx, *of_weights, *of_biases


LAYERS["linear_of_parts"] = Layer(_parts_forward, _parts_backward)


# Backends


def _backward(
    products: Products,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dresidual: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    needs_x, needs_weight, needs_bias = needs
    return or_empty(
        dy,
        products.gradient_of_rows(dy, weight, dresidual) if needs_x else None,
        products.gradient_of_weight(dy, x, weight) if needs_weight else None,
        products.sum_rows(dy, bias.dtype) if needs_bias and bias is not None else None,
    )


def _row(backend: str, **options: Any) -> backends.Implementation:
    products = PRODUCTS[backend]
    return backends.Implementation(
        products.project, functools.partial(_backward, products), **options
    )


backends.TABLES["linear"] = {
    "reference": _row("reference", dtypes=backends.ALL_DTYPES),
    "triton": _row("triton"),
    "cpu": _row("cpu"),
}
