"""The feed-forward and its first half, linear_gelu: public functions, operators, backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import autocast_dtype, require, require_floating, transformed
from fastbert.ops.product import (
    check_parameters,
    gradient_of_rows,
    gradient_of_weight,
    needs_gradient,
    parameters_for,
    project,
    rows_of,
    runs_directly,
)
from fastbert.ops.register import differentiable, once_differentiable, operator
from fastbert.ops.residual import LAYERS, Layer, with_residual
from fastbert.reference import ACTIVATIONS, GATED

# ``approximate`` of linear_gelu → the activation.
APPROXIMATIONS = {ACTIVATIONS[name]: name for name in ("gelu", "gelu_tanh", "relu")}


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    approximate: str = "none",
    backend: str | None = None,
) -> Tensor:
    """gelu(x Wᵀ + b), bias and GELU in one pass (Hendrycks and Gimpel 2016).

    x (..., K), weight (N, K), bias (N,) or None, one floating dtype. approximate: "none" is the
    exact erf form, "tanh" its approximation, "relu" is ReLU. Returns (..., N) in x's dtype
    (autocast's under autocast). Raises ValueError or TypeError naming the argument; ValueError when
    ``backend`` cannot serve.
    """
    activation = APPROXIMATIONS.get(approximate)
    if activation is None:
        raise ValueError(f"approximate: got {approximate}, allowed: {', '.join(APPROXIMATIONS)}")
    cast = _check_first(x, "weight", weight, "bias", bias)
    dtype = x.dtype if cast is None else cast
    request = _request(x, dtype, activation)
    choice = backends.resolve("linear_gelu", backend, request)
    if request.transformed:
        return reference.linear_gelu(x, weight, bias, approximate=approximate)
    weight, bias = parameters_for(choice.backend, dtype, weight, bias)
    save = needs_gradient(x, weight, bias)
    run = _forward if runs_directly(choice.backend, save) else _linear_gelu
    y, _ = run(rows_of(x, dtype), weight, bias, activation, save, choice.backend)
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
    """gelu(x W1ᵀ + b1) W2ᵀ + b2 (Vaswani et al. 2017, eq. 2, with GELU for ReLU).

    x (..., K), w1 (N, K), b1 (N,) or None, w2 (M, N), b2 (M,) or None, one floating dtype;
    activation: "gelu" (exact), "gelu_tanh" or "relu"; or "geglu" or "swiglu" with w1 (2N, K) and b1
    (2N,), GELU or SiLU of the first half of the columns times the second half (Shazeer 2020). For
    the backward pass the pre-activation is kept; with ``recompute`` nothing is but the arguments,
    and the first product is formed once more. Returns (..., M) in x's dtype (autocast's under
    autocast), with return_residual also x, as ``linear`` does. Raises ValueError or TypeError
    naming the argument; ValueError when ``backend`` cannot serve.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, allowed: {', '.join(ACTIVATIONS)}")
    cast = _check_first(x, "w1", w1, "b1", b1)
    inner = w1.shape[0]
    if activation in GATED:
        require(inner % 2 == 0, "w1", f"shape {tuple(w1.shape)}", "an even number of rows")
        inner //= 2
    check_parameters(inner, x, cast, "w2", w2, "b2", b2)
    dtype = x.dtype if cast is None else cast
    request = _request(x, dtype, activation)
    choice = backends.resolve("feed_forward", backend, request)
    if request.transformed:
        return reference.feed_forward(
            x, w1, b1, w2, b2, activation=activation, return_residual=return_residual
        )
    parameters = parameters_for(choice.backend, dtype, w1, b1, w2, b2)
    differentiated = needs_gradient(x, *parameters)
    constants = (activation, differentiated and not recompute, choice.backend)
    if return_residual and differentiated and x.requires_grad:
        return with_residual("feed_forward", x, dtype, parameters, constants)
    direct = runs_directly(choice.backend, differentiated)
    run: Callable[..., Any] = _feed_forward_forward if direct else _feed_forward
    y, _ = run(rows_of(x, dtype), *parameters, *constants)
    y = y if x.dim() == 2 else y.view(*x.shape[:-1], w2.shape[0])
    return (y, x) if return_residual else y


def engine_reason(rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
    """Which engine the Triton backend takes for a product with an activation, and why.

    rows × columns results, each of depth products. ImportError where Triton is missing.
    """
    from fastbert.kernels.tiles import gemm_engine

    engine = gemm_engine(rows, columns, depth, dtype)
    return f"{engine.name}: {engine.reason}"


def _request(x: Tensor, dtype: torch.dtype, activation: str) -> backends.Request:
    return backends.Request(x.device.type, dtype, activation=activation, transformed=transformed())


def _check_first(x, weight_name, weight, bias_name, bias) -> torch.dtype | None:
    """Checks x and the first product's parameters; what autocast computes in."""
    require_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed: (..., K)")
    cast = autocast_dtype(x)
    check_parameters(x.shape[-1], x, cast, weight_name, weight, bias_name, bias)
    return cast


# linear_gelu: x (M, K) → y (M, N) and, to be saved, the pre-activation h as the backend's backward
# wants it: with the bias, or without it in the "cuda" one, which adds it in its own pass. Of every
# backward operator the results that are not needed are empty.


def _forward(x, weight, bias, activation, save, backend):
    return backends.TABLES["linear_gelu"][backend].forward(x, weight, bias, activation, save)


def _fake(x, weight, bias, activation, save, backend):
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


def _backward(dy, x, weight, bias, h, activation, needs, backend):
    table = backends.TABLES["linear_gelu"][backend]
    dh, dbias, _ = table.backward(dy, None, h, bias, activation)
    dx = gradient_of_rows(dh, weight, None, backend) if needs[0] else None
    dweight = gradient_of_weight(dh, x, weight, backend) if needs[1] else None
    return _or_empty(dy, dx, dweight, dbias if needs[2] else None)


def _backward_fake(dy, x, weight, bias, h, activation, needs, backend):
    return _like_needed(dy, needs, x, weight, bias)


def _or_empty(like: Tensor, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if g is None else g for g in gradients)


def _like_needed(like: Tensor, needs: list[bool], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(
        t.new_empty(t.shape) if need and t is not None else like.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _needed(gradients: tuple[Tensor, ...], needs: list[bool]) -> tuple[Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


_linear_gelu = operator(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str activation, bool save, str backend) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
)
_linear_gelu_backward = operator(
    "linear_gelu_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor h, "
    "str activation, bool[] needs, str backend) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.activation, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients = _linear_gelu_backward(dy, *ctx.saved_tensors, ctx.activation, needs, ctx.backend)
    return *_needed(gradients, needs), None, None, None


differentiable("linear_gelu", _gradient, _setup_context)
once_differentiable("linear_gelu_backward")


# feed_forward: y (M, O) and, to be saved, h as above


def _feed_forward_forward(x, w1, b1, w2, b2, activation, save, backend):
    a, h = backends.TABLES["feed_forward"][backend].forward(x, w1, b1, activation, save)
    return project(a, w2, b2, backend), h


def _feed_forward_fake(x, w1, b1, w2, b2, activation, save, backend):
    h = x.new_empty(x.shape[0], w1.shape[0]) if save else x.new_empty(0)
    return x.new_empty(x.shape[0], w2.shape[0]), h


class Gradients(NamedTuple):
    """Of ``feed_forward``'s inputs, None where they are not needed."""

    x: Tensor | None
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None


def feed_forward_gradients(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor | None,
    activation: str,
    needs: list[bool],
    backend: str,
    dresidual: Tensor | None = None,
) -> Gradients:
    """What the operator's backward computes, below autograd.

    dy (M, O) of the result for x (M, K); h (M, N) as the forward saved it, or None to have it
    formed here; needs: which of x, w1, b1, w2, b2 want a gradient. dresidual (M, K), the gradient
    that comes to x on another way, is added to x's in the GEMM that makes it.
    """
    table = backends.TABLES["feed_forward"][backend]
    dx = dw1 = db1 = dw2 = None
    if any(needs[:4]):
        if h is None:
            h = project(x, w1, None if backend == "cuda" else b1, backend)
        dh, db1, a = table.backward(dy, w2, h, b1, activation)
        if needs[0]:
            dx = gradient_of_rows(dh, w1, dresidual, backend)
        dw1 = gradient_of_weight(dh, x, w1, backend) if needs[1] else None
        dw2 = gradient_of_weight(dy, a, w2, backend) if needs[3] else None
    sum_rows = backends.TABLES["linear"][_summing(backend)].backward
    db2 = sum_rows(dy, b2.dtype) if b2 is not None and needs[4] else None
    return Gradients(dx, dw1, db1 if needs[2] else None, dw2, db2)


def _summing(backend: str) -> str:
    """The backend that sums the rows of a second bias's gradient."""
    return backend if backend in backends.TABLES["linear"] else "reference"


def _feed_forward_backward_forward(dy, x, w1, b1, w2, b2, h, dresidual, activation, needs, backend):
    gradients = feed_forward_gradients(
        dy, x, w1, b1, w2, b2, h, activation, needs, backend, dresidual
    )
    return _or_empty(dy, *gradients)


def _feed_forward_backward_fake(dy, x, w1, b1, w2, b2, h, dresidual, activation, needs, backend):
    return _like_needed(dy, needs, x if dresidual is None else dresidual, w1, b1, w2, b2)


_feed_forward = operator(
    "feed_forward(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation, "
    "bool save, str backend) -> (Tensor, Tensor)",
    _feed_forward_forward,
    _feed_forward_fake,
)
_feed_forward_backward = operator(
    "feed_forward_backward(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
    "Tensor? h, Tensor? dresidual, str activation, bool[] needs, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _feed_forward_backward_forward,
    _feed_forward_backward_fake,
)


def _feed_forward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, w1, b1, w2, b2, ctx.activation, save, ctx.backend = inputs
    ctx.save_for_backward(x, w1, b1, w2, b2, output[1] if save else None)
    ctx.mark_non_differentiable(output[1])


def _feed_forward_gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:5]
    gradients = _feed_forward_backward(
        dy, *ctx.saved_tensors, None, ctx.activation, needs, ctx.backend
    )
    return *_needed(gradients, needs), None, None, None


differentiable("feed_forward", _feed_forward_gradient, _feed_forward_setup_context)
once_differentiable("feed_forward_backward")


def _layer_forward(x, w1, b1, w2, b2, activation, save, backend):
    y, h = _feed_forward(x, w1, b1, w2, b2, activation, save, backend)
    return y, h if save else None


def _layer_backward(dy, x, w1, b1, w2, b2, h, dresidual, needs, activation, save, backend):
    return _feed_forward_backward(dy, x, w1, b1, w2, b2, h, dresidual, activation, needs, backend)


LAYERS["feed_forward"] = Layer(_layer_forward, _layer_backward)


# Backends of both. Forward: the first product and its activation. Backward: from dy and the second
# product's weight, None where there is no second product, the gradients of h and of the bias and
# the activation itself, which the gradient of the second weight needs.


def _triton_forward(x, weight, bias, activation, save):
    from fastbert.kernels.feed_forward import linear_gelu_forward

    y, h = linear_gelu_forward(
        x,
        weight,
        bias,
        approximate=ACTIVATIONS[activation],
        gated=activation in GATED,
        save=save,
    )
    return y, x.new_empty(0) if h is None else h


def _triton_backward(dy, w2, h, bias, activation):
    from fastbert.kernels.feed_forward_backward import feed_forward_backward, gelu_backward

    options = {
        "approximate": ACTIVATIONS[activation],
        "gated": activation in GATED,
        "sum_rows": bias is not None,
    }
    if w2 is None:
        return gelu_backward(dy, h, **options)
    return feed_forward_backward(dy, w2, h, **options)


def _extension_forward(x, weight, bias, activation, save):
    h = x @ weight.t()
    y = torch.ops.fastbert_C.bias_gelu_forward(h, bias, ACTIVATIONS[activation])
    return y, h if save else x.new_empty(0)


def _extension_backward(dy, w2, h, bias, activation):
    da, form = dy if w2 is None else dy @ w2, ACTIVATIONS[activation]
    dh, dbias = torch.ops.fastbert_C.bias_gelu_backward(da, h, bias, form)
    a = None if w2 is None else torch.ops.fastbert_C.bias_gelu_forward(h, bias, form)
    return dh, dbias, a


def _cpu_forward(x, weight, bias, activation, save):
    if activation not in GATED:
        return torch.ops.fastbert_C.linear(x, weight, bias, None, activation, save)
    h = project(x, weight, bias, "cpu")
    y = torch.ops.fastbert_C.activation_forward(h, None, activation)
    return y, h if save else x.new_empty(0)


def _cpu_backward(dy, w2, h, bias, activation):
    da = dy if w2 is None else gradient_of_rows(dy, w2, None, "cpu")
    summed, again = bias is not None, w2 is not None
    dh, dbias, a = torch.ops.fastbert_C.activation_backward(da, h, None, activation, summed, again)
    return dh, None if bias is None else dbias.to(bias.dtype), a


def _reference_backward(dy, w2, h, bias, activation):
    da = dy if w2 is None else dy @ w2
    return closed_form.gelu_backward(da, h, bias is not None, activation)


def _refuses_all_but_gelu(request: backends.Request) -> str | None:
    if request.activation in ("gelu", "gelu_tanh"):
        return None
    return f"it has GELU kernels only, none for {request.activation}"


backends.TABLES["linear_gelu"] = backends.TABLES["feed_forward"] = {
    "reference": backends.Implementation(
        closed_form.linear_gelu_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cuda": backends.Implementation(
        _extension_forward, _extension_backward, refuses=_refuses_all_but_gelu
    ),
    "cpu": backends.Implementation(_cpu_forward, _cpu_backward),
}
