"""gelu(x Wᵀ + b) in one GEMM, and the gradient of its activation (Hendrycks and Gimpel 2016).

Bias and GELU work on the fp32 accumulator in the GEMM's epilogue. For the backward the product is
kept without its bias, so that dbias falls out of the pass that computes the gradient of the
activation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import LOG2E, Launch, dot, elementwise_tile, matmul_tile, narrow

SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
# sqrt(2 / pi) and the cubic coefficient of the tanh form
TANH_LINEAR = tl.constexpr(0.7978845608028654)
TANH_CUBIC = tl.constexpr(0.044715)
# A program of gelu_backward sums dbias over this many rows.
ROWS_PER_PARTIAL = 64
# Row blocks that share a sweep over the columns, so that their weights are read from L2.
GROUP_M = 8


@triton.jit
def _tanh_exponential(x):
    """e = exp(-2 |u|), u = sqrt(2/pi) (x + 0.044715 x³): (1 + tanh(|u|)) / 2 = 1 / (1 + e)."""
    u = x * (TANH_LINEAR + (TANH_LINEAR * TANH_CUBIC) * x * x)
    return tl.exp2(tl.abs(u) * (-2.0 * LOG2E))


@triton.jit
def _gelu(x, IS_TANH: tl.constexpr):
    if IS_TANH:
        e = _tanh_exponential(x)
        return x * (tl.where(x < 0.0, e, 1.0) / (1.0 + e))
    else:
        return 0.5 * x * (1.0 + tl.math.erf(x * SQRT_HALF))


@triton.jit
def _gelu_slope(x, IS_TANH: tl.constexpr):
    """Derivative of _gelu at x."""
    if IS_TANH:
        # s (1 - s) of the sigmoid s is e / (1 + e)²: written so, nothing cancels in the tails.
        e = _tanh_exponential(x)
        inverse = 1.0 / (1.0 + e)
        # Beyond |x| = 16 the slope is 0 or 1 in fp32; there the square could overflow to 0 * inf.
        bounded = tl.where(tl.abs(x) < 16.0, x, 0.0)
        inner = 2.0 * TANH_LINEAR + (6.0 * TANH_LINEAR * TANH_CUBIC) * bounded * bounded
        return tl.where(x < 0.0, e, 1.0) * inverse + bounded * (e * inverse * inverse) * inner
    else:
        density = INVERSE_SQRT_2PI * tl.exp2(x * x * (-0.5 * LOG2E))
        return 0.5 * (1.0 + tl.math.erf(x * SQRT_HALF)) + x * density


@triton.jit(do_not_specialize=["rows_total"])
def _linear_gelu_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr,
    stride_x_row, stride_x_col, stride_weight_row, stride_weight_col,
    rows_total, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, SAVES_H: tl.constexpr, IS_TANH: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_blocks = tl.cdiv(rows_total, BLOCK_M)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP_M * column_blocks)
    group_rows = tl.minimum(row_blocks - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * column_blocks)
    rows = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end read row 0 instead of a mask; their results are not stored.
    x_rows = tl.where(rows < rows_total, rows, 0).to(tl.int64)
    weight_rows = tl.where(cols < columns, cols, 0).to(tl.int64)
    x_rows_ptr = x_ptr + x_rows[:, None] * stride_x_row
    weight_rows_ptr = weight_ptr + weight_rows[:, None] * stride_weight_row
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_k in range(0, depth, BLOCK_K):
        k = (first_k + ks).to(tl.int64)
        if EVEN_K:
            x = tl.load(x_rows_ptr + k[None, :] * stride_x_col)
            weight = tl.load(weight_rows_ptr + k[None, :] * stride_weight_col)
        else:
            inside = (k < depth)[None, :]
            x = tl.load(x_rows_ptr + k[None, :] * stride_x_col, mask=inside, other=0.0)
            weight = tl.load(
                weight_rows_ptr + k[None, :] * stride_weight_col, mask=inside, other=0.0
            )
        accumulator = dot(x, tl.trans(weight), accumulator)

    offsets = rows.to(tl.int64)[:, None] * columns + cols[None, :]
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    if SAVES_H:
        tl.store(h_ptr + offsets, narrow(accumulator, h_ptr.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
        accumulator += bias[None, :]
    y = _gelu(accumulator, IS_TANH)
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows_total"])
def _gelu_backward_kernel(
    dy_ptr, h_ptr, bias_ptr, dh_ptr, partials_ptr,
    stride_dy_row, stride_dy_col, stride_h_row, stride_h_col, rows_total, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_PER_PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_TANH: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(columns, BLOCK_N)
    partial = tl.program_id(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    for first_row in tl.static_range(0, ROWS_PER_PARTIAL, BLOCK_M):
        rows = (partial * ROWS_PER_PARTIAL + first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
        dy_offsets = rows[:, None] * stride_dy_row + cols.to(tl.int64)[None, :] * stride_dy_col
        h_offsets = rows[:, None] * stride_h_row + cols.to(tl.int64)[None, :] * stride_h_col
        dy = tl.load(dy_ptr + dy_offsets, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            h += bias[None, :]
        dh = dy * _gelu_slope(h, IS_TANH)
        dbias += dh
        offsets = rows[:, None] * columns + cols[None, :]
        tl.store(dh_ptr + offsets, narrow(dh, dh_ptr.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        # partials: fp32 [partials, columns]; rows beyond the end have added dy = 0.
        pointers = partials_ptr + partial.to(tl.int64) * columns + cols
        tl.store(pointers, tl.sum(dbias, axis=0), mask=cols < columns)


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate: got {approximate!r}, allowed: "none" or "tanh"')
    return approximate == "tanh"


def _linear_gelu_launch(x, weight, bias, y, h, approximate: str) -> Launch:
    (rows, depth), columns = x.shape, weight.shape[0]
    tile, block_k = matmul_tile(rows, x.dtype)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "h_ptr": h,
        "stride_x_row": x.stride(0),
        "stride_x_col": x.stride(1),
        "stride_weight_row": weight.stride(0),
        "stride_weight_col": weight.stride(1),
        "rows_total": rows,
        "columns": columns,
        "depth": depth,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "GROUP_M": GROUP_M,
        "HAS_BIAS": bias is not None,
        "SAVES_H": h is not None,
        "IS_TANH": _is_tanh(approximate),
        "EVEN_K": depth % block_k == 0,
    }
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),)
    return Launch(
        "linear_gelu", _linear_gelu_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def linear_gelu_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str, save: bool
) -> tuple[Tensor, Tensor | None]:
    """y = gelu(x Wᵀ + bias) and, if asked to save, h = x Wᵀ without the bias.

    x (M, K) and weight (N, K) in one dtype, any strides; bias (N,) in any floating dtype. y, h (M,
    N) contiguous in x's dtype. ValueError: approximate other than "none" (erf) and "tanh".
    """
    shape = (x.shape[0], weight.shape[0])
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    h = torch.empty_like(y) if save else None
    _linear_gelu_launch(x, weight, bias, y, h, approximate).run(on=x)
    return y, h


def _gelu_backward_launch(dy, h, bias, dh, partials, approximate: str) -> Launch:
    rows, columns = h.shape
    tile = elementwise_tile()
    arguments = {
        "dy_ptr": dy,
        "h_ptr": h,
        "bias_ptr": bias,
        "dh_ptr": dh,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "stride_h_row": h.stride(0),
        "stride_h_col": h.stride(1),
        "rows_total": rows,
        "columns": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "ROWS_PER_PARTIAL": ROWS_PER_PARTIAL,
        "HAS_BIAS": bias is not None,
        "IS_TANH": _is_tanh(approximate),
    }
    grid = (triton.cdiv(rows, ROWS_PER_PARTIAL) * triton.cdiv(columns, tile.block_n),)
    return Launch(
        "gelu_backward", _gelu_backward_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def gelu_backward(
    dy: Tensor, h: Tensor, bias: Tensor | None, *, approximate: str
) -> tuple[Tensor, Tensor | None]:
    """dh = dy gelu'(h + bias), contiguous (M, N) in h's dtype; dbias (N,) in bias's dtype, or None.

    dy, h (M, N) at any strides. dbias is summed in fp32 over fixed partial sums: reruns agree
    bitwise.
    """
    rows, columns = h.shape
    dh = torch.empty((rows, columns), dtype=h.dtype, device=h.device)
    partials = None
    if bias is not None:
        shape = (triton.cdiv(rows, ROWS_PER_PARTIAL), columns)
        partials = torch.empty(shape, dtype=torch.float32, device=h.device)
    _gelu_backward_launch(dy, h, bias, dh, partials, approximate).run(on=h)
    if partials is None:
        return dh, None
    # fp64, as in layer_norm_backward
    return dh, partials.sum(dim=0, dtype=torch.float64).to(bias.dtype)


def shipped_launches() -> Iterator[Launch]:
    """Representative launches, on meta tensors, for the ahead-of-time gate."""
    for dtype, rows in ((torch.bfloat16, 4096), (torch.bfloat16, 32), (torch.float32, 4096)):
        x = torch.empty((rows, 768), dtype=dtype, device="meta")
        weight = torch.empty((3072, 768), dtype=dtype, device="meta")
        bias = torch.empty(3072, dtype=dtype, device="meta")
        y = torch.empty((rows, 3072), dtype=dtype, device="meta")
        partials = torch.empty((64, 3072), dtype=torch.float32, device="meta")
        yield _linear_gelu_launch(x, weight, bias, y, y, "none")
        if rows == 4096:
            yield _gelu_backward_launch(y, y, bias, y, partials, "none")
