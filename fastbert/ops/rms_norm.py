"""RMS norm of a residual sum: public function, operator, gradient, backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    flatten_rows,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import differentiable, once_differentiable, operator


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """weight · s / sqrt(mean(s²) + eps), s = x + residual, over the last dimension (Zhang and
    Sennrich 2019, eq. 4), in one pass.

    x (..., N), residual of the same shape; weight (N,) in any floating dtype. The mean is fp32. The
    result has x's shape and the dtype x and residual promote to, under autocast as well.

    Raises ValueError or TypeError naming the argument; ValueError when ``backend`` cannot serve.
    """
    require_floating("x", x)
    require(x.dim() >= 1 and x.shape[-1] >= 1, "x", f"shape {tuple(x.shape)}", "(..., N), N >= 1")
    columns = x.shape[-1]
    require_floating("weight", weight)
    require_shape("weight", weight, (columns,))
    require_same_device("x", x.device, weight=weight, residual=residual)
    shape = x.shape
    if residual is not None:
        require_floating("residual", residual)
        require_shape("residual", residual, tuple(shape))
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), flatten_rows(residual.to(dtype))
    request = backends.Request(x.device.type, x.dtype, columns=columns)
    choice = backends.resolve("rms_norm", backend, request)
    y, _ = _rms_norm(flatten_rows(x), weight, residual, eps, choice.backend)
    return y.view(shape)


# The operator. Rows are flattened: x (R, N); rstd (R,).


def _forward(x, weight, residual, eps, backend):
    return backends.TABLES["rms_norm"][backend].forward(x, weight, residual, eps)


def _fake(x, weight, residual, eps, backend):
    rstd = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), rstd


def _backward(dy, x, weight, rstd, residual, backend):
    return backends.TABLES["rms_norm"][backend].backward(dy, x, weight, rstd, residual)


def _backward_fake(dy, x, weight, rstd, residual, backend):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, Tensor? residual, float eps, str backend) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
)
# Returns the gradients of the sum (hence of x and of residual) and of weight.
_rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual, "
    "str backend) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, residual, _, ctx.backend = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd, residual)
    ctx.mark_non_differentiable(rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    # Unpacked once: activation checkpointing allows no second look.
    saved = ctx.saved_tensors
    dsum, dweight = _rms_norm_backward(dy, *saved, ctx.backend)
    return dsum, dweight, None if saved[3] is None else dsum, None, None


differentiable("rms_norm", _gradient, _setup_context)
once_differentiable("rms_norm_backward")


# Backends


def _triton_forward(x, weight, residual, eps):
    from fastbert.kernels.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, residual=residual, eps=eps)


def _triton_backward(dy, x, weight, rstd, residual):
    from fastbert.kernels.rms_norm import rms_norm_backward

    return rms_norm_backward(dy, x, weight, rstd, residual=residual)


def _extension_forward(*arguments):
    return torch.ops.fastbert_C.rms_norm_forward(*arguments)


def _extension_backward(*arguments):
    return torch.ops.fastbert_C.rms_norm_backward(*arguments)


backends.TABLES["rms_norm"] = {
    "reference": backends.Implementation(
        closed_form.rms_norm_forward, closed_form.rms_norm_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(
        _triton_forward, _triton_backward, refuses=backends.refuse_wide_rows
    ),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
