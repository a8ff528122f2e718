"""RMS norm of x + residual, forward and backward (Zhang and Sennrich 2019).

Memory bandwidth limits both passes. A program reads each row once and keeps it in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import narrow
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.norm_rows import (
    load_parameter,
    load_sum,
    reciprocal_root,
    require_rows,
    row_launch,
    row_mean,
    row_offsets,
)
from fastbert.kernels.reduction import sum_partials
from fastbert.kernels.tiles import ceil_div, row_programs, row_tile


@triton.jit(do_not_specialize=["rows_total"])
def _forward_kernel(
    # (R, N); fp32, fp16 or bf16; the residual may be None
    x_ptr, residual_ptr,
    # (N,), any floating dtype
    weight_ptr,
    # (R, N), contiguous, in the dtype of x
    y_ptr,
    # (R,), fp32
    rstd_ptr,
    stride_x_row, stride_residual_row, rows_total, columns, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * BLOCK_M
    total, _ = load_sum(
        x_ptr, residual_ptr, None, None,
        first_row, stride_x_row, stride_residual_row, rows_total, columns, 0, 1.0,
        HAS_RESIDUAL, False, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows, cols, offsets, inside = row_offsets(
        first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N
    )
    rstd = reciprocal_root(row_mean(total * total, columns) + eps)
    y = total * rstd[:, None] * load_parameter(weight_ptr, cols, columns)
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + rows, rstd, mask=rows < rows_total)


@triton.jit(do_not_specialize=["rows_total"])
def _backward_kernel(
    # (R, N); fp32, fp16 or bf16; the residual may be None
    dy_ptr, x_ptr, residual_ptr,
    # (N,), any floating dtype
    weight_ptr,
    # (R,), fp32
    rstd_ptr,
    # (R, N), contiguous, in the dtype of x
    dsum_ptr,
    # (programs, N), fp32
    partials_ptr,
    stride_dy_row, stride_dy_col, stride_x_row, stride_residual_row, rows_total, columns,
    HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    # All warps share each row, so that a thread sums over BLOCK_M without the other threads.
    dweight = tl.zeros([BLOCK_N], tl.float32)
    for first_row in range(program * BLOCK_M, rows_total, programs * BLOCK_M):
        total, _ = load_sum(
            x_ptr, residual_ptr, None, None,
            first_row, stride_x_row, stride_residual_row, rows_total, columns, 0, 1.0,
            HAS_RESIDUAL, False, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        rows, _, offsets, inside = row_offsets(
            first_row, stride_dy_row, stride_dy_col, rows_total, columns, BLOCK_M, BLOCK_N
        )
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < rows_total, other=0.0)
        normalised = total * rstd[:, None]
        dweight += tl.sum(dy * normalised, axis=0)
        dnormalised = dy * load_parameter(weight_ptr, cols, columns)
        along = row_mean(dnormalised * normalised, columns)
        dsum = (dnormalised - normalised * along[:, None]) * rstd[:, None]
        _, _, offsets, _ = row_offsets(first_row, columns, 1, rows_total, columns, BLOCK_M, BLOCK_N)
        tl.store(dsum_ptr + offsets, narrow(dsum, dsum_ptr.dtype.element_ty), mask=inside)
    pointers = partials_ptr + program.to(tl.int64) * columns + cols
    tl.store(pointers, dweight, mask=cols < columns)


def _shared_arguments(x, weight, rstd, residual) -> dict:
    require_rows(x=x, residual=residual)
    tile = row_tile(x.shape[1])
    return {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "rstd_ptr": rstd,
        "stride_x_row": x.stride(0),
        "stride_residual_row": 0 if residual is None else residual.stride(0),
        "rows_total": x.shape[0],
        "columns": x.shape[1],
        "HAS_RESIDUAL": residual is not None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def forward_launch(x, weight, residual, y, rstd, eps) -> Launch:
    """Return the launch of `rms_norm_forward`."""
    tile = row_tile(x.shape[1])
    arguments = {**_shared_arguments(x, weight, rstd, residual), "y_ptr": y, "eps": eps}
    grid = (ceil_div(x.shape[0], tile.block_m),)
    return row_launch("rms_norm_forward", _forward_kernel, grid, arguments, tile.num_warps)


def rms_norm_forward(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute weight · s · rstd with s = x + residual and rstd = 1 / sqrt(mean(s²) + eps).

    Args:
        x: Rows (R, N) with any stride between rows and a last stride of 1; fp32, fp16 or bf16.
        weight: Scale (N,) in any floating dtype.
        residual: Rows (R, N) in the dtype of `x` and with a last stride of 1, or None.
        eps: Term that is added to the mean of the squares.

    Returns:
        weight · s · rstd (R, N), contiguous, in the dtype of `x`; and rstd, fp32 (R,).

    Raises:
        ValueError: If N is above 8192, or a last stride is not 1.
    """
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if columns > 0:
        run(forward_launch, (x, *dense(weight), residual), (y, rstd), eps)
    return y, rstd


def backward_launch(dy, x, weight, rstd, residual, dsum, partials) -> Launch:
    """Return the first launch of `rms_norm_backward`, which writes partial sums."""
    arguments = {
        **_shared_arguments(x, weight, rstd, residual),
        "dy_ptr": dy,
        "dsum_ptr": dsum,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
    }
    num_warps = row_tile(x.shape[1]).num_warps
    grid = (partials.shape[0],)
    return row_launch("rms_norm_backward", _backward_kernel, grid, arguments, num_warps)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rms_norm_forward`; x + residual is computed again.

    `dy` (R, N) may have any strides. The gradient dweight of the weight is the sum of a fixed
    number of partial sums, so reruns agree bitwise.

    Returns:
        dsum, the gradient (R, N) of `x` and of `residual`, and dweight (N,).
    """
    rows, columns = x.shape
    dsum = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    partials = torch.empty((row_programs(x), columns), dtype=torch.float32, device=x.device)
    if columns > 0:
        run(backward_launch, (dy, x, *dense(weight, rstd), residual), (dsum, partials))
    return dsum, sum_partials(partials, weight.dtype)
