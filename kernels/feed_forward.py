"""act(x Wᵀ + b) in one persistent GEMM: the epilogue adds the bias and applies the activation.

On the library path (tiles.gemm_path), torch computes x Wᵀ + b, and a second kernel applies the
activation. ``fastbert.activations`` lists the activations. A gated activation (Shazeer 2020)
applies its function to the first half of the columns and multiplies the result by the second half.

The backward reads the pre-activation, which is saved after the addition of the bias. If the
backward added the bias again, rounding could change the sign of a sum near 0, and the slope of ReLU
depends on that sign alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastbert.activations import Activation, of_name
from fastbert.kernels.activation import (
    LARGEST_PART,
    activate,
    biased,
    path_name,
    store_narrow,
)
from fastbert.kernels.gemm import GROUP_M, halves, product_tile, tile_position
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.tiles import (
    ceil_div,
    elementwise_tile,
    gemm_depth,
    gemm_programs,
    gemm_tile,
    target_of,
)


@triton.jit
def _store_activation(
    h, linear, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVES_H: tl.constexpr,
):  # fmt: skip
    """Add the bias to a tile of the product; store y and, if SAVES_H, the pre-activation h.

    If GATED, h is the gate of the tile and `linear` is the factor that the gate multiplies. The
    saved pre-activation then has 2 · `columns` columns, and y has `columns` columns.
    """
    cols = first_col + tl.arange(0, h.shape[1])
    inside_columns = cols < columns
    inside = (rows < rows_total)[:, None] & inside_columns[None, :]
    offsets = rows.to(tl.int64)[:, None] * columns + cols[None, :]
    h = biased(h, bias_ptr, cols, inside_columns, HAS_BIAS)
    y = activate(h, FUNCTION, y_ptr.dtype.element_ty)
    if GATED:
        linear = biased(linear, bias_ptr, columns + cols, inside_columns, HAS_BIAS)
        y *= linear
        if SAVES_H:
            h_offsets = rows.to(tl.int64)[:, None] * (2 * columns) + cols[None, :]
            store_narrow(h_ptr, h_offsets, h, inside)
            store_narrow(h_ptr + columns, h_offsets, linear, inside)
    elif SAVES_H:
        store_narrow(h_ptr, offsets, h, inside)
    store_narrow(y_ptr, offsets, y, inside)


@triton.jit
def _store_activations(
    h, linear, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVES_H: tl.constexpr,
):  # fmt: skip
    """Call _store_activation for a tile, or for each half of a wide tile to save registers."""
    if h.shape[1] > LARGEST_PART:
        left, right = halves(h)
        linear_left, linear_right = halves(linear)
        _store_activation(
            left, linear_left, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
            FUNCTION, GATED, HAS_BIAS, SAVES_H,
        )  # fmt: skip
        _store_activation(
            right, linear_right, bias_ptr, y_ptr, h_ptr, rows, first_col + left.shape[1],
            rows_total, columns, FUNCTION, GATED, HAS_BIAS, SAVES_H,
        )  # fmt: skip
    else:
        _store_activation(
            h, linear, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
            FUNCTION, GATED, HAS_BIAS, SAVES_H,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def _linear_activation_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr,
    stride_x_row, stride_x_col, stride_weight_row, stride_weight_col,
    rows_total, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVES_H: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    # y has `columns` columns, and a tile of y has WIDTH columns. If GATED, the product is twice as
    # wide.
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_blocks = tl.cdiv(rows_total, BLOCK_M)
    column_blocks = tl.cdiv(columns, WIDTH)
    tiles = row_blocks * column_blocks
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        block_row, block_column = tile_position(tile, row_blocks, column_blocks, GROUP_M)
        rows = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
        first_col = block_column * WIDTH
        # If GATED, a tile of the product has WIDTH columns of the gate, and then WIDTH columns of
        # the factor.
        wide = tl.arange(0, BLOCK_N)
        h = product_tile(
            x_ptr, weight_ptr, rows, first_col + wide % WIDTH + wide // WIDTH * columns,
            rows_total, 2 * columns if GATED else columns, depth,
            stride_x_row, stride_x_col, stride_weight_row, stride_weight_col,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
        if GATED:
            gate, linear = halves(h)
            _store_activations(
                gate, linear, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
                FUNCTION, GATED, HAS_BIAS, SAVES_H,
            )  # fmt: skip
        elif BLOCK_N > 2 * LARGEST_PART:
            left, right = halves(h)
            _store_activations(
                left, left, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
                FUNCTION, GATED, HAS_BIAS, SAVES_H,
            )  # fmt: skip
            _store_activations(
                right, right, bias_ptr, y_ptr, h_ptr, rows, first_col + BLOCK_N // 2, rows_total,
                columns, FUNCTION, GATED, HAS_BIAS, SAVES_H,
            )  # fmt: skip
        else:
            _store_activations(
                h, h, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
                FUNCTION, GATED, HAS_BIAS, SAVES_H,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def _activation_kernel(
    h_ptr, y_ptr, stride_h_row, stride_h_col, rows_total, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(columns, BLOCK_N)
    rows = tl.program_id(0) // column_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rows.to(tl.int64)
    inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]
    h_offsets = rows[:, None] * stride_h_row + cols.to(tl.int64)[None, :] * stride_h_col
    h = tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
    y = activate(h, FUNCTION, y_ptr.dtype.element_ty)
    if GATED:
        h_offsets += columns.to(tl.int64) * stride_h_col
        y *= tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
    store_narrow(y_ptr, rows[:, None] * columns + cols[None, :], y, inside)


def linear_activation_launch(x, weight, bias, y, h, activation: Activation) -> Launch:
    """Return the launch of the product that applies an activation in its epilogue."""
    (rows, depth), (product_columns, columns) = x.shape, (weight.shape[0], y.shape[1])
    tile = gemm_tile(rows, product_columns, x.dtype, target=target_of(x))
    block_k = gemm_depth(x.dtype)
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
        "FUNCTION": activation.function_name,
        "GATED": activation.gated,
        "HAS_BIAS": bias is not None,
        "SAVES_H": h is not None,
        "EVEN_K": depth % block_k == 0,
    }
    width = tile.block_n // 2 if activation.gated else tile.block_n
    tiles = ceil_div(rows, tile.block_m) * ceil_div(columns, width)
    grid = (gemm_programs(x, tile, tiles),)
    return Launch(
        "linear_gelu", _linear_activation_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def activation_launch(h, y, activation: Activation) -> Launch:
    """Return the launch of the kernel that applies an activation to a tensor in memory."""
    rows, columns = y.shape
    tile = elementwise_tile()
    arguments = {
        "h_ptr": h,
        "y_ptr": y,
        "stride_h_row": h.stride(0),
        "stride_h_col": h.stride(1),
        "rows_total": rows,
        "columns": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FUNCTION": activation.function_name,
        "GATED": activation.gated,
    }
    grid = (ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n),)
    return Launch(
        "activation", _activation_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def activation_forward(h: Tensor, *, activation: str, into: Tensor | None = None) -> Tensor:
    """Return y = act(h), contiguous in the dtype of h.

    h is (M, N) and y is (M, N), or h is (M, 2N) for a gated activation. h has any strides.
    `activation` is a name in ``fastbert.activations``; another name raises ValueError. `into` is
    the tensor to fill with y; None allocates it.
    """
    chosen = of_name(activation)
    columns = h.shape[1] // 2 if chosen.gated else h.shape[1]
    y = into
    if y is None:
        y = torch.empty((h.shape[0], columns), dtype=h.dtype, device=h.device)
    run(activation_launch, (h,), (y,), chosen)
    return y


def linear_gelu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    save: bool,
    path: str | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y = act(h) and, with `save`, h = x Wᵀ + bias.

    x (M, K) and weight (N, K) have one dtype and any strides; bias is (N,) or None. h (M, N) and y
    (M, N), or y (M, N / 2) for a gated activation, are contiguous in the dtype of x. `activation`
    is a name in ``fastbert.activations``. `path` is "fused", "library", or None for the choice of
    ``gemm_path``. Another value of `activation` or `path` raises ValueError. `into` is the tensor
    to fill with y; None allocates it.
    """
    chosen = of_name(activation)
    rows = x.shape[0]
    columns = weight.shape[0] // 2 if chosen.gated else weight.shape[0]
    if path_name(path, x, weight.shape[0]) == "library":
        h = F.linear(x, weight, bias)
        return activation_forward(h, activation=activation, into=into), h if save else None
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if into is None else into
    h = None
    if save:
        h = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device=x.device)
    run(linear_activation_launch, (x, weight, *dense(bias)), (y, h), chosen)
    return y, h
