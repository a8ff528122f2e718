"""Cross entropy of a vocabulary projection, computed without storing all (T, V) logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    autocast_dtype,
    require,
    require_floating,
    require_integer,
    require_same_device,
    require_shape,
)
from fastbert.ops.product import parameters_for, rows_of
from fastbert.ops.register import differentiable, once_differentiable, operator

REDUCTIONS = ("mean", "sum", "none")
# The backends whose forward returns `statistics` and `order`, described below, for the backward.
KEEPING = ("triton", "cpu")
# The number of rows whose logits the reference computes at once. 1,024 × 30,522 logits in fp32 take
# 125 MB, and 1,024 rows are enough for an efficient GEMM.
CHUNK_ROWS = 1024


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Compute the cross entropy of the logits ``hidden Wᵀ + b`` without storing all logits.

    Rows whose label is `ignore_index` are left out. The logits of the other rows are computed in
    blocks, which are not all stored at once.

    Args:
        hidden: Rows of shape ``(T, K)``.
        weight: Projection to the vocabulary, of shape ``(V, K)`` in the dtype of `hidden`; under
            autocast, in fp32, fp16 or bf16.
        bias: Bias of shape ``(V,)``, or None.
        labels: Class of each row, int64 or int32 of shape ``(T,)``, in ``[0, V)`` or
            `ignore_index`.
        ignore_index: Label of the rows that the loss leaves out.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. If every label is `ignore_index`, the mean
            is 0 and its gradients are 0.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Loss in fp32, or in fp64 for fp64 inputs. The loss is a scalar. For the reduction
        ``"none"``, it has shape ``(T,)``, with 0 for the rows whose label is `ignore_index`.

    Raises:
        ValueError: If a shape, a device, a value or the dtype of `weight` is not allowed, or if
            `backend` cannot serve the call. The message names the argument, its value and what is
            allowed. A label out of range raises on the CPU only. On a GPU, the Triton kernels make
            the loss and the gradients of such a row NaN.
        TypeError: If `hidden` is not floating, or if `labels` are not int64 or int32.
    """
    require(reduction in REDUCTIONS, "reduction", repr(reduction), ", ".join(REDUCTIONS))
    require_floating("hidden", hidden)
    require_integer("labels", labels)
    require(hidden.dim() == 2, "hidden", f"shape {tuple(hidden.shape)}", "(T, K)")
    shape = f"shape {tuple(weight.shape)}"
    require(weight.dim() == 2, "weight", shape, f"(V, {hidden.shape[1]})")
    require_shape("weight", weight, (weight.shape[0], hidden.shape[1]))
    cast = autocast_dtype(hidden)
    allowed = (hidden.dtype,) if cast is None else backends.LOW_PRECISION
    names = f"{hidden.dtype}, as hidden" if cast is None else ", ".join(map(str, allowed))
    require(weight.dtype in allowed, "weight", weight.dtype, names)
    require_shape("labels", labels, (hidden.shape[0],))
    if bias is not None:
        require_shape("bias", bias, (weight.shape[0],))
    require_same_device("hidden", hidden.device, weight=weight, bias=bias, labels=labels)
    dtype = hidden.dtype if cast is None else cast
    request = backends.Request(hidden.device.type, dtype)
    choice = backends.resolve("linear_cross_entropy", backend, request)
    if cast is not None:
        hidden = rows_of(hidden, dtype)
        weight, bias = parameters_for(choice.backend, dtype, weight, bias)
    loss, _, _ = _linear_cross_entropy(
        hidden, weight, bias, labels, ignore_index, reduction, choice.backend
    )
    return loss


# The operator returns the loss, `statistics` and `order`. `statistics`, fp32 (2, T), has two
# numbers for each row of logits: the maximum, and the sum of exponentials. The rows are in the
# order of `order`. `order`, int32 (T + 1,), has the indices of the labelled rows, whose label is
# not `ignore_index`, then the indices of the other rows, and last the number of labelled rows. With
# the backend "reference", both tensors are empty.


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    backend: str,
) -> tuple[Tensor, ...]:
    _check_labels(labels, ignore_index, weight.shape[0])
    row = backends.TABLES["linear_cross_entropy"][backend]
    return row.forward(hidden, weight, bias, labels, ignore_index, reduction)


def _check_labels(labels: Tensor, ignore_index: int, classes: int) -> None:
    """Raise ValueError if a label on the CPU is out of range.

    Labels on a GPU are not checked, because reading them would synchronise.
    """
    if labels.device.type != "cpu":
        return
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if bool(outside.any()):
        got = labels[outside][0].item()
        raise ValueError(f"labels: got {got}, allowed: 0 to {classes - 1}, or {ignore_index}")


def _fake(a: Any) -> tuple[Tensor, ...]:
    rows, saves = a.hidden.shape[0], a.backend in KEEPING
    shape = (rows,) if a.reduction == "none" else ()
    loss = a.hidden.new_empty(shape, dtype=_loss_dtype(a.hidden))
    statistics = a.hidden.new_empty((2, rows) if saves else (0,), dtype=torch.float32)
    return loss, statistics, a.hidden.new_empty(rows + 1 if saves else 0, dtype=torch.int32)


def _loss_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    dbias = a.hidden.new_empty(0) if a.bias is None else a.bias.new_empty(a.bias.shape)
    return a.hidden.new_empty(a.hidden.shape), a.weight.new_empty(a.weight.shape), dbias


_linear_cross_entropy = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
    "int ignore_index, str reduction, str backend) -> (Tensor, Tensor, Tensor)",
    _fake,
    forward=_forward,
)
_linear_cross_entropy_backward = operator(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor? bias, "
    "Tensor labels, Tensor statistics, Tensor order, int ignore_index, str reduction, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_fake,
    table="linear_cross_entropy",
)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, ...]) -> None:
    _, statistics, order = output
    ctx.ignore_index, ctx.reduction, ctx.backend = a.ignore_index, a.reduction, a.backend
    ctx.save_for_backward(a.hidden, a.weight, a.bias, a.labels, statistics, order)
    ctx.mark_non_differentiable(statistics, order)


def _gradient(ctx: Any, dloss: Tensor, *_: Tensor | None) -> dict[str, Tensor | None]:
    hidden, weight, bias, labels, statistics, order = ctx.saved_tensors
    dhidden, dweight, dbias = _linear_cross_entropy_backward(
        dloss, hidden, weight, bias, labels, statistics, order,
        ctx.ignore_index, ctx.reduction, ctx.backend,
    )  # fmt: skip
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


differentiable("linear_cross_entropy", _gradient, _setup_context)
once_differentiable("linear_cross_entropy_backward")


# Backends


def _chunks(labels: Tensor, ignore_index: int) -> tuple[Tensor, ...]:
    """Return the indices of the labelled rows, divided into parts of at most ``CHUNK_ROWS``."""
    return (labels != ignore_index).nonzero().flatten().split(CHUNK_ROWS)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(rows, weight, bias).to(_loss_dtype(rows))


def _labelled(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the divisor of the mean loss: the number of labelled rows, or 1 if there are none."""
    return (labels != ignore_index).sum().clamp(min=1)


def _reference_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, ...]:
    losses = hidden.new_zeros(hidden.shape[0], dtype=_loss_dtype(hidden))
    for rows in _chunks(labels, ignore_index):
        logits = _logits(hidden[rows], weight, bias)
        losses[rows] = F.cross_entropy(logits, labels[rows].long(), reduction="none")
    nothing = hidden.new_empty(0, dtype=torch.float32), hidden.new_empty(0, dtype=torch.int32)
    if reduction == "none":
        return losses, *nothing
    total = losses.sum()
    return total / _labelled(labels, ignore_index) if reduction == "mean" else total, *nothing


def _reference_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    order: Tensor,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, ...]:
    dlosses = dloss / _labelled(labels, ignore_index) if reduction == "mean" else dloss
    dlosses = dlosses.expand(labels.shape)
    dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    # dweight and dbias are sums over the chunks, computed in the dtype of the loss.
    dtype = _loss_dtype(hidden)
    dweight = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    dbias = hidden.new_zeros(0 if bias is None else bias.shape[0], dtype=dtype)
    for rows in _chunks(labels, ignore_index):
        scale = dlosses[rows, None]
        # With the probability p of the label and the gradient g of the row's loss, the gradient of
        # the label's logit is (p - 1) g. It is computed as p g - g. If p is small, the rounding of
        # p g hardly changes the difference, whereas (p - 1) g would be rounded twice.
        dlogits = torch.log_softmax(_logits(hidden[rows], weight, bias), dim=-1).exp_() * scale
        dlogits.scatter_add_(1, labels[rows, None].long(), -scale)
        dhidden[rows] = dlogits.to(hidden.dtype) @ weight
        dweight += dlogits.to(hidden.dtype).t() @ hidden[rows]
        if bias is not None:
            dbias += dlogits.sum(dim=0)
    return dhidden, dweight.to(weight.dtype), dbias.to(hidden.dtype if bias is None else bias.dtype)


def _triton_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, ...]:
    from fastbert.kernels.cross_entropy import linear_cross_entropy_forward

    return linear_cross_entropy_forward(
        hidden, weight, bias, labels, ignore_index=ignore_index, reduction=reduction
    )


def _triton_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    order: Tensor,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, ...]:
    from fastbert.kernels.cross_entropy_backward import linear_cross_entropy_backward

    dhidden, dweight, dbias = linear_cross_entropy_backward(
        dloss, hidden, weight, bias, labels, statistics, order, reduction=reduction
    )
    return dhidden, dweight, hidden.new_empty(0) if dbias is None else dbias


def _extension_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.linear_cross_entropy_forward(*arguments)


def _extension_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    order: Tensor,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.linear_cross_entropy_backward(
        dloss, hidden, weight, bias, labels, statistics, order, reduction
    )


backends.TABLES["linear_cross_entropy"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
