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
    require_eps,
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
    """Divide ``x + residual`` by its root mean square over the last dimension, in one pass.

    With ``s = x + residual``, the result is ``weight · s / sqrt(mean(s²) + eps)``.

    Args:
        x: Input of shape ``(..., N)``; fp32, fp16, bf16, or fp64 with the backend ``"reference"``.
        weight: Scale of shape ``(N,)``, in any floating dtype.
        residual: Added before the normalization; of the shape of `x`.
        eps: Term that is added to the mean of the squares.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of the shape of `x` in the dtype to which `x` and `residual` promote. Autocast does
        not change this dtype.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. The message names the argument, its value and what is allowed.
        TypeError: If a dtype is not allowed.

    Note:
        Zhang and Sennrich 2019, eq. 4. The mean is computed in at least fp32.
    """
    require_floating("x", x)
    require(x.dim() >= 1 and x.shape[-1] >= 1, "x", f"shape {tuple(x.shape)}", "(..., N), N >= 1")
    columns = x.shape[-1]
    require_eps(eps)
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


# The operator takes x (R, N), whose leading dimensions are flattened to R rows. It returns y (R, N)
# and the reciprocal root mean square of each row, (R,).


def _fake(a: Any) -> tuple[Tensor, ...]:
    rstd = a.x.new_empty(a.x.shape[0], dtype=torch.promote_types(a.x.dtype, torch.float32))
    return a.x.new_empty(a.x.shape), rstd


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    return a.x.new_empty(a.x.shape), a.weight.new_empty(a.weight.shape)


_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, Tensor? residual, float eps, str backend) "
    "-> (Tensor, Tensor)",
    _fake,
    table="rms_norm",
)
# The results are the gradient of the sum x + residual and the gradient of weight. The first is the
# gradient of both x and residual.
_rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual, "
    "str backend) -> (Tensor, Tensor)",
    _backward_fake,
    table="rms_norm",
)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, rstd = output
    ctx.backend = a.backend
    ctx.save_for_backward(a.x, a.weight, rstd, a.residual)
    ctx.mark_non_differentiable(rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> dict[str, Tensor | None]:
    # Activation checkpointing allows the saved tensors to be unpacked only once.
    x, weight, rstd, residual = ctx.saved_tensors
    dsum, dweight = _rms_norm_backward(dy, x, weight, rstd, residual, ctx.backend)
    return {"x": dsum, "weight": dweight, "residual": None if residual is None else dsum}


differentiable("rms_norm", _gradient, _setup_context)
once_differentiable("rms_norm_backward")


# Backends


def _triton_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    from fastbert.kernels.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, residual=residual, eps=eps)


def _triton_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, ...]:
    from fastbert.kernels.rms_norm import rms_norm_backward

    return rms_norm_backward(dy, x, weight, rstd, residual=residual)


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.rms_norm_forward(*arguments)


def _extension_backward(*arguments: Any) -> tuple[Tensor, ...]:
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
