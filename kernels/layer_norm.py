"""Layer norm of residual + dropout(x + x_bias), forward and backward (Ba et al. 2016).

Memory bandwidth limits both passes. A program reads each row once and keeps it in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import narrow
from fastbert.kernels.launch import Launch, dense, dropout_arguments, run
from fastbert.kernels.norm_rows import (
    layer_norm_gradient,
    layer_norm_statistics,
    load_parameter,
    load_sum,
    require_rows,
    row_launch,
    row_offsets,
)
from fastbert.kernels.reduction import sum_planes, sum_rows
from fastbert.kernels.tiles import Tile, ceil_div, row_programs, row_tile

# The largest number of columns for which the kernel of the backward also sums the gradient of
# x_bias. Longer rows leave too few registers for this sum.
WIDEST_WITH_X_BIAS = 4096


@triton.jit(do_not_specialize=["rows_total"])
def _forward_kernel(
    # (R, N); fp32, fp16 or bf16; the residual may be None
    x_ptr, residual_ptr,
    # (N,), any floating dtype; the biases may be None
    weight_ptr, bias_ptr, x_bias_ptr,
    # (1,), int64; None without dropout
    seed_ptr,
    # (R, N), contiguous, in the dtype of x
    y_ptr,
    # (R,), fp32
    mean_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, rows_total, columns, eps, dropout_threshold, dropout_scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * BLOCK_M
    total, _ = load_sum(
        x_ptr, residual_ptr, x_bias_ptr, seed_ptr,
        first_row, stride_x_row, stride_residual_row, rows_total, columns,
        dropout_threshold, dropout_scale,
        HAS_RESIDUAL, HAS_X_BIAS, HAS_DROPOUT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows, cols, offsets, inside = row_offsets(
        first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N
    )
    centred, mean, rstd = layer_norm_statistics(total, inside, columns, eps)
    weight = load_parameter(weight_ptr, cols, columns)
    y = centred * rstd[:, None] * weight
    if HAS_BIAS:
        y += load_parameter(bias_ptr, cols, columns)
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + rows, mean, mask=rows < rows_total)
    tl.store(rstd_ptr + rows, rstd, mask=rows < rows_total)


@triton.jit(do_not_specialize=["rows_total"])
def _backward_kernel(
    # (R, N); fp32, fp16 or bf16; the residual may be None
    dy_ptr, x_ptr, residual_ptr,
    # (N,), any floating dtype; x_bias may be None
    weight_ptr, x_bias_ptr,
    # (1,), int64; None without dropout
    seed_ptr,
    # (R,), fp32
    mean_ptr, rstd_ptr,
    # (R, N), contiguous, in the dtype of x; dx is None without dropout
    dsum_ptr, dx_ptr,
    # (planes, programs, N), fp32: dweight, dbias with HAS_BIAS, dx_bias with SUM_X_BIAS
    partials_ptr,
    stride_dy_row, stride_dy_col, stride_x_row, stride_residual_row, rows_total, columns,
    dropout_threshold, dropout_scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SUM_X_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    # All warps share each row, so that a thread sums over BLOCK_M without the other threads.
    dweight = tl.zeros([BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_N], tl.float32)
    dx_bias = tl.zeros([BLOCK_N], tl.float32)
    for first_row in range(program * BLOCK_M, rows_total, programs * BLOCK_M):
        total, keep = load_sum(
            x_ptr, residual_ptr, x_bias_ptr, seed_ptr,
            tl.cast(first_row, tl.int32), stride_x_row, stride_residual_row, rows_total, columns,
            dropout_threshold, dropout_scale,
            HAS_RESIDUAL, HAS_X_BIAS, HAS_DROPOUT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        rows, _, offsets, inside = row_offsets(
            first_row, stride_dy_row, stride_dy_col, rows_total, columns, BLOCK_M, BLOCK_N
        )
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < rows_total, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < rows_total, other=0.0)
        # The weight is loaded from the cache for each tile. If it stayed in registers, wide rows
        # would spill.
        weight = load_parameter(weight_ptr, cols, columns)
        dsum, normalised = layer_norm_gradient(dy, total, mean, rstd, weight, inside, columns)
        dweight += tl.sum(dy * normalised, axis=0)
        if HAS_BIAS:
            dbias += tl.sum(dy, axis=0)
        _, _, offsets, _ = row_offsets(first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N)
        tl.store(dsum_ptr + offsets, narrow(dsum, dsum_ptr.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            dsum = tl.where(keep, dsum * dropout_scale, 0.0)
            tl.store(dx_ptr + offsets, narrow(dsum, dx_ptr.dtype.element_ty), mask=inside)
        if SUM_X_BIAS:
            dx_bias += tl.sum(dsum, axis=0)
    partials = partials_ptr + program.to(tl.int64) * columns + cols
    plane = programs.to(tl.int64) * columns
    tl.store(partials, dweight, mask=cols < columns)
    if HAS_BIAS:
        partials += plane
        tl.store(partials, dbias, mask=cols < columns)
    if SUM_X_BIAS:
        partials += plane
        tl.store(partials, dx_bias, mask=cols < columns)


def _shared_arguments(x, residual, x_bias, seed, dropout_p: float, tile: Tile) -> dict:
    require_rows(x=x, residual=residual)
    dropout = dropout_arguments(dropout_p, seed)
    return {
        "x_ptr": x,
        "residual_ptr": residual,
        "x_bias_ptr": x_bias,
        "seed_ptr": seed if dropout.enabled else None,
        "stride_x_row": x.stride(0),
        "stride_residual_row": 0 if residual is None else residual.stride(0),
        "rows_total": x.shape[0],
        "columns": x.shape[1],
        "dropout_threshold": dropout.threshold,
        "dropout_scale": dropout.scale,
        "HAS_RESIDUAL": residual is not None,
        "HAS_X_BIAS": x_bias is not None,
        "HAS_DROPOUT": dropout.enabled,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def forward_launch(
    x, weight, bias, residual, x_bias, seed, y, mean, rstd, dropout_p, eps
) -> Launch:
    """Return the launch of `layer_norm_forward`."""
    tile = row_tile(x.shape[1])
    arguments = {
        **_shared_arguments(x, residual, x_bias, seed, dropout_p, tile),
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "eps": eps,
        "HAS_BIAS": bias is not None,
    }
    grid = (ceil_div(x.shape[0], tile.block_m),)
    return row_launch("layer_norm_forward", _forward_kernel, grid, arguments, tile.num_warps)


def layer_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LN(residual + dropout(x + x_bias)), and the mean and reciprocal std of each row.

    Args:
        x: Rows (R, N) with any stride between rows and a last stride of 1; fp32, fp16 or bf16.
        weight: Scale (N,) in any floating dtype.
        bias: Shift (N,) in any floating dtype, or None.
        residual: Rows (R, N) in the dtype of `x` and with a last stride of 1, or None.
        x_bias: Bias of `x` (N,) in any floating dtype, or None.
        seed: Seed of the dropout, int64 (1,); may be None without dropout.
        dropout_p: Probability with which an element is dropped.
        eps: Term that is added to the variance.
        into: Contiguous tensors for the three results; None allocates the tensors.

    Returns:
        y (R, N), contiguous, in the dtype of `x`; and the mean and the reciprocal standard
        deviation of each row, fp32 (R,).

    Raises:
        ValueError: If N is above 8192, if a last stride is not 1, if `dropout_p` is outside [0, 1],
            or if there is dropout without a seed.
    """
    results = allocate_results(x) if into is None else into
    if x.shape[1] > 0:
        weight, bias, x_bias = dense(weight, bias, x_bias)
        run(forward_launch, (x, weight, bias, residual, x_bias, seed), results, dropout_p, eps)
    return results


def allocate_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of `layer_norm_forward` for rows `x` (R, N)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return y, mean, torch.empty_like(mean)


def _sums_x_bias(x: Tensor, x_bias: Tensor | None) -> bool:
    """Return whether the kernel of the backward also sums the gradient of x_bias."""
    return x_bias is not None and x.shape[1] <= WIDEST_WITH_X_BIAS


def backward_launch(
    dy, x, weight, mean, rstd, residual, x_bias, seed, dsum, dx, partials, has_bias, dropout_p
) -> Launch:
    """Return the first launch of `layer_norm_backward`, which writes partial sums."""
    tile = row_tile(x.shape[1])
    arguments = {
        **_shared_arguments(x, residual, x_bias, seed, dropout_p, tile),
        "dy_ptr": dy,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dsum_ptr": dsum,
        "dx_ptr": dx,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "HAS_BIAS": has_bias,
        "SUM_X_BIAS": _sums_x_bias(x, x_bias),
    }
    grid = (partials.shape[1],)
    return row_launch("layer_norm_backward", _backward_kernel, grid, arguments, tile.num_warps)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    seed: Tensor | None = None,
    has_bias: bool = True,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of `layer_norm_forward`, which describes the arguments not listed here.

    The sum residual + dropout(x + x_bias) is computed again. The gradient of a parameter is the sum
    of a fixed number of partial sums, so reruns agree bitwise.

    Args:
        dy: Gradient of y, (R, N) at any strides.
        mean: Mean that the forward returned.
        rstd: Reciprocal standard deviation that the forward returned.
        has_bias: Whether `layer_norm_forward` was called with a bias.

    Returns:
        dsum: Gradient (R, N) of residual + dropout(x + x_bias), and therefore of `residual`.
        dx: Gradient (R, N) of `x`; None without dropout, because it equals dsum.
        dweight: Gradient (N,) of `weight`.
        dbias: Gradient (N,) of the bias in the dtype of `weight`; None without a bias.
        dx_bias: Gradient (N,) of `x_bias`; None without `x_bias`.
    """
    rows, columns = x.shape
    dsum = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    dx = torch.empty_like(dsum) if dropout_p > 0.0 else None
    sums_x_bias = _sums_x_bias(x, x_bias)
    shape = (1 + has_bias + sums_x_bias, row_programs(x), columns)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    if columns > 0:
        inputs = (dy, x, *dense(weight, mean, rstd), residual, *dense(x_bias), seed)
        run(backward_launch, inputs, (dsum, dx, partials), has_bias, dropout_p)
    dtypes = [weight.dtype] * (1 + has_bias) + ([x_bias.dtype] if sums_x_bias else [])
    sums = iter(sum_planes(partials, *dtypes))
    dweight = next(sums)
    dbias = next(sums) if has_bias else None
    dx_bias = next(sums) if sums_x_bias else None
    if x_bias is not None and not sums_x_bias:
        dx_bias = sum_rows(dsum if dx is None else dx, x_bias.dtype)
    return dsum, dx, dweight, dbias, dx_bias
