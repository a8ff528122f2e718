"""Backward of linear_cross_entropy, from the statistics that its forward returns.

The backward divides the vocabulary into chunks of columns. For each chunk, a first kernel
recomputes the logits and writes their gradient. Three kernels then compute the gradients of weight,
bias and hidden. The gradients of weight and bias are complete for the columns of the chunk, and the
gradient of hidden is summed over the chunks in fp32. Triton kernels compute all products, because a
library GEMM would need the number of labelled rows on the host. As in cross_entropy.py, the place
of a row is its position in the list `order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import INTERPRETED, LOG2E, dot, narrow
from fastbert.kernels.cross_entropy import (
    LOWEST,
    Projection,
    is_mean,
    labelled_rows,
    logits_tile,
)
from fastbert.kernels.gemm import GROUP_M, tile_position
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.tiles import ceil_div

# GRADIENT_BYTES is the largest size of the gradient of a chunk's logits in memory, unless the chunk
# would have fewer than FEWEST_COLUMNS columns. With fewer columns, the product that computes the
# gradient of the weight would not fill a GPU.
GRADIENT_BYTES = 64 * 1024 * 1024
FEWEST_COLUMNS = 2048


@triton.jit
def _column_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each column of x [ROWS, COLUMNS], added in a tree as on a GPU."""
    if INTERPRETED:
        # NumPy, which the interpreter calls, would add the rows of a column one after another.
        half: tl.constexpr = ROWS // 2
        while half > 0:
            x = tl.sum(tl.reshape(x, [2, half, COLUMNS]), axis=0)
            half //= 2
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=["rows_total", "first_column", "chunk_columns"])
def _dlogits_kernel(
    # () or (T,), fp32
    dloss_ptr,
    # (T, K) and (V, K); fp32, fp16 or bf16
    hidden_ptr, weight_ptr,
    # (V,), any floating dtype; or None
    bias_ptr,
    # (T,), int32 or int64
    labels_ptr,
    # (T + 1,), int32
    order_ptr,
    # (2, T), fp32, by place
    statistics_ptr,
    # (T rounded up to whole blocks, columns of the largest chunk), in the dtype of hidden, by place
    dlogits_ptr,
    # (row blocks, columns of the largest chunk), fp32; None without a bias
    partials_ptr,
    stride_dloss, stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
    stride_labels, stride_dlogits_row, rows_total, columns, depth, first_column, chunk_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_MEAN: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits, (softmax - one hot) dloss, for the columns of a chunk.

    The rows are in the order of their places. Blocks of rows without a labelled row are not
    written; in the last written block, the rows without a label are 0. With a bias, also write the
    sum of each column over each block of rows.
    """
    column_blocks = tl.cdiv(chunk_columns, BLOCK_N)
    count = tl.load(order_ptr + rows_total)
    row_blocks = tl.cdiv(count, BLOCK_M)
    if tl.program_id(0) >= row_blocks * column_blocks:
        return
    row_block, column_block = tile_position(tl.program_id(0), row_blocks, column_blocks, GROUP_M)
    places = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = labelled_rows(order_ptr, places, count)
    chunk_cols = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = first_column + chunk_cols
    logits = logits_tile(
        hidden_ptr, weight_ptr, bias_ptr, rows, cols, rows_total, columns, depth,
        stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
        BLOCK_M, BLOCK_N, BLOCK_K, HAS_BIAS, EVEN_K,
    )  # fmt: skip
    labelled = places < count
    labels = tl.load(labels_ptr + rows.to(tl.int64) * stride_labels)
    highest = tl.load(statistics_ptr + places, mask=labelled, other=-LOWEST)
    sums_ptr = statistics_ptr + tl.cast(rows_total, tl.int64)
    total = tl.load(sums_ptr + places, mask=labelled, other=1.0)
    dloss = tl.load(dloss_ptr + rows.to(tl.int64) * stride_dloss, mask=labelled, other=0.0)
    if IS_MEAN:
        dloss = tl.div_rn(dloss, count.to(tl.float32))
    exponentials = tl.exp2((logits - highest[:, None]) * LOG2E)
    # The gradient of the label's logit is (p - 1) g, with its probability p and g = dloss. It is
    # computed as p g - g. If p is small, the rounding of p g hardly changes the difference, whereas
    # (p - 1) g would be rounded twice.
    own = tl.where(cols[None, :] == labels[:, None], dloss[:, None], 0.0)
    dlogits = exponentials * tl.div_rn(dloss, total)[:, None] - own
    # Rows from place `count` on are copies of the first row, which may hold NaN.
    dlogits = tl.where(labelled[:, None], dlogits, 0.0)
    offsets = places.to(tl.int64)[:, None] * stride_dlogits_row + chunk_cols[None, :]
    tl.store(dlogits_ptr + offsets, narrow(dlogits, dlogits_ptr.dtype.element_ty))
    if HAS_BIAS:
        offsets = row_block.to(tl.int64) * stride_dlogits_row + chunk_cols
        tl.store(partials_ptr + offsets, _column_sums(dlogits, BLOCK_M, BLOCK_N))


@triton.jit(do_not_specialize=["rows_total", "first_column"])
def _dbias_kernel(
    # (row blocks, columns of the largest chunk), fp32
    partials_ptr,
    # (T + 1,), int32
    order_ptr,
    # (V,), any floating dtype
    dbias_ptr,
    stride_partials_row, rows_total, columns, first_column,
    ROWS_PER_PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the bias for the chunk's columns."""
    row_blocks = tl.cdiv(tl.load(order_ptr + rows_total), ROWS_PER_PARTIAL)
    chunk_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The partial sums are added in fp64, as in reduction.py.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float64)
    for first in range(0, row_blocks, BLOCK_M):
        blocks = first + tl.arange(0, BLOCK_M)
        offsets = blocks.to(tl.int64)[:, None] * stride_partials_row + chunk_cols[None, :]
        partials = tl.load(partials_ptr + offsets, mask=(blocks < row_blocks)[:, None], other=0.0)
        total += partials.to(tl.float64)
    dbias = narrow(tl.sum(total, axis=0).to(tl.float32), dbias_ptr.dtype.element_ty)
    cols = first_column + chunk_cols
    tl.store(dbias_ptr + cols, dbias, mask=cols < columns)


@triton.jit(do_not_specialize=["rows_total", "first_column", "chunk_columns"])
def _dweight_kernel(
    # (T rounded up to whole blocks, columns of the largest chunk) and (T, K), in one dtype
    dlogits_ptr, hidden_ptr,
    # (T + 1,), int32
    order_ptr,
    # (V, K), contiguous, in the dtype of weight
    dweight_ptr,
    stride_dlogits_row, stride_hidden_row, stride_hidden_col,
    rows_total, depth, first_column, chunk_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write dlogitsᵀ hidden for the chunk's columns, summed over the labelled rows."""
    row_blocks, column_blocks = tl.cdiv(chunk_columns, BLOCK_M), tl.cdiv(depth, BLOCK_N)
    row_block, column_block = tile_position(tl.program_id(0), row_blocks, column_blocks, GROUP_M)
    chunk_cols = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = (column_block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    count = tl.load(order_ptr + rows_total)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_K):
        places = first + tl.arange(0, BLOCK_K)
        rows = labelled_rows(order_ptr, places, count)
        # dlogits [BLOCK_M, BLOCK_K] is 0 at the places from `count` on.
        dlogits = tl.load(
            dlogits_ptr + places.to(tl.int64)[None, :] * stride_dlogits_row + chunk_cols[:, None]
        )
        hidden_rows_ptr = hidden_ptr + rows.to(tl.int64)[:, None] * stride_hidden_row
        # [BLOCK_K, BLOCK_N]
        hidden = tl.load(
            hidden_rows_ptr + ns[None, :] * stride_hidden_col,
            mask=(ns < depth)[None, :], other=0.0,
        )  # fmt: skip
        accumulator = dot(dlogits, hidden, accumulator)
    offsets = (first_column + chunk_cols).to(tl.int64)[:, None] * depth + ns[None, :]
    inside = (chunk_cols < chunk_columns)[:, None] & (ns < depth)[None, :]
    tl.store(dweight_ptr + offsets, narrow(accumulator, dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows_total", "first_column", "chunk_columns"])
def _dhidden_kernel(
    # (T rounded up to whole blocks, columns of the largest chunk) and (V, K), in one dtype
    dlogits_ptr, weight_ptr,
    # (T + 1,), int32
    order_ptr,
    # (T, K), fp32, by place; None for a single chunk
    sums_ptr,
    # (T, K), contiguous, in the dtype of hidden
    dhidden_ptr,
    stride_dlogits_row, stride_weight_row, stride_weight_col,
    rows_total, depth, first_column, chunk_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Add dlogits W to the fp32 sums of dhidden.

    The first chunk starts the sums. The last chunk writes the complete dhidden of every row, which
    is 0 for a row without a label, instead of the sums.
    """
    row_blocks, column_blocks = tl.cdiv(rows_total, BLOCK_M), tl.cdiv(depth, BLOCK_N)
    row_block, column_block = tile_position(tl.program_id(0), row_blocks, column_blocks, GROUP_M)
    places = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = (column_block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    count = tl.load(order_ptr + rows_total)
    labelled = (places < count)[:, None]
    dlogits_rows_ptr = dlogits_ptr + places.to(tl.int64)[:, None] * stride_dlogits_row
    weight_cols_ptr = weight_ptr + ns[None, :] * stride_weight_col
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # For a block without a labelled row, `_dlogits_kernel` has written nothing.
    end = tl.where(row_block * BLOCK_M < count, chunk_columns, 0)
    for first in range(0, end, BLOCK_K):
        chunk_cols = first + tl.arange(0, BLOCK_K)
        cols = (first_column + chunk_cols).to(tl.int64)
        # [BLOCK_M, BLOCK_K]
        dlogits = tl.load(dlogits_rows_ptr + chunk_cols[None, :])
        inside = (chunk_cols < chunk_columns)[:, None] & (ns < depth)[None, :]
        # [BLOCK_K, BLOCK_N]
        weight = tl.load(
            weight_cols_ptr + cols[:, None] * stride_weight_row, mask=inside, other=0.0
        )
        accumulator = dot(dlogits, weight, accumulator)
    offsets = places.to(tl.int64)[:, None] * depth + ns[None, :]
    inside = (ns < depth)[None, :]
    if not IS_FIRST:
        accumulator += tl.load(sums_ptr + offsets, mask=labelled & inside, other=0.0)
    if IS_LAST:
        exists = places < rows_total
        rows = tl.load(order_ptr + places, mask=exists, other=0).to(tl.int64)
        dhidden = narrow(accumulator, dhidden_ptr.dtype.element_ty)
        offsets = rows[:, None] * depth + ns[None, :]
        tl.store(dhidden_ptr + offsets, dhidden, mask=exists[:, None] & inside)
    else:
        tl.store(sums_ptr + offsets, accumulator, mask=labelled & inside)


class Chunk(NamedTuple):
    """A chunk of the vocabulary: `count` columns, of which the first is the column `first`."""

    first: int
    count: int
    is_first: bool
    is_last: bool


def chunk_columns(given: Projection) -> int:
    """Return the number of columns of the largest chunk, a multiple of the tile's width."""
    tile, _ = given.tile
    rows = max(1, given.row_blocks * tile.block_m)
    most = GRADIENT_BYTES // (rows * given.hidden.dtype.itemsize)
    blocks = ceil_div(given.columns, tile.block_n)
    return max(1, min(max(most, FEWEST_COLUMNS) // tile.block_n, blocks)) * tile.block_n


def _chunks(given: Projection) -> Iterator[Chunk]:
    """Yield the chunks in order; there is at least one, so that every gradient is written."""
    step, end = chunk_columns(given), given.columns
    for first in range(0, max(end, 1), step):
        yield Chunk(first, min(step, end - first), first == 0, first + step >= end)


def _dlogits_launch(
    given: Projection, chunk: Chunk, dloss, statistics, order, dlogits, partials, mean: bool
) -> Launch:
    tile, _ = given.tile
    arguments = {
        **given.arguments(order),
        "dloss_ptr": dloss,
        "statistics_ptr": statistics,
        "dlogits_ptr": dlogits,
        "partials_ptr": partials,
        "stride_dloss": dloss.stride(0) if dloss.dim() else 0,
        "stride_dlogits_row": dlogits.stride(0),
        "first_column": chunk.first,
        "chunk_columns": chunk.count,
        "GROUP_M": GROUP_M,
        "IS_MEAN": mean,
    }
    return Launch(
        "cross_entropy_dlogits",
        _dlogits_kernel,
        (given.row_blocks * ceil_div(chunk.count, tile.block_n),),
        arguments,
        tile.num_warps,
        tile.num_stages,
    )


def _dbias_launch(given: Projection, chunk: Chunk, order, partials, dbias) -> Launch:
    block_n = 64
    arguments = {
        "partials_ptr": partials,
        "order_ptr": order,
        "dbias_ptr": dbias,
        "stride_partials_row": partials.stride(0),
        "rows_total": given.rows,
        "columns": given.columns,
        "first_column": chunk.first,
        "ROWS_PER_PARTIAL": given.tile[0].block_m,
        "BLOCK_M": 32,
        "BLOCK_N": block_n,
    }
    grid = (ceil_div(chunk.count, block_n),)
    return Launch("cross_entropy_dbias", _dbias_kernel, grid, arguments, 4, 1)


def _product_launch(
    name: str, kernel, rows: int, stages: int, given: Projection, chunk: Chunk, **own
) -> Launch:
    """Return the launch of a product with the chunk's dlogits; the result has shape (rows, K)."""
    tile, block_k = given.tile
    arguments = {
        "rows_total": given.rows,
        "depth": given.depth,
        "first_column": chunk.first,
        "chunk_columns": chunk.count,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        # dlogits has whole blocks of block_m rows and block_n columns; a larger BLOCK_K could read
        # beyond its end.
        "BLOCK_K": min(block_k, tile.block_m, tile.block_n),
        "GROUP_M": GROUP_M,
        **own,
    }
    grid = (ceil_div(rows, tile.block_m) * ceil_div(given.depth, tile.block_n),)
    return Launch(name, kernel, grid, arguments, tile.num_warps, stages)


def _dweight_launch(given: Projection, chunk: Chunk, order, dlogits, dweight) -> Launch:
    return _product_launch(
        "cross_entropy_dweight",
        _dweight_kernel,
        chunk.count,
        # Triton uses half of the pipeline stages for the loads of row indices from `order`, which
        # must arrive before the rows themselves can be loaded.
        given.tile[0].num_stages + 2,
        given,
        chunk,
        dlogits_ptr=dlogits,
        hidden_ptr=given.hidden,
        order_ptr=order,
        dweight_ptr=dweight,
        stride_dlogits_row=dlogits.stride(0),
        stride_hidden_row=given.hidden.stride(0),
        stride_hidden_col=given.hidden.stride(1),
    )


def _dhidden_launch(given: Projection, chunk: Chunk, order, dlogits, sums, dhidden) -> Launch:
    return _product_launch(
        "cross_entropy_dhidden",
        _dhidden_kernel,
        given.rows,
        given.tile[0].num_stages,
        given,
        chunk,
        dlogits_ptr=dlogits,
        weight_ptr=given.weight,
        order_ptr=order,
        sums_ptr=sums,
        dhidden_ptr=dhidden,
        stride_dlogits_row=dlogits.stride(0),
        stride_weight_row=given.weight.stride(0),
        stride_weight_col=given.weight.stride(1),
        IS_FIRST=chunk.is_first,
        IS_LAST=chunk.is_last,
    )


def backward_launches(
    dloss, hidden, weight, bias, labels, statistics, order,
    dlogits, partials, sums, dhidden, dweight, dbias, mean,
) -> list[Launch]:  # fmt: skip
    """Return the launches of `linear_cross_entropy_backward` in order, chunk by chunk."""
    given = Projection(hidden, weight, bias, labels)
    launches = []
    for chunk in _chunks(given):
        launches.append(
            _dlogits_launch(given, chunk, dloss, statistics, order, dlogits, partials, mean)
        )
        if bias is not None:
            launches.append(_dbias_launch(given, chunk, order, partials, dbias))
        launches.append(_dweight_launch(given, chunk, order, dlogits, dweight))
        launches.append(_dhidden_launch(given, chunk, order, dlogits, sums, dhidden))
    return launches


def linear_cross_entropy_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    order: Tensor,
    *,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of `linear_cross_entropy_forward`; reruns agree bitwise.

    The gradient of the logits is computed in chunks of columns. A chunk takes at most 64 MiB, or
    has 2,048 columns if this number of columns takes more.

    Args:
        dloss: Gradient of the loss, fp32 (), or (T,) for the reduction "none", at any strides.
        hidden: As in the forward.
        weight: As in the forward.
        bias: As in the forward.
        labels: As in the forward.
        statistics: Statistics that the forward returned.
        order: The list of row indices, `order`, that the forward returned.
        reduction: As in the forward.

    Returns:
        dhidden (T, K), which is 0 in rows without a label; dweight (V, K); and dbias (V,), or None
        without a bias. Each gradient is contiguous and has the dtype of the tensor to which it
        belongs.

    Raises:
        ValueError: If `reduction` is unknown.
    """
    (bias,) = dense(bias)
    given, mean = Projection(hidden, weight, bias, labels), is_mean(reduction)
    tile, device = given.tile[0], hidden.device
    shape = (given.row_blocks * tile.block_m, chunk_columns(given))
    dlogits = torch.empty(shape, dtype=hidden.dtype, device=device)
    dhidden, dweight = (
        torch.empty(x.shape, dtype=x.dtype, device=device) for x in (hidden, weight)
    )
    dbias = partials = sums = None
    if bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=device)
        partials = torch.empty((given.row_blocks, shape[1]), dtype=torch.float32, device=device)
    if given.columns > shape[1]:
        sums = torch.empty(hidden.shape, dtype=torch.float32, device=device)
    inputs = (dloss, hidden, weight, bias, labels, statistics, order)
    run(backward_launches, inputs, (dlogits, partials, sums, dhidden, dweight, dbias), mean)
    return dhidden, dweight, dbias
