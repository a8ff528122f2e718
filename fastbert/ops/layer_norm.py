"""Layer norm of a residual sum: public function, operator, gradient, backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    dropout_seed as draw_seed,
)
from fastbert.ops.arguments import (
    flatten_rows,
    require,
    require_eps,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.product import needs_gradient
from fastbert.ops.register import differentiable, once_differentiable, operator


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Normalize ``residual + dropout(x + x_bias)`` over the last dimension, in one pass.

    Args:
        x: Input of shape ``(..., N)``; fp32, fp16, bf16, or fp64 with the backend ``"reference"``.
        weight: Scale of shape ``(N,)``, in any floating dtype.
        bias: Shift of shape ``(N,)``, in any floating dtype, or None.
        residual: Added before the normalization; of the shape of `x`.
        x_bias: Added to `x` before the dropout; of shape ``(N,)``.
        dropout_p: Probability with which an element of ``x + x_bias`` is dropped.
        eps: Term that is added to the variance.
        backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.
        dropout_seed: Seed of the dropout mask, int64 of shape ``(1,)``; None draws a seed from
            torch's generator of the device. The same seed gives the same mask on every backend.

    Returns:
        Tensor of the shape of `x` in the dtype to which `x` and `residual` promote. Autocast does
        not change this dtype, so that a residual stream in fp32 stays in fp32.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. The message names the argument, its value and what is allowed.
        TypeError: If a dtype is not allowed.

    Note:
        Ba et al. 2016. Mean and variance are computed in at least fp32. The variance is computed
        from the differences between the elements and the mean.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> x, residual = torch.randn(2, 3, 768), torch.randn(2, 3, 768)
        >>> ops.layer_norm(x, torch.ones(768), torch.zeros(768), residual=residual).shape
        torch.Size([2, 3, 768])
    """
    if not _fits(x, weight, bias, residual, x_bias):
        _explain(x, weight, bias, residual, x_bias)
    require_eps(eps)
    shape = x.shape
    if residual is not None:
        if residual.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
        residual = flatten_rows(residual)
    seed = draw_seed(dropout_p, dropout_seed, x.device)
    device = x.device.type
    trained = device == "cuda" and needs_gradient(x, weight, residual)
    request = backends.Request(device, x.dtype, columns=shape[-1], trained=trained)
    choice = backends.resolve("layer_norm", backend, request)
    y, _, _ = _layer_norm(
        flatten_rows(x), weight, bias, residual, x_bias, seed, dropout_p, eps, choice.backend
    )
    return y if len(shape) == 2 else y.view(shape)


def _fits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x_bias: Tensor | None,
) -> bool:
    """Tell whether the shapes, devices and dtypes are allowed, without building error messages."""
    if not x.dtype.is_floating_point or x.dim() == 0:
        return False
    shape, device = x.shape, x.device
    columns = shape[-1:]
    for parameter in (weight, bias, x_bias):
        if parameter is not None and not (
            parameter.shape == columns
            and parameter.device == device
            and parameter.dtype.is_floating_point
        ):
            return False
    if residual is not None and not (
        residual.shape == shape and residual.device == device and residual.dtype.is_floating_point
    ):
        return False
    return columns[0] >= 1


def _explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x_bias: Tensor | None,
) -> None:
    require_floating("x", x)
    require(x.dim() >= 1 and x.shape[-1] >= 1, "x", f"shape {tuple(x.shape)}", "(..., N), N >= 1")
    for name, parameter in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if parameter is not None:
            require_floating(name, parameter)
            require_shape(name, parameter, (x.shape[-1],))
    require_same_device("x", x.device, weight=weight, bias=bias, residual=residual, x_bias=x_bias)
    if residual is not None:
        require_floating("residual", residual)
        require_shape("residual", residual, tuple(x.shape))


# The operator takes x (R, N), whose leading dimensions are flattened to R rows. It returns y (R,
# N), and the mean and the reciprocal standard deviation of each row, (R,).


def _fake(a: Any) -> tuple[Tensor, ...]:
    statistics = a.x.new_empty(a.x.shape[0], dtype=torch.promote_types(a.x.dtype, torch.float32))
    return a.x.new_empty(a.x.shape), statistics, torch.empty_like(statistics)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    dx = a.x.new_empty(a.x.shape if a.dropout_p > 0 else (0,))
    dx_bias = a.mean.new_empty(0) if a.x_bias is None else a.x_bias.new_empty(a.x_bias.shape)
    dweight = a.weight.new_empty(a.weight.shape)
    dbias = a.weight.new_empty(a.weight.shape if a.has_bias else (0,))
    return a.x.new_empty(a.x.shape), dx, dweight, dbias, dx_bias


_layer_norm = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? x_bias, "
    "Tensor? seed, float dropout_p, float eps, str backend) -> (Tensor, Tensor, Tensor)",
    _fake,
    table="layer_norm",
)
# The results are the gradients of the sum residual + dropout(x + x_bias), and of x, weight, bias
# and x_bias. The gradient of the sum is also the gradient of the residual and, without dropout, the
# gradient of x; the result for x is then empty. The gradient of an absent bias or x_bias is empty.
_layer_norm_backward = operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "Tensor? residual, Tensor? x_bias, Tensor? seed, bool has_bias, float dropout_p, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    table="layer_norm",
)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.has_bias, ctx.dropout_p, ctx.backend = a.bias is not None, a.dropout_p, a.backend
    ctx.save_for_backward(a.x, a.weight, mean, rstd, a.residual, a.x_bias, a.seed)
    ctx.mark_non_differentiable(mean, rstd)


def _gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> dict[str, Tensor | None]:
    # Activation checkpointing allows the saved tensors to be unpacked only once.
    x, weight, mean, rstd, residual, x_bias, seed = ctx.saved_tensors
    dsum, dx, dweight, dbias, dx_bias = _layer_norm_backward(
        dy, x, weight, mean, rstd, residual, x_bias, seed, ctx.has_bias, ctx.dropout_p, ctx.backend
    )
    return {
        "x": dx if ctx.dropout_p > 0 else dsum,
        "weight": dweight,
        "bias": dbias if ctx.has_bias else None,
        "residual": None if residual is None else dsum,
        "x_bias": None if x_bias is None else dx_bias,
    }


differentiable("layer_norm", _gradient, _setup_context)
once_differentiable("layer_norm_backward")


# Backends


def _triton_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
) -> tuple[Tensor, ...]:
    from fastbert.kernels.layer_norm import layer_norm_forward

    return layer_norm_forward(
        x, weight, bias, residual=residual, x_bias=x_bias, seed=seed, dropout_p=dropout_p, eps=eps
    )


def _triton_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    has_bias: bool,
    dropout_p: float,
) -> tuple[Tensor, ...]:
    from fastbert.kernels.layer_norm import layer_norm_backward

    dsum, dx, dweight, dbias, dx_bias = layer_norm_backward(
        dy, x, weight, mean, rstd, residual=residual, x_bias=x_bias, seed=seed, has_bias=has_bias,
        dropout_p=dropout_p,
    )  # fmt: skip
    dx = x.new_empty(0) if dx is None else dx
    dbias = weight.new_empty(0) if dbias is None else dbias
    return dsum, dx, dweight, dbias, mean.new_empty(0) if dx_bias is None else dx_bias


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.layer_norm_forward(*arguments)


def _extension_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.layer_norm_backward(*arguments)


# The largest number of columns that the CUDA C++ kernels allow. This number equals kMaxColumns of
# csrc/cuda/layer_norm.cuh.
LARGEST_CUDA_ROW = 6144


def _refuse_wide_rows(request: backends.Request) -> str | None:
    if request.columns <= LARGEST_CUDA_ROW:
        return None
    return f"rows have {request.columns} elements, allowed: up to {LARGEST_CUDA_ROW}"


backends.TABLES["layer_norm"] = {
    "reference": backends.Implementation(
        closed_form.layer_norm_forward, closed_form.layer_norm_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(
        _triton_forward, _triton_backward, refuses=backends.refuse_wide_rows
    ),
    "cuda": backends.Implementation(
        _extension_forward, _extension_backward, refuses=_refuse_wide_rows
    ),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
