"""Rotary embeddings: public function, operator, gradient, backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    require,
    require_floating,
    require_same_device,
    require_shape,
    transformed,
)
from fastbert.ops.register import differentiable, once_differentiable, operator


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, backend: str | None = None
) -> Tensor:
    """Rotate the first `heads` heads of each token by the token's angles; copy the other heads.

    Elements ``i`` and ``i + D / 2`` of a head are a pair ``(a, b)`` and become
    ``(a cos − b sin, b cos + a sin)``.

    Args:
        x: Tensor of shape ``(T, N, D)`` with any strides, D even. For the fused projection of q, k
            and v, N is ``3 H`` and `heads` is ``2 H``.
        cos: Cosines of the angles, fp32 of shape ``(T, D / 2)``; fp64 is allowed too if `x` is
            fp64.
        sin: Sines of the angles, as `cos`.
        heads: Number of heads that are rotated.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Contiguous tensor of shape ``(T, N, D)`` in the dtype of `x`, also under autocast. If `x`
        has 16 bits, the result is computed in fp32 and rounded once. The result is differentiable
        in `x` only.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, or if `backend` cannot serve the
            call. The message names the argument, its value and what is allowed.
        TypeError: If a dtype is not allowed.

    Note:
        Su et al. 2021, eq. 34.
    """
    require_floating("x", x)
    is_pairs = x.dim() == 3 and x.shape[-1] >= 2 and x.shape[-1] % 2 == 0
    require(is_pairs, "x", f"shape {tuple(x.shape)}", "(T, N, D), D even and >= 2")
    tokens, total, head_dim = x.shape
    allowed = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.dtype not in allowed:
            names = ", ".join(map(str, allowed))
            raise TypeError(f"{name}: got {angles.dtype}, allowed: {names}")
        require_shape(name, angles, (tokens, head_dim // 2))
    require_same_device("x", x.device, cos=cos, sin=sin)
    require(0 <= heads <= total, "heads", heads, f"0 to {total}, the heads of x")
    request = backends.Request(x.device.type, x.dtype, transformed=transformed())
    choice = backends.resolve("rotary", backend, request)
    if request.transformed:
        return reference.rotary(x, cos, sin, heads=heads)
    return _rotary(x, cos, sin, heads, choice.backend)


# The operator


def _fake(a: Any) -> Tensor:
    return a.x.new_empty(a.x.shape)


def _backward_fake(a: Any) -> Tensor:
    return a.dy.new_empty(a.dy.shape)


_rotary = operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, int heads, str backend) -> Tensor",
    _fake,
    table="rotary",
)
_rotary_backward = operator(
    "rotary_backward(Tensor dy, Tensor cos, Tensor sin, int heads, str backend) -> Tensor",
    _backward_fake,
    table="rotary",
)


def _setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.heads, ctx.backend = a.heads, a.backend
    ctx.save_for_backward(a.cos, a.sin)


def _gradient(ctx: Any, dy: Tensor) -> dict[str, Tensor]:
    cos, sin = ctx.saved_tensors
    return {"x": _rotary_backward(dy, cos, sin, ctx.heads, ctx.backend)}


differentiable("rotary", _gradient, _setup_context)
once_differentiable("rotary_backward")


# Backends


def _triton_forward(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    from fastbert.kernels.rotary import rotary_forward

    return rotary_forward(x, cos, sin, heads=heads)


def _triton_backward(dy: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    from fastbert.kernels.rotary import rotary_backward

    return rotary_backward(dy, cos, sin, heads=heads)


def _extension_forward(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return torch.ops.fastbert_C.rotary(x, cos, sin, heads, False)


def _extension_backward(dy: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return torch.ops.fastbert_C.rotary(dy, cos, sin, heads, True)


backends.TABLES["rotary"] = {
    "reference": backends.Implementation(
        closed_form.rotary_forward, closed_form.rotary_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
