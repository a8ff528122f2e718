"""The GELU feed-forward and its first half, linear_gelu: public functions, operators, backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    autocast,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator
from fastbert.reference import ACTIVATIONS

APPROXIMATIONS = ("none", "tanh", "relu")


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
    require(approximate in APPROXIMATIONS, "approximate", approximate, ", ".join(APPROXIMATIONS))
    x, weight, bias = autocast(x, weight, bias)
    _check_linear(x, "x", weight, "weight", bias, "bias")
    choice = _resolve("linear_gelu", x, approximate, backend)
    rows, save = x.reshape(-1, x.shape[-1]), torch.is_grad_enabled()
    y, _ = _linear_gelu(rows, weight, bias, approximate, save, choice.backend)
    return y.view(*x.shape[:-1], weight.shape[0])


def feed_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    backend: str | None = None,
) -> Tensor:
    """gelu(x W1ᵀ + b1) W2ᵀ + b2 (Vaswani et al. 2017, eq. 2, with GELU for ReLU).

    x (..., K), w1 (N, K), b1 (N,) or None, w2 (M, N), b2 (M,) or None, one floating dtype;
    activation: "gelu" (exact), "gelu_tanh" or "relu". Returns (..., M) in x's dtype (autocast's
    under autocast). Raises ValueError or TypeError naming the argument; ValueError when ``backend``
    cannot serve.
    """
    require(activation in ACTIVATIONS, "activation", repr(activation), ", ".join(ACTIVATIONS))
    approximate = ACTIVATIONS[activation]
    x, w1, b1, w2, b2 = autocast(x, w1, b1, w2, b2)
    _check_linear(x, "x", w1, "w1", b1, "b1")
    require_floating("w2", w2)
    require(w2.dim() == 2, "w2", f"shape {tuple(w2.shape)}", f"shape (M, {w1.shape[0]})")
    require_shape("w2", w2, (w2.shape[0], w1.shape[0]))
    if b2 is not None:
        require_shape("b2", b2, (w2.shape[0],))
    require_same_device("x", x.device, w2=w2, b2=b2)
    choice = _resolve("feed_forward", x, approximate, backend)
    rows, save = x.reshape(-1, x.shape[-1]), torch.is_grad_enabled()
    y, _, _ = _feed_forward(rows, w1, b1, w2, b2, approximate, save, choice.backend)
    return y.view(*x.shape[:-1], w2.shape[0])


def _resolve(op: str, x: Tensor, approximate: str, backend: str | None) -> backends.Choice:
    request = backends.Request(x.device.type, x.dtype, activation=approximate)
    return backends.resolve(op, backend, request)


def _check_linear(x, x_name, weight, weight_name, bias, bias_name):
    require_floating(x_name, x)
    require(x.dim() >= 1, x_name, f"shape {tuple(x.shape)}", "(..., K)")
    shape = f"shape {tuple(weight.shape)}"
    require(weight.dim() == 2, weight_name, shape, f"shape (N, {x.shape[-1]})")
    require_shape(weight_name, weight, (weight.shape[0], x.shape[-1]))
    require(weight.dtype == x.dtype, weight_name, weight.dtype, f"{x.dtype}, as {x_name}")
    require_same_device(x_name, x.device, **{weight_name: weight, bias_name: bias})
    if bias is not None:
        require_floating(bias_name, bias)
        require_shape(bias_name, bias, (weight.shape[0],))


# linear_gelu: x (M, K) → y (M, N) and, to be saved, h = x Wᵀ without the bias


def _table(backend: str) -> backends.Implementation:
    return backends.TABLES["linear_gelu"][backend]


def _forward(x, weight, bias, approximate, save, backend):
    return _table(backend).forward(x, weight, bias, approximate, save)


def _fake(x, weight, bias, approximate, save, backend):
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


def _gelu_backward_forward(dy, h, bias, approximate, backend):
    return _table(backend).backward(dy, h, bias, approximate)


def _gelu_backward_fake(dy, h, bias, approximate, backend):
    return h.new_empty(h.shape), h.new_empty(0) if bias is None else bias.new_empty(bias.shape)


_linear_gelu = operator(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate, bool save, str backend) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
)
# Gradients of h and bias of gelu(h + bias); the second is empty without a bias.
_gelu_backward = operator(
    "gelu_backward(Tensor dy, Tensor h, Tensor? bias, str approximate, str backend) "
    "-> (Tensor, Tensor)",
    _gelu_backward_forward,
    _gelu_backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.approximate, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _first_layer_gradients(ctx, da, x, weight, bias, h, needs_x, needs_weight):
    """Gradients of x, weight and bias from that of gelu(x Wᵀ + b)."""
    dh, dbias = _gelu_backward(da, h, bias, ctx.approximate, ctx.backend)
    dx = dh @ weight if needs_x else None
    dweight = dh.t() @ x if needs_weight else None
    return dx, dweight, None if bias is None else dbias


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, h = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return *_first_layer_gradients(ctx, dy, x, weight, bias, h, *needs[:2]), None, None, None


differentiable("linear_gelu", _gradient, _setup_context)
once_differentiable("gelu_backward")


# feed_forward: y (M, O) and, to be saved, a = gelu(h + b1) and h


def _feed_forward_forward(x, w1, b1, w2, b2, approximate, save, backend):
    a, h = _table(backend).forward(x, w1, b1, approximate, save)
    return F.linear(a, w2, b2), a if save else x.new_empty(0), h


def _feed_forward_fake(x, w1, b1, w2, b2, approximate, save, backend):
    a, h = _fake(x, w1, b1, approximate, save, backend)
    return x.new_empty(x.shape[0], w2.shape[0]), a if save else x.new_empty(0), h


_feed_forward = operator(
    "feed_forward(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str approximate, "
    "bool save, str backend) -> (Tensor, Tensor, Tensor)",
    _feed_forward_forward,
    _feed_forward_fake,
)


def _feed_forward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, w1, b1, w2, b2, ctx.approximate, _, ctx.backend = inputs
    ctx.has_b2 = b2 is not None
    ctx.save_for_backward(x, w1, b1, w2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _feed_forward_gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w1, b1, w2, a, h = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dw2 = dy.t() @ a if needs[3] else None
    db2 = dy.sum(dim=0) if ctx.has_b2 and needs[4] else None
    first = _first_layer_gradients(ctx, dy @ w2, x, w1, b1, h, *needs[:2])
    return *first, dw2, db2, None, None, None


differentiable("feed_forward", _feed_forward_gradient, _feed_forward_setup_context)


# Backends; those of feed_forward are the same, its second product is a library GEMM in each


def _triton_forward(x, weight, bias, approximate, save):
    from fastbert.kernels.feed_forward import linear_gelu_forward

    y, h = linear_gelu_forward(x, weight, bias, approximate=approximate, save=save)
    return y, x.new_empty(0) if h is None else h


def _triton_backward(dy, h, bias, approximate):
    from fastbert.kernels.feed_forward import gelu_backward

    dh, dbias = gelu_backward(dy, h, bias, approximate=approximate)
    return dh, h.new_empty(0) if dbias is None else dbias


def _extension_forward(x, weight, bias, approximate, save):
    h = x @ weight.t()
    y = torch.ops.fastbert_C.bias_gelu_forward(h, bias, approximate)
    return y, h if save else x.new_empty(0)


def _extension_backward(dy, h, bias, approximate):
    return torch.ops.fastbert_C.bias_gelu_backward(dy, h, bias, approximate)


def _refuses_relu(request: backends.Request) -> str | None:
    return "it has GELU kernels only, not ReLU" if request.activation == "relu" else None


backends.TABLES["linear_gelu"] = backends.TABLES["feed_forward"] = {
    "reference": backends.Implementation(
        closed_form.linear_gelu_forward, closed_form.gelu_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward, refuses=_refuses_relu),
    "cuda": backends.Implementation(_extension_forward, _extension_backward, refuses=_refuses_relu),
    "cpu": backends.Implementation(_extension_forward, _extension_backward, refuses=_refuses_relu),
}
