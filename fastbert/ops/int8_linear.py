"""A linear layer with 8-bit integers for inference: public function, operator, backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.activations import UNGATED
from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    as_matrix,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.register import operator
from fastbert.reference import Int8Weight, int8_weight, pack, unpack

__all__ = ["Int8Weight", "int8_linear", "int8_weight", "layout", "pack", "unpack"]

# The int8 products apply the activation in their epilogue. They take no gated activations.
ACTIVATIONS = ("none", *UNGATED)


def layout() -> tuple[int, int]:
    """Return the arguments `lanes` and `group` of `pack` that suit the instruction set in use."""
    if backends.EXTENSION is None:
        return 16, 4
    return torch.ops.fastbert_C.int8_layout()


def int8_linear(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Compute a linear layer with 8-bit integers, for inference.

    The result is ``activation(q(x) Wᵀ + b) + residual``, where ``q(x)`` is `x` with each row
    quantised to 8 bits by ``fastbert.reference.int8_rows``. Products and sums are computed in
    integers without rounding, so every instruction set gives the same bits.

    Args:
        x: Input of shape ``(..., K)``; fp32, bf16 or fp16.
        weight: Quantised weight, as ``fastbert.reference.pack`` returns it.
        bias: Bias of shape ``(N,)``, floating, or None.
        residual: Added last; of shape ``(..., N)`` in the dtype of the result, or None.
        activation: ``"none"``, ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.
        backend: ``"reference"`` or ``"cpu"``; None lets ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(..., N)`` in the dtype of `x`, or in autocast's dtype under autocast. If
        a row of `x` has an element that is not finite, the row of the result is NaN.

    Raises:
        ValueError: If a shape, a device, a value or the dtype of `residual` is not allowed, or if
            `backend` cannot serve the call. The message names the argument, its value and what is
            allowed.
        TypeError: If the dtype of `x` is not floating.
        RuntimeError: If `x` requires a gradient and the gradient mode of torch is on.

    Note:
        The scheme is that of Jacob et al. 2018.
    """
    require_floating("x", x)
    require(x.dim() >= 1, "x", f"shape {tuple(x.shape)}", "(..., K)")
    require_shape("x", x, (*x.shape[:-1], weight.inputs))
    require(activation in ACTIVATIONS, "activation", repr(activation), ", ".join(ACTIVATIONS))
    require_same_device("x", x.device, weight=weight.packed, bias=bias, residual=residual)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "x: got a tensor that requires a gradient, allowed: a tensor without requires_grad"
        )
    device, dtype = x.device.type, x.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    outputs = weight.outputs
    if residual is not None:
        require_shape("residual", residual, (*x.shape[:-1], outputs))
        require(residual.dtype == dtype, "residual", residual.dtype, f"{dtype}, as the result")
        residual = as_matrix(residual)
    if bias is not None:
        require_shape("bias", bias, (outputs,))
    rows = as_matrix(x)
    choice = backends.resolve("int8_linear", backend, backends.Request(device, x.dtype))
    arguments = (rows, *weight[:3], outputs, bias, residual, activation, dtype)
    if choice.backend == "cpu" and not torch.compiler.is_compiling():
        # This direct call skips the operator that torch.compile needs; the result is the same.
        y = _cpu_forward(*arguments)
    else:
        y = _int8_linear(*arguments, choice.backend)
    return y.view(*x.shape[:-1], outputs)


# The operator maps x (M, K) to the result (M, N).


def _fake(a: Any) -> Tensor:
    return a.x.new_empty(a.x.shape[0], a.outputs, dtype=a.dtype)


_int8_linear = operator(
    "int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor column_sum, int outputs, "
    "Tensor? bias, Tensor? residual, str activation, ScalarType dtype, str backend) -> Tensor",
    _fake,
    table="int8_linear",
)


# Backends


def _no_gradient(*_: Any) -> None:
    raise RuntimeError("int8_linear has no gradient")


def _reference_forward(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    column_sum: Tensor,
    outputs: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    weight = Int8Weight(packed, scale, column_sum, outputs, x.shape[1])
    y = reference.int8_linear(x, weight, bias, residual=residual, activation=activation)
    return y.to(dtype)


def _cpu_forward(*arguments: Any) -> Tensor:
    return torch.ops.fastbert_C.int8_linear(*arguments)


backends.TABLES["int8_linear"] = {
    "reference": backends.Implementation(_reference_forward, _no_gradient),
    "cpu": backends.Implementation(_cpu_forward, _no_gradient),
}
