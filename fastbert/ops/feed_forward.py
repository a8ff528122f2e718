"""The feed-forward and its first product, linear_gelu: functions, operators and backends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.activations import ACTIVATIONS, APPROXIMATIONS, of_name
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import autocast_dtype, require, require_floating, transformed
from fastbert.ops.fused_products import library_reason
from fastbert.ops.gpu_times import rows_class
from fastbert.ops.product import (
    PRODUCTS,
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


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    approximate: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Compute ``gelu(x Wᵀ + b)``, if possible with bias and GELU in the epilogue of the product.

    Args:
        x: Input of shape ``(..., K)``.
        weight: Weight of shape ``(N, K)`` in the dtype of `x`, or under autocast in fp32, fp16 or
            bf16.
        bias: Bias of shape ``(N,)``, or None.
        approximate: ``"none"`` for GELU by the error function, ``"tanh"`` for its approximation by
            the hyperbolic tangent, ``"relu"`` for ReLU, ``"silu"`` for SiLU.
        backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(..., N)`` in the dtype of `x`, or in autocast's dtype under autocast.

    Raises:
        ValueError: If a shape, a device, a value or the dtype of a parameter is not allowed, or if
            `backend` cannot serve the call. The message names the argument, its value and what is
            allowed.
        TypeError: If the dtype of `x` is not floating.

    Note:
        Hendrycks and Gimpel 2016.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate: got {approximate!r}, allowed: {', '.join(APPROXIMATIONS)}")
    activation = APPROXIMATIONS[approximate]
    cast = _check_first(x, "weight", weight, "bias", bias)
    dtype = x.dtype if cast is None else cast
    request = _request(x, dtype, activation, weight, bias)
    choice = backends.resolve("linear_gelu", backend, request)
    if request.transformed or x.shape[-1] == 0:
        # Transforms of torch.func and forward-mode AD need plain PyTorch. A product with K = 0
        # needs no kernel.
        return reference.linear_gelu(x, weight, bias, approximate=approximate)
    weight, bias = parameters_for(choice.backend, dtype, weight, bias)
    save = needs_gradient(x, weight, bias)
    rows = rows_of(x, dtype)
    y, _ = _linear_gelu(rows, weight, bias, activation, save, choice.backend)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the feed-forward of a layer, ``activation(x W1ᵀ + b1) W2ᵀ + b2``.

    Args:
        x: Input of shape ``(..., K)``.
        w1: First weight of shape ``(N, K)`` in the dtype of `x`, or under autocast in fp32, fp16 or
            bf16. For a gated activation, the shape is ``(2 N, K)``, and the first N rows compute
            the gate.
        b1: First bias of shape ``(N,)``, or ``(2 N,)`` for a gated activation; or None.
        w2: Second weight of shape ``(M, N)``.
        b2: Second bias of shape ``(M,)``, or None.
        activation: ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``; or a gated
            activation, ``"geglu"``, ``"geglu_tanh"`` or ``"swiglu"``, which multiplies the GELU or
            SiLU of the first half of the columns by the second half.
        recompute: Whether the backward computes the first product again. The forward then does not
            keep the pre-activation, which saves memory.
        return_residual: As in `linear`.
        backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(..., M)`` in the dtype of `x`, or in autocast's dtype under autocast.
        With `return_residual`, also `x`.

    Raises:
        ValueError: If a shape, a device, a value or the dtype of a parameter is not allowed, or if
            `backend` cannot serve the call. The message names the argument, its value and what is
            allowed.
        TypeError: If the dtype of `x` is not floating.

    Note:
        Vaswani et al. 2017, eq. 2, with GELU instead of ReLU; Shazeer 2020 for the gated
        activations.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> x = torch.randn(8, 64)
        >>> w1, b1 = torch.randn(256, 64), torch.zeros(256)
        >>> w2, b2 = torch.randn(64, 256), torch.zeros(64)
        >>> ops.feed_forward(x, w1, b1, w2, b2).shape
        torch.Size([8, 64])
    """
    gated = of_name(activation).gated
    cast = _check_first(x, "w1", w1, "b1", b1)
    inner = w1.shape[0]
    if gated:
        require(inner % 2 == 0, "w1", f"shape {tuple(w1.shape)}", "an even number of rows")
        inner //= 2
    check_parameters(inner, x, cast, "w2", w2, "b2", b2)
    dtype = x.dtype if cast is None else cast
    request = _request(x, dtype, activation, w1, b1, w2, b2)
    choice = backends.resolve("feed_forward", backend, request)
    if request.transformed or x.shape[-1] == 0:
        # Transforms of torch.func and forward-mode AD need plain PyTorch. A product with K = 0
        # needs no kernel.
        return reference.feed_forward(
            x, w1, b1, w2, b2, activation=activation, return_residual=return_residual
        )
    parameters = parameters_for(choice.backend, dtype, w1, b1, w2, b2)
    differentiated = needs_gradient(x, *parameters)
    constants = (activation, differentiated and not recompute, choice.backend)
    if return_residual and differentiated and x.requires_grad:
        return with_residual("feed_forward", x, dtype, parameters, constants)
    y, _ = _feed_forward(rows_of(x, dtype), *parameters, *constants)
    y = y if x.dim() == 2 else y.view(*x.shape[:-1], w2.shape[0])
    return (y, x) if return_residual else y


def _request(
    x: Tensor, dtype: torch.dtype, activation: str, *parameters: Tensor | None
) -> backends.Request:
    device, request = x.device.type, backends.Request
    if device != "cuda":
        return request(device, dtype, activation=activation, transformed=transformed())
    return request(
        device, dtype, activation=activation, transformed=transformed(), columns=x.shape[-1],
        rows=rows_class(math.prod(x.shape[:-1])), trained=needs_gradient(x, *parameters),
    )  # fmt: skip


def _check_first(
    x: Tensor, weight_name: str, weight: Tensor, bias_name: str, bias: Tensor | None
) -> torch.dtype | None:
    """Check x and the parameters of the first product; return the dtype of autocast, or None."""
    require_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed: (..., K)")
    cast = autocast_dtype(x)
    check_parameters(x.shape[-1], x, cast, weight_name, weight, bias_name, bias)
    return cast


# The operator of linear_gelu maps x (M, K) to y (M, N) and to the pre-activation h, which includes
# the bias. h is empty if `save` is False.


def _fake(a: Any) -> tuple[Tensor, Tensor]:
    y = a.x.new_empty(a.x.shape[0], a.weight.shape[0])
    return y, torch.empty_like(y) if a.save else a.x.new_empty(0)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor,
    activation: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    products, row = PRODUCTS[backend], backends.TABLES["linear_gelu"][backend]
    dh, dbias, _ = row.backward(dy, None, h, bias, activation)
    return or_empty(
        dy,
        products.gradient_of_rows(dh, weight, None) if needs[0] else None,
        products.gradient_of_weight(dh, x, weight) if needs[1] else None,
        dbias if needs[2] else None,
    )


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    return empty_like_needed(a.dy, a.needs, a.x, a.weight, a.bias)


_linear_gelu = operator(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str activation, bool save, str backend) "
    "-> (Tensor, Tensor)",
    _fake,
    table="linear_gelu",
)
_linear_gelu_backward = operator(
    "linear_gelu_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor h, "
    "str activation, bool[] needs, str backend) -> (Tensor, Tensor, Tensor)",
    _backward_fake,
    forward=_backward,
)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, Tensor]) -> None:
    _, h = output
    ctx.activation, ctx.backend = a.activation, a.backend
    ctx.save_for_backward(a.x, a.weight, a.bias, h)
    ctx.mark_non_differentiable(h)


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> dict[str, Tensor]:
    x, weight, bias, h = ctx.saved_tensors
    needs = [ctx.needs.x, ctx.needs.weight, ctx.needs.bias]
    dx, dweight, dbias = _linear_gelu_backward(
        dy, x, weight, bias, h, ctx.activation, needs, ctx.backend
    )
    return {"x": dx, "weight": dweight, "bias": dbias}


differentiable("linear_gelu", _gradient, _setup_context)
once_differentiable("linear_gelu_backward")


# The operator of feed_forward maps x (M, K) to y (M, O) and to the pre-activation h of the first
# product, which is empty if `save` is False.


def _feed_forward_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    a, h = backends.TABLES["feed_forward"][backend].forward(x, w1, b1, activation, save)
    return PRODUCTS[backend].project(a, w2, b2), h


def _feed_forward_fake(a: Any) -> tuple[Tensor, Tensor]:
    rows = a.x.shape[0]
    h = a.x.new_empty(rows, a.w1.shape[0]) if a.save else a.x.new_empty(0)
    return a.x.new_empty(rows, a.w2.shape[0]), h


def _feed_forward_backward_forward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor | None,
    dresidual: Tensor | None,
    activation: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    """Compute the gradients of x, w1, b1, w2 and b2.

    h is the pre-activation that the forward saved, (M, N), or (M, 2 N) for a gated activation. If h
    is None, it is computed here. dresidual (M, K) is the gradient that reaches x through the
    residual connection, or None. It is added in the GEMM that computes the gradient of x.
    """
    products, row = PRODUCTS[backend], backends.TABLES["feed_forward"][backend]
    dx = dw1 = db1 = dw2 = db2 = None
    if any(needs[:4]):
        if h is None:
            h = products.project(x, w1, b1)
        dh, db1, a = row.backward(dy, w2, h, b1, activation)
        dx = products.gradient_of_rows(dh, w1, dresidual) if needs[0] else None
        dw1 = products.gradient_of_weight(dh, x, w1) if needs[1] else None
        dw2 = products.gradient_of_weight(dy, a, w2) if needs[3] else None
    if b2 is not None and needs[4]:
        db2 = products.sum_rows(dy, b2.dtype)
    return or_empty(dy, dx, dw1, db1 if needs[2] else None, dw2, db2)


def _feed_forward_backward_fake(a: Any) -> tuple[Tensor, ...]:
    dx_like = a.x if a.dresidual is None else a.dresidual
    return empty_like_needed(a.dy, a.needs, dx_like, a.w1, a.b1, a.w2, a.b2)


_feed_forward = operator(
    "feed_forward(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation, "
    "bool save, str backend) -> (Tensor, Tensor)",
    _feed_forward_fake,
    forward=_feed_forward_forward,
)
_feed_forward_backward = operator(
    "feed_forward_backward(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
    "Tensor? h, Tensor? dresidual, str activation, bool[] needs, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _feed_forward_backward_fake,
    forward=_feed_forward_backward_forward,
)


def _feed_forward_setup_context(ctx: Any, a: Any, output: tuple[Any, ...]) -> None:
    _, h = output
    ctx.activation, ctx.backend = a.activation, a.backend
    ctx.save_for_backward(a.x, a.w1, a.b1, a.w2, a.b2, h if a.save else None)
    ctx.mark_non_differentiable(h)


def _feed_forward_gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> dict[str, Tensor]:
    x, w1, b1, w2, b2, h = ctx.saved_tensors
    names = ("x", "w1", "b1", "w2", "b2")
    needs = [getattr(ctx.needs, name) for name in names]
    gradients = _feed_forward_backward(
        dy, x, w1, b1, w2, b2, h, None, ctx.activation, needs, ctx.backend
    )
    return dict(zip(names, gradients, strict=True))


differentiable("feed_forward", _feed_forward_gradient, _feed_forward_setup_context)
once_differentiable("feed_forward_backward")


def _layer_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    y, h = _feed_forward(x, w1, b1, w2, b2, activation, save, backend)
    return y, h if save else None


def _layer_backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor | None,
    dresidual: Tensor | None,
    needs: list[bool],
    activation: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    return _feed_forward_backward(dy, x, w1, b1, w2, b2, h, dresidual, activation, needs, backend)


LAYERS["feed_forward"] = Layer(_layer_forward, _layer_backward)


# The functions below are the backends of linear_gelu and of feed_forward. A forward computes the
# first product and its activation. A backward takes dy and the weight of the second product, which
# is None for linear_gelu. It returns the gradients of h and of the bias, and a = activation(h),
# from which feed_forward computes the gradient of the second weight.


def _triton_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    from fastbert.kernels.feed_forward import linear_gelu_forward

    y, h = linear_gelu_forward(x, weight, bias, activation=activation, save=save)
    return y, x.new_empty(0) if h is None else h


def _triton_backward(
    dy: Tensor, w2: Tensor | None, h: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from fastbert.kernels.feed_forward_backward import activation_backward, feed_forward_backward

    summed = bias is not None
    if w2 is None:
        return activation_backward(dy, h, activation=activation, sum_rows=summed)
    return feed_forward_backward(dy, w2, h, activation=activation, sum_rows=summed)


def _cuda_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    if library_reason(x, weight, bias) is None:
        return torch.ops.fastbert_C.linear_gelu_forward(x, weight, bias, activation, save)
    h = PRODUCTS["cuda"].project(x, weight, bias)
    y = torch.ops.fastbert_C.activation_forward(h, None, activation)
    return y, h if save else x.new_empty(0)


def _cuda_backward(
    dy: Tensor, w2: Tensor | None, h: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    summed, again = bias is not None, w2 is not None
    if w2 is not None and library_reason(dy, w2, None) is None:
        return torch.ops.fastbert_C.linear_gelu_gradient(dy, w2, h, activation, summed)
    da = dy if w2 is None else dy @ w2
    dh, dbias, a = torch.ops.fastbert_C.activation_backward(da, h, None, activation, summed, again)
    return dh, None if bias is None else dbias.to(bias.dtype), a


def _cpu_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    if not ACTIVATIONS[activation].gated:
        return torch.ops.fastbert_C.linear(x, weight, bias, None, activation, save)
    h = PRODUCTS["cpu"].project(x, weight, bias)
    y = torch.ops.fastbert_C.activation_forward(h, None, activation)
    return y, h if save else x.new_empty(0)


def _cpu_backward(
    dy: Tensor, w2: Tensor | None, h: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    da = dy if w2 is None else PRODUCTS["cpu"].gradient_of_rows(dy, w2, None)
    summed, again = bias is not None, w2 is not None
    dh, dbias, a = torch.ops.fastbert_C.activation_backward(da, h, None, activation, summed, again)
    return dh, None if bias is None else dbias.to(bias.dtype), a


def _reference_backward(
    dy: Tensor, w2: Tensor | None, h: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    da = dy if w2 is None else dy @ w2
    return closed_form.activation_backward(da, h, bias is not None, activation)


def _refuses_all_but_gelu(request: backends.Request) -> str | None:
    if request.activation in ("gelu", "gelu_tanh"):
        return None
    return f"it has GELU kernels only, none for {request.activation}"


backends.TABLES["linear_gelu"] = backends.TABLES["feed_forward"] = {
    "reference": backends.Implementation(
        closed_form.linear_gelu_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cuda": backends.Implementation(_cuda_forward, _cuda_backward, refuses=_refuses_all_but_gelu),
    "cpu": backends.Implementation(_cpu_forward, _cpu_backward),
}
