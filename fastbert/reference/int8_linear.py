"""A linear layer whose product multiplies 8-bit integers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.reference.feed_forward import activate

# Packed weights are padded: the number of panels to a multiple of 4, and K to a multiple of 64.
PANELS, DEPTH = 4, 64


class Int8Weight(NamedTuple):
    """A weight W (N, K) ≈ integers · scale, in the layout that the kernels read, padded with 0.

    Args:
        packed: Integers, int8 (panels, padded K / group, lanes, group). A panel has the weights of
            ``lanes`` outputs. The weights of ``group`` adjacent inputs are adjacent in memory.
        scale: Scale of each output, fp32 (panels · lanes,).
        column_sum: Sum of the integers of each output, int32 (panels · lanes,).
        outputs: Number N of outputs, without padding.
        inputs: Number K of inputs, without padding.
    """

    packed: Tensor
    scale: Tensor
    column_sum: Tensor
    outputs: int
    inputs: int


def pack(values: Tensor, scale: Tensor, lanes: int, group: int) -> Int8Weight:
    """Return values int8 (N, K) and scale fp32 (N,) as an `Int8Weight`.

    `lanes` and `group` are the last two sizes of ``Int8Weight.packed``.
    """
    outputs, inputs = values.shape
    panels = -(-outputs // (lanes * PANELS)) * PANELS
    depth = -(-inputs // DEPTH) * DEPTH
    padded = values.new_zeros(panels * lanes, depth)
    padded[:outputs, :inputs] = values
    packed = padded.view(panels, lanes, depth // group, group).transpose(1, 2).contiguous()
    scales = scale.new_zeros(panels * lanes, dtype=torch.float32)
    scales[:outputs] = scale
    return Int8Weight(packed, scales, padded.sum(1, dtype=torch.int32), outputs, inputs)


def unpack(weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """Return the values (N, K) and the scale (N,) from which `pack` has made a weight."""
    panels, groups, lanes, group = weight.packed.shape
    values = weight.packed.transpose(1, 2).reshape(panels * lanes, groups * group)
    values = values[: weight.outputs, : weight.inputs].contiguous()
    return values, weight.scale[: weight.outputs].clone()


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each row of x (M, K) to 8-bit integers q, so that x ≈ (q − zero) · scale.

    Let [low, high] be the smallest interval that contains a row and 0. Then
    scale = (high − low) / 255, zero = rint(−low / scale) and q = clip(rint(x / scale) + zero). If
    the scale of a row is below 2⁻¹²⁰, the row is quantised as zeros with scale 0. A row with an
    element that is not finite has q = 0 and the scale NaN.

    Args:
        x: Rows of shape ``(M, K)``.

    Returns:
        q of shape ``(M, K)`` in [0, 255], scale and zero of shape ``(M, 1)``, all fp32.
    """
    x = x.float()
    low, high = x.amin(1, keepdim=True).clamp(max=0.0), x.amax(1, keepdim=True).clamp(min=0.0)
    scale = high / 255.0 - low / 255.0
    finite = x.isfinite().all(1, keepdim=True)
    counts = finite & (scale >= 2.0**-120)
    inverse = torch.where(counts, 1.0 / scale, 0.0)
    zero = torch.where(counts, (-low * inverse).round(), 0.0)
    q = torch.where(counts, ((x * inverse).round() + zero).clamp(0.0, 255.0), 0.0)
    return q, torch.where(counts, scale, torch.where(finite, 0.0, torch.nan)), zero


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight (N, K) symmetrically, with one scale per row.

    If the scale of a row is below 2⁻¹²⁰, the values and the scale of the row are 0.

    Args:
        weight: Weight of shape ``(N, K)``.

    Returns:
        int8 values of shape ``(N, K)`` in [-127, 127], and the fp32 scales of shape ``(N,)``, with
        weight ≈ values · scale.
    """
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / 127.0
    inverse = torch.where(scale >= 2.0**-120, 1.0 / scale, 0.0)
    values = (weight * inverse.unsqueeze(1)).round().clamp(-127.0, 127.0)
    return values.to(torch.int8), torch.where(scale >= 2.0**-120, scale, 0.0)


def int8_linear(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Compute ``activation((q − zero) valuesᵀ · scales + b) + residual``.

    x has the shape (..., K), and the result has the dtype of x. `int8_rows` computes q, the scale
    and zero of each row of x. `weight` contains the integers ``values`` and the scale of each
    output. An element of ``scales`` is the product of the scale of a row and the scale of an
    output; b is `bias`. The sums of integers are exact, and all other arithmetic is fp32.
    """
    values, scale = unpack(weight)
    q, row_scale, zero = int8_rows(x.reshape(-1, x.shape[-1]))
    y = ((q - zero).double() @ values.double().t()).float() * (row_scale * scale)
    y = y if bias is None else y + bias.float()
    y = y if activation == "none" else activate(y, activation)
    y = y.view(*x.shape[:-1], weight.outputs)
    return (y if residual is None else y + residual.float()).to(x.dtype)
