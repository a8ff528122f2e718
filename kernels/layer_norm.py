"""LN(residual + dropout(x + x_bias)) over the last dimension and its backward (Ba et al. 2016).

Both passes are bound by memory: a program reads whole rows once and keeps them in registers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import (
    Launch,
    dropout_arguments,
    dropout_keep,
    multiprocessors,
    narrow,
    row_tile,
)


@triton.jit
def _row_offsets(
    first_row, stride_row, rows_total, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Rows, offsets and bounds of a tile [BLOCK_M, BLOCK_N]."""
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    return rows, cols, offsets, inside


@triton.jit
def _normalised_sum(
    x_ptr, residual_ptr, x_bias_ptr, seed_ptr,
    first_row, stride_x_row, stride_residual_row, rows_total, columns,
    dropout_threshold, dropout_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """residual + dropout(x + x_bias) in fp32, 0 outside the rows, and what dropout kept."""
    rows, cols, offsets, inside = _row_offsets(
        first_row, stride_x_row, rows_total, columns, BLOCK_M, BLOCK_N
    )
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if HAS_X_BIAS:
        x_bias = tl.load(x_bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
        total += x_bias[None, :]
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        zero = first_row * 0
        keep = dropout_keep(seed, rows, zero, zero, 0, dropout_threshold, BLOCK_N)
        total = tl.where(keep, total * dropout_scale, 0.0)
    if HAS_RESIDUAL:
        _, _, offsets, _ = _row_offsets(
            first_row, stride_residual_row, rows_total, columns, BLOCK_M, BLOCK_N
        )
        total += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, total, 0.0), keep


@triton.jit(do_not_specialize=["rows_total"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, x_bias_ptr, seed_ptr, y_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, rows_total, columns, eps, dropout_threshold, dropout_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * BLOCK_M
    total, _ = _normalised_sum(
        x_ptr, residual_ptr, x_bias_ptr, seed_ptr,
        first_row, stride_x_row, stride_residual_row, rows_total, columns,
        dropout_threshold, dropout_scale,
        HAS_RESIDUAL, HAS_X_BIAS, HAS_DROPOUT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows, cols, offsets, inside = _row_offsets(
        first_row, columns, rows_total, columns, BLOCK_M, BLOCK_N
    )
    # The mean of a long row far from 0 loses bits; the mean of what is left after it restores them.
    mean = tl.sum(total, axis=1) / columns
    centred = tl.where(inside, total - mean[:, None], 0.0)
    correction = tl.sum(centred, axis=1) / columns
    centred = tl.where(inside, centred - correction[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / columns
    rstd = 1.0 / tl.sqrt(variance + eps)
    weight = tl.load(weight_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + offsets, narrow(y, y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + rows, mean + correction, mask=rows < rows_total)
    tl.store(rstd_ptr + rows, rstd, mask=rows < rows_total)


@triton.jit(do_not_specialize=["rows_total"])
def _backward_kernel(
    dy_ptr, x_ptr, residual_ptr, weight_ptr, x_bias_ptr, seed_ptr, mean_ptr, rstd_ptr,
    dsum_ptr, dx_ptr, partials_ptr,
    stride_dy_row, stride_x_row, stride_residual_row, rows_total, columns,
    dropout_threshold, dropout_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    weight = tl.load(weight_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
    # Summed over this program's rows elementwise; the sum over BLOCK_M waits until the end.
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dx_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_row in range(program * BLOCK_M, rows_total, programs * BLOCK_M):
        total, keep = _normalised_sum(
            x_ptr, residual_ptr, x_bias_ptr, seed_ptr,
            tl.cast(first_row, tl.int32), stride_x_row, stride_residual_row, rows_total, columns,
            dropout_threshold, dropout_scale,
            HAS_RESIDUAL, HAS_X_BIAS, HAS_DROPOUT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        rows, _, offsets, inside = _row_offsets(
            first_row, stride_dy_row, rows_total, columns, BLOCK_M, BLOCK_N
        )
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < rows_total, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < rows_total, other=0.0)
        # As in the forward: what one fp32 mean of a row far from 0 leaves is taken off as well.
        centred = tl.where(inside, total - mean[:, None], 0.0)
        correction = tl.sum(centred, axis=1) / columns
        normalised = tl.where(inside, (centred - correction[:, None]) * rstd[:, None], 0.0)
        dweight += dy * normalised
        dbias += dy
        dnormalised = dy * weight[None, :]
        along = tl.sum(dnormalised * normalised, axis=1) / columns
        average = tl.sum(dnormalised, axis=1) / columns
        dsum = dnormalised - average[:, None] - normalised * along[:, None]
        dsum = tl.where(inside, dsum * rstd[:, None], 0.0)
        _, _, offsets, _ = _row_offsets(first_row, columns, rows_total, columns, BLOCK_M, BLOCK_N)
        tl.store(dsum_ptr + offsets, narrow(dsum, dsum_ptr.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            dsum = tl.where(keep, dsum * dropout_scale, 0.0)
            tl.store(dx_ptr + offsets, narrow(dsum, dx_ptr.dtype.element_ty), mask=inside)
        if HAS_X_BIAS:
            dx_bias += dsum
    # partials: fp32 [2 or 3, programs, columns]
    partials = partials_ptr + program.to(tl.int64) * columns + cols
    plane = programs.to(tl.int64) * columns
    tl.store(partials, tl.sum(dweight, axis=0), mask=cols < columns)
    tl.store(partials + plane, tl.sum(dbias, axis=0), mask=cols < columns)
    if HAS_X_BIAS:
        tl.store(partials + 2 * plane, tl.sum(dx_bias, axis=0), mask=cols < columns)


def _shared_arguments(x, residual, x_bias, seed, dropout_p: float) -> dict:
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: got last stride {tensor.stride(-1)}, allowed: 1")
    tile = row_tile(x.shape[1])
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


def _forward_launch(
    x, weight, bias, y, mean, rstd, residual, x_bias, seed, dropout_p, eps
) -> Launch:
    tile = row_tile(x.shape[1])
    arguments = {
        **_shared_arguments(x, residual, x_bias, seed, dropout_p),
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "eps": eps,
    }
    grid = (triton.cdiv(x.shape[0], tile.block_m),)
    return Launch("layer_norm_forward", _forward_kernel, grid, arguments, tile.num_warps, 1)


def layer_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = LN(residual + dropout(x + x_bias)), with the row statistics that the backward needs.

    x and residual (R, N) in one dtype, rows at any stride, last stride 1; weight, bias, x_bias (N,)
    in any floating dtype; seed int64 (1,). Returns y (R, N) contiguous in x's dtype, mean and rstd
    fp32 (R,). ValueError: N above 65536, a last stride other than 1, dropout without a seed.
    """
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if columns > 0:
        _forward_launch(x, weight, bias, y, mean, rstd, residual, x_bias, seed, dropout_p, eps).run(
            on=x
        )
    return y, mean, rstd


def _backward_launch(
    dy, x, weight, mean, rstd, dsum, dx, partials, residual, x_bias, seed, dropout_p
) -> Launch:
    tile = row_tile(x.shape[1])
    arguments = {
        **_shared_arguments(x, residual, x_bias, seed, dropout_p),
        "dy_ptr": dy,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dsum_ptr": dsum,
        "dx_ptr": dx,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
    }
    grid = (partials.shape[1],)
    return Launch("layer_norm_backward", _backward_kernel, grid, arguments, tile.num_warps, 1)


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
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """(dsum, dx, dweight, dbias, dx_bias) of ``layer_norm_forward``; the sum is recomputed.

    dsum (R, N) is the gradient of the sum, so of residual too; dx is None without dropout, where it
    would equal dsum, and dx_bias None without x_bias. The bias takes its gradient in weight's
    dtype. Parameter gradients are reduced in fp32 over a fixed number of partial sums: reruns agree
    bitwise.
    """
    rows, columns = x.shape
    if columns > 1 and dy.stride(1) != 1:
        dy = dy.contiguous()
    dsum = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    dx = torch.empty_like(dsum) if dropout_p > 0.0 else None
    tile = row_tile(columns)
    programs = min(triton.cdiv(rows, tile.block_m), 2 * multiprocessors(x))
    planes = 2 if x_bias is None else 3
    partials = torch.empty((planes, programs, columns), dtype=torch.float32, device=x.device)
    if columns > 0:
        _backward_launch(
            dy, x, weight, mean, rstd, dsum, dx, partials, residual, x_bias, seed, dropout_p
        ).run(on=x)
    # fp64: a few hundred partial sums added one by one in fp32 lose more than all of them hold.
    sums = partials.sum(dim=1, dtype=torch.float64)
    dx_bias = None if x_bias is None else sums[2].to(x_bias.dtype)
    return dsum, dx, sums[0].to(weight.dtype), sums[1].to(weight.dtype), dx_bias


def shipped_launches() -> Iterator[Launch]:
    """Representative launches, on meta tensors, for the ahead-of-time gate."""
    for dtype, columns, dropout_p in (
        (torch.bfloat16, 384, 0.1),
        (torch.bfloat16, 1024, 0.1),
        (torch.float32, 3584, 0.0),
    ):
        x = torch.empty((512, columns), dtype=dtype, device="meta")
        row = torch.empty(columns, dtype=torch.float32, device="meta")
        statistic = torch.empty(512, dtype=torch.float32, device="meta")
        seed = torch.empty(1, dtype=torch.int64, device="meta")
        partials = torch.empty((3, 264, columns), dtype=torch.float32, device="meta")
        yield _forward_launch(x, row, row, x, statistic, statistic, x, row, seed, dropout_p, 1e-12)
        yield _backward_launch(
            x, x, row, statistic, statistic, x, x, partials, x, row, seed, dropout_p
        )
