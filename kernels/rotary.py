"""Rotary embeddings of heads, forward and backward (Su et al. 2021).

Memory bandwidth limits the kernel. A program reads the angles of one token once, for all heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.tiles import ceil_div, rotary_tile


@triton.jit
def _offsets(row, heads, cols, stride_row, stride_head, stride_col):
    """Return the offsets [BLOCK_M, BLOCK_N] of `cols` in `heads` of the token `row`."""
    across = heads.to(tl.int64)[:, None] * stride_head
    return row * stride_row + across + cols.to(tl.int64)[None, :] * stride_col


@triton.jit
def _rotary_kernel(
    # (T, N, D); fp32, fp16 or bf16
    x_ptr,
    # (T, D / 2), fp32, contiguous
    cos_ptr, sin_ptr,
    # (T, N, D), contiguous, in the dtype of x
    y_ptr,
    stride_x_row, stride_x_head, stride_x_col, stride_y_row, stride_y_head,
    heads_total, turned, half,
    INVERSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    angles = row * half + cols
    cos = tl.load(cos_ptr + angles, mask=cols < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angles, mask=cols < half, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    for first_head in range(0, heads_total, BLOCK_M):
        heads = first_head + tl.arange(0, BLOCK_M)
        inside = (heads < heads_total)[:, None] & (cols < half)[None, :]
        offsets = _offsets(row, heads, cols, stride_x_row, stride_x_head, stride_x_col)
        first = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        offsets = _offsets(row, heads, cols + half, stride_x_row, stride_x_head, stride_x_col)
        second = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        is_turned = (heads < turned)[:, None]
        new_first = tl.where(is_turned, first * cos - second * sin, first)
        new_second = tl.where(is_turned, second * cos + first * sin, second)
        dtype = y_ptr.dtype.element_ty
        offsets = _offsets(row, heads, cols, stride_y_row, stride_y_head, 1)
        tl.store(y_ptr + offsets, narrow(new_first, dtype), mask=inside)
        offsets = _offsets(row, heads, cols + half, stride_y_row, stride_y_head, 1)
        tl.store(y_ptr + offsets, narrow(new_second, dtype), mask=inside)


def rotary_launch(x, cos, sin, y, name, heads) -> Launch:
    """Return the launch that rotates the first `heads` heads of x (T, N, D) and writes y.

    `name` is "rotary_forward", or "rotary_backward" for a rotation by the negative angles.
    """
    tokens, total, head_dim = x.shape
    half = head_dim // 2
    tile = rotary_tile(head_dim)
    arguments = {
        "x_ptr": x,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "y_ptr": y,
        "stride_x_row": x.stride(0),
        "stride_x_head": x.stride(1),
        "stride_x_col": x.stride(2),
        "stride_y_row": y.stride(0),
        "stride_y_head": y.stride(1),
        "heads_total": total,
        "turned": heads,
        "half": half,
        "INVERSE": name == "rotary_backward",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    grid = (tokens, ceil_div(half, tile.block_n))
    return Launch(name, _rotary_kernel, grid, arguments, tile.num_warps, tile.num_stages)


def _run(name, x, cos, sin, heads) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(rotary_launch, (x, cos.contiguous(), sin.contiguous()), (y,), name, heads)
    return y


def rotary_forward(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """Rotate the first `heads` heads of each token and copy the other heads.

    Elements i and i + D / 2 of a head are a pair (a, b). The pair becomes (a cos − b sin, b cos + a
    sin).

    Args:
        x: Heads (T, N, D) at any strides, with an even D; fp32, fp16 or bf16.
        cos: Cosines of the angles, fp32 (T, D / 2).
        sin: Sines of the angles, fp32 (T, D / 2).
        heads: Number of heads that are rotated.

    Returns:
        Tensor (T, N, D), contiguous, in the dtype of `x`.
    """
    return _run("rotary_forward", x, cos, sin, heads)


def rotary_backward(dy: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """Return the gradient of x: `dy` (T, N, D), at any strides, rotated by the negative angles."""
    return _run("rotary_backward", dy, cos, sin, heads)
