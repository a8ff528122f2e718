"""Deterministic sums over rows without atomics, for the gradients of biases and norms.

A matrix of many rows is summed in two launches. Each program of the first launch adds a fixed
number of rows into one partial sum in fp32, and the second launch adds the partial sums in fp64.
Reruns agree bitwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.tiles import ceil_div, partial_sums_tile, sum_partials_tile

# The number of rows that a program of the first launch adds.
ROWS_PER_PARTIAL = 128


@triton.jit(do_not_specialize=["rows_total"])
def _partial_sums_kernel(
    x_ptr, partials_ptr, stride_x_row, stride_x_col, rows_total, columns,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(columns, BLOCK_N)
    partial = tl.program_id(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_row in tl.static_range(0, ROWS, BLOCK_M):
        rows = partial * ROWS + first_row + tl.arange(0, BLOCK_M)
        offsets = (
            rows.to(tl.int64)[:, None] * stride_x_row + cols.to(tl.int64)[None, :] * stride_x_col
        )
        inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
        total += tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    pointers = partials_ptr + partial.to(tl.int64) * columns + cols
    tl.store(pointers, tl.sum(total, axis=0), mask=cols < columns)


@triton.jit
def _store_sum(out_ptr, result, cols, columns):
    result = narrow(result, out_ptr.dtype.element_ty)
    tl.store(out_ptr + cols, result, mask=cols < columns)


@triton.jit(do_not_specialize=["rows_total"])
def _sum_partials_kernel(
    partials_ptr, out_ptr, second_out_ptr, third_out_ptr, rows_total, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(columns, BLOCK_N)
    plane = tl.program_id(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    partials_ptr += plane.to(tl.int64) * rows_total * columns
    # The sum is in fp64, because hundreds of additions in fp32 would have a larger error than the
    # partial sums themselves.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64)
    for first_row in range(0, rows_total, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        offsets = rows.to(tl.int64)[:, None] * columns + cols[None, :]
        inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
        total += tl.load(partials_ptr + offsets, mask=inside, other=0.0).to(tl.float64)
    result = tl.sum(total, axis=0).to(tl.float32)
    # Each plane is stored in its own tensor, because outputs of one operator may not share memory.
    if plane == 0:
        _store_sum(out_ptr, result, cols, columns)
    elif plane == 1:
        _store_sum(second_out_ptr, result, cols, columns)
    else:
        _store_sum(third_out_ptr, result, cols, columns)


def sum_partials_launch(partials: Tensor, *outs: Tensor) -> Launch:
    """Return the launch that adds the P partial sums of each plane of `partials`.

    `partials` is contiguous fp32 (planes, P, N) with one to three planes. `outs` has a contiguous
    tensor of N elements for the result of each plane.
    """
    planes, rows, columns = partials.shape
    tile = sum_partials_tile()
    # The kernel takes three pointers; the pointer of an absent plane is not used.
    first, second, third = (*outs, outs[0], outs[0])[:3]
    arguments = {
        "partials_ptr": partials,
        "out_ptr": first,
        "second_out_ptr": second,
        "third_out_ptr": third,
        "rows_total": rows,
        "columns": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    grid = (planes * ceil_div(columns, tile.block_n),)
    return Launch("sum_partials", _sum_partials_kernel, grid, arguments, tile.num_warps, 1)


def sum_planes(partials: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """Return a tensor (N,) for each plane of `partials`: the sum of the plane's P partial sums.

    `partials` is contiguous fp32 (planes, P, N) with one to three planes. `dtypes` has the dtype of
    the result of each plane.
    """
    columns = partials.shape[2]
    outs = [torch.empty(columns, dtype=dtype, device=partials.device) for dtype in dtypes]
    run(sum_partials_launch, (partials,), outs)
    return outs


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum (N,) in `dtype` of P partial sums, contiguous fp32 (P, N)."""
    return sum_planes(partials[None], dtype)[0]


def partial_sums_launch(x: Tensor, partials: Tensor) -> Launch:
    """Return the launch that adds `ROWS_PER_PARTIAL` rows of `x` for each row of `partials`."""
    rows, columns = x.shape
    tile = partial_sums_tile()
    arguments = {
        "x_ptr": x,
        "partials_ptr": partials,
        "stride_x_row": x.stride(0),
        "stride_x_col": x.stride(1),
        "rows_total": rows,
        "columns": columns,
        "ROWS": ROWS_PER_PARTIAL,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    grid = (partials.shape[0] * ceil_div(columns, tile.block_n),)
    return Launch("partial_sums", _partial_sums_kernel, grid, arguments, tile.num_warps, 1)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum (N,) in `dtype` over the rows of `x` (M, N), at any strides.

    If `x` is the gradient of a linear layer's result, the sum is the gradient of the layer's bias.
    """
    rows, columns = x.shape
    shape = (ceil_div(rows, ROWS_PER_PARTIAL), columns)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    run(partial_sums_launch, (x,), (partials,))
    return sum_partials(partials, dtype)
