"""The gradient of an activation, fused into the GEMM that computes da = dy W2.

From the saved pre-activation h, the epilogue computes dh = da act'(h) and the sum of dh over the
rows, which is the gradient of the bias. It also computes a = act(h) again, because the gradient of
W2 needs a and saving a would cost memory. A second kernel computes the same results from a da that
exists in memory, without a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.activations import Activation, of_name
from fastbert.kernels.activation import LARGEST_PART, path_name, store_narrow, value_and_slope
from fastbert.kernels.gemm import GROUP_M, halves, product_tile, tile_position
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.reduction import sum_partials
from fastbert.kernels.tiles import (
    Tile,
    ceil_div,
    elementwise_tile,
    gemm_depth,
    gemm_programs,
    gemm_tile,
    target_of,
)


@triton.jit
def _store_partial(partials_ptr, partial, dh, cols, columns, total_columns):
    """Store the column sums of dh in row `partial` of the fp32 matrix [partials, total_columns]."""
    pointers = partials_ptr + partial.to(tl.int64) * total_columns + cols
    tl.store(pointers, tl.sum(dh, axis=0), mask=cols < columns)


@triton.jit
def _store_gradient(
    da, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, partial,
    stride_h_row, stride_h_col, rows_total, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, SUMS_ROWS: tl.constexpr, STORES_A: tl.constexpr,
):  # fmt: skip
    """Store the gradient dh of the pre-activation h for a tile of da.

    With SUMS_ROWS, the column sums of dh are stored too, and with STORES_A, a = act(h). a has
    `columns` columns; h and dh have twice as many if GATED. da must be 0 beyond the last row.
    """
    cols = first_col + tl.arange(0, da.shape[1])
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    rows = rows.to(tl.int64)
    h_offsets = rows[:, None] * stride_h_row + cols.to(tl.int64)[None, :] * stride_h_col
    h = tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
    a, slope = value_and_slope(h, FUNCTION, dh_ptr.dtype.element_ty)
    total_columns = columns
    if GATED:
        total_columns = 2 * columns
        h_offsets += columns.to(tl.int64) * stride_h_col
        linear = tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
        dlinear = da * a
        dlinear_offsets = rows[:, None] * total_columns + (columns + cols)[None, :]
        store_narrow(dh_ptr, dlinear_offsets, dlinear, inside)
        if SUMS_ROWS:
            _store_partial(partials_ptr + columns, partial, dlinear, cols, columns, total_columns)
        a *= linear
        da *= linear
    if STORES_A:
        store_narrow(a_ptr, rows[:, None] * columns + cols[None, :], a, inside)
    dh = da * slope
    store_narrow(dh_ptr, rows[:, None] * total_columns + cols[None, :], dh, inside)
    if SUMS_ROWS:
        _store_partial(partials_ptr, partial, dh, cols, columns, total_columns)


@triton.jit
def _store_gradients(
    da, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, partial,
    stride_h_row, stride_h_col, rows_total, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, SUMS_ROWS: tl.constexpr,
):  # fmt: skip
    """Call _store_gradient for a tile, or for each half of a wide tile to save registers."""
    if da.shape[1] > LARGEST_PART:
        left, right = halves(da)
        _store_gradient(
            left, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, partial,
            stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS, True,
        )  # fmt: skip
        _store_gradient(
            right, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col + left.shape[1],
            partial, stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS,
            True,
        )  # fmt: skip
    else:
        _store_gradient(
            da, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, partial,
            stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def _activation_gradient_kernel(
    da_ptr, h_ptr, dh_ptr, a_ptr, partials_ptr,
    stride_da_row, stride_da_col, stride_h_row, stride_h_col, rows_total, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, SUMS_ROWS: tl.constexpr, STORES_A: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(columns, BLOCK_N)
    partial = tl.program_id(0) // column_blocks
    rows = partial * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(0) % column_blocks * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    da_offsets = (
        rows.to(tl.int64)[:, None] * stride_da_row + cols.to(tl.int64)[None, :] * stride_da_col
    )
    da = tl.load(da_ptr + da_offsets, mask=inside, other=0.0).to(tl.float32)
    _store_gradient(
        da, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, partial,
        stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS, STORES_A,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def _linear_activation_gradient_kernel(
    dy_ptr, weight_ptr, h_ptr, dh_ptr, a_ptr, partials_ptr,
    stride_dy_row, stride_dy_col, stride_weight_row, stride_weight_col, stride_h_row, stride_h_col,
    rows_total, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, SUMS_ROWS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # weight is the weight of the second product, (depth, columns).
    row_blocks = tl.cdiv(rows_total, BLOCK_M)
    column_blocks = tl.cdiv(columns, BLOCK_N)
    tiles = row_blocks * column_blocks
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        block_row, block_column = tile_position(tile, row_blocks, column_blocks, GROUP_M)
        rows = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
        first_col = block_column * BLOCK_N
        da = product_tile(
            dy_ptr, weight_ptr, rows, first_col + tl.arange(0, BLOCK_N), rows_total, columns, depth,
            stride_dy_row, stride_dy_col, stride_weight_col, stride_weight_row,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
        da = tl.where((rows < rows_total)[:, None], da, 0.0)
        if BLOCK_N > 2 * LARGEST_PART:
            left, right = halves(da)
            _store_gradients(
                left, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, block_row,
                stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS,
            )  # fmt: skip
            _store_gradients(
                right, h_ptr, dh_ptr, a_ptr, partials_ptr, rows,
                first_col + BLOCK_N // 2, block_row,
                stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS,
            )  # fmt: skip
        else:
            _store_gradients(
                da, h_ptr, dh_ptr, a_ptr, partials_ptr, rows, first_col, block_row,
                stride_h_row, stride_h_col, rows_total, columns, FUNCTION, GATED, SUMS_ROWS,
            )  # fmt: skip


def activation_gradient_launch(da, h, dh, a, partials, activation: Activation) -> Launch:
    """Return the launch that computes the gradient of an activation from da."""
    rows, columns = da.shape
    tile = elementwise_tile()
    arguments = {
        "da_ptr": da,
        "h_ptr": h,
        "dh_ptr": dh,
        "a_ptr": a,
        "partials_ptr": partials,
        "stride_da_row": da.stride(0),
        "stride_da_col": da.stride(1),
        "stride_h_row": h.stride(0),
        "stride_h_col": h.stride(1),
        "rows_total": rows,
        "columns": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FUNCTION": activation.function_name,
        "GATED": activation.gated,
        "SUMS_ROWS": partials is not None,
        "STORES_A": a is not None,
    }
    grid = (ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n),)
    return Launch(
        "activation_backward",
        _activation_gradient_kernel,
        grid,
        arguments,
        tile.num_warps,
        tile.num_stages,
    )


def _partials(h: Tensor, block_m: int, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    shape = (ceil_div(h.shape[0], block_m), h.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=h.device)


def activation_backward(
    da: Tensor,
    h: Tensor,
    *,
    activation: str,
    sum_rows: bool = True,
    activated: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient dh of h in a = act(h); also the sum of dh over the rows, and a.

    The sum, which is the gradient of a bias, is None without `sum_rows`, and a is None without
    `activated`. da (M, N) and h (M, N), or h (M, 2N) for a gated activation, have any strides. The
    results are contiguous in the dtype of h. The sum is computed from fixed partial sums, so reruns
    agree bitwise. `activation` is a name in ``fastbert.activations``; another name raises
    ValueError.
    """
    chosen = of_name(activation)
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    a = torch.empty(da.shape, dtype=h.dtype, device=h.device) if activated else None
    partials = _partials(h, elementwise_tile().block_m, sum_rows)
    run(activation_gradient_launch, (da, h), (dh, a, partials), chosen)
    return dh, None if partials is None else sum_partials(partials, h.dtype), a


def linear_activation_gradient_launch(
    dy, weight, h, dh, a, partials, activation: Activation
) -> Launch:
    """Return the launch of the product that computes an activation's gradient in its epilogue."""
    (rows, depth), columns = dy.shape, weight.shape[1]
    tile, block_k = _gradient_tile(dy, weight, activation), gemm_depth(dy.dtype)
    arguments = {
        "dy_ptr": dy,
        "weight_ptr": weight,
        "h_ptr": h,
        "dh_ptr": dh,
        "a_ptr": a,
        "partials_ptr": partials,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "stride_weight_row": weight.stride(0),
        "stride_weight_col": weight.stride(1),
        "stride_h_row": h.stride(0),
        "stride_h_col": h.stride(1),
        "rows_total": rows,
        "columns": columns,
        "depth": depth,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "GROUP_M": GROUP_M,
        "FUNCTION": activation.function_name,
        "GATED": activation.gated,
        "SUMS_ROWS": partials is not None,
        "EVEN_K": depth % block_k == 0,
    }
    tiles = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n)
    return Launch(
        "feed_forward_backward",
        _linear_activation_gradient_kernel,
        (gemm_programs(dy, tile, tiles),),
        arguments,
        tile.num_warps,
        tile.num_stages,
    )


def _gradient_tile(dy: Tensor, weight: Tensor, activation: Activation) -> Tile:
    epilogue = "gated_backward" if activation.gated else "backward"
    return gemm_tile(dy.shape[0], weight.shape[1], dy.dtype, epilogue, target_of(dy))


def feed_forward_backward(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    *,
    activation: str,
    sum_rows: bool = True,
    path: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dh, the sum of dh over the rows, and a, as ``activation_backward`` for da = dy W2.

    dy (M, O) and `weight`, the second weight W2 (O, N), have one dtype; h is (M, N), or (M, 2N) for
    a gated activation. All three have any strides. `path` and the errors are as in
    ``linear_gelu_forward``, and `sum_rows` is as in ``activation_backward``.
    """
    chosen = of_name(activation)
    rows, columns = dy.shape[0], weight.shape[1]
    if path_name(path, dy, columns) == "library":
        options = {"activation": activation, "sum_rows": sum_rows}
        return activation_backward(dy @ weight, h, **options, activated=True)
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    a = torch.empty((rows, columns), dtype=h.dtype, device=h.device)
    partials = _partials(h, _gradient_tile(dy, weight, chosen).block_m, sum_rows)
    run(linear_activation_gradient_launch, (dy, weight, h), (dh, a, partials), chosen)
    return dh, None if partials is None else sum_partials(partials, h.dtype), a
