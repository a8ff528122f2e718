"""act(x Wᵀ + b) in one persistent GEMM: bias and activation work on its fp32 accumulator.

The activations are GELU with erf or tanh, ReLU and SiLU, and the gated forms GEGLU and SwiGLU
(Shazeer 2020), whose first half of the columns goes through the activation and whose second half
multiplies. For the backward the pre-activation is kept, with its bias: rounded without it, a sum
near 0 would lose its sign, which is all that ReLU's slope depends on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.activation import (
    LARGEST_PART,
    activate,
    biased,
    check_function,
    path_name,
    store_narrow,
)
from fastbert.kernels.gemm import GROUP_M, halves, product_tile, tile_position
from fastbert.kernels.launch import Launch
from fastbert.kernels.tiles import elementwise_tile, gemm_depth, gemm_programs, gemm_tile


@triton.jit
def _store_activation(
    h, linear, bias_ptr, y_ptr, h_ptr, rows, first_col, rows_total, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVES_H: tl.constexpr,
):  # fmt: skip
    """y, and h if it is saved, from a tile of the product; gated also from linear, its other half.

    columns are those of y; h has twice as many when gated.
    """
    cols = first_col + tl.arange(0, h.shape[1])
    inside_columns = cols < columns
    inside = (rows < rows_total)[:, None] & inside_columns[None, :]
    offsets = rows.to(tl.int64)[:, None] * columns + cols[None, :]
    h = biased(h, bias_ptr, cols, inside_columns, HAS_BIAS)
    y = activate(h, FUNCTION)
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
    """_store_activation of a wide tile's halves, one after the other: both at once would spill."""
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
    # columns and WIDTH are those of y; the product is twice as wide when gated.
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_blocks = tl.cdiv(rows_total, BLOCK_M)
    column_blocks = tl.cdiv(columns, WIDTH)
    tiles = row_blocks * column_blocks
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        block_row, block_column = tile_position(tile, row_blocks, column_blocks, GROUP_M)
        rows = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
        first_col = block_column * WIDTH
        # A gated tile: WIDTH columns of the gate, then the WIDTH columns that it multiplies.
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
    y = activate(h, FUNCTION)
    if GATED:
        h_offsets += columns.to(tl.int64) * stride_h_col
        y *= tl.load(h_ptr + h_offsets, mask=inside, other=0.0).to(tl.float32)
    store_narrow(y_ptr, rows[:, None] * columns + cols[None, :], y, inside)


def _linear_activation_launch(x, weight, bias, y, h, approximate: str, gated: bool) -> Launch:
    (rows, depth), (product_columns, columns) = x.shape, (weight.shape[0], y.shape[1])
    tile, block_k = gemm_tile(rows, product_columns, x.dtype), gemm_depth(x.dtype)
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
        "FUNCTION": check_function(approximate),
        "GATED": gated,
        "HAS_BIAS": bias is not None,
        "SAVES_H": h is not None,
        "EVEN_K": depth % block_k == 0,
    }
    width = tile.block_n // 2 if gated else tile.block_n
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, width)
    grid = (gemm_programs(x, tile, tiles),)
    return Launch(
        "linear_gelu", _linear_activation_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def _activation_launch(h, y, approximate: str, gated: bool) -> Launch:
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
        "FUNCTION": check_function(approximate),
        "GATED": gated,
    }
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),)
    return Launch(
        "activation", _activation_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def activation_forward(h: Tensor, *, approximate: str, gated: bool = False) -> Tensor:
    """act(h), contiguous in h's dtype: (M, N), or from h (M, 2N) if gated; h at any strides.

    ValueError: approximate other than "none" (GELU by erf), "tanh", "relu" and "silu".
    """
    columns = h.shape[1] // 2 if gated else h.shape[1]
    y = torch.empty((h.shape[0], columns), dtype=h.dtype, device=h.device)
    _activation_launch(h, y, approximate, gated).run(on=h)
    return y


def linear_gelu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    approximate: str,
    save: bool,
    gated: bool = False,
    path: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(h) and, if asked to save, h = x Wᵀ + bias.

    x (M, K) and weight (N, K) in one dtype, any strides; bias (N,) or None; h (M, N)
    and y (M, N), or (M, N / 2) if gated: act of the first half of the columns times the second. y
    and h are contiguous in x's dtype. path: "fused", "library", or None for ``gemm_path``'s
    choice. ValueError: an unknown path, or approximate other than "none" (GELU by erf), "tanh",
    "relu" and "silu".
    """
    rows, depth = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if path_name(path, rows, weight.shape[0], depth, x.dtype) == "library":
        h = F.linear(x, weight, bias)
        return activation_forward(h, approximate=approximate, gated=gated), h if save else None
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    h = None
    if save:
        h = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device=x.device)
    _linear_activation_launch(x, weight, bias, y, h, approximate, gated).run(on=x)
    return y, h


# rows, dtype, act, gated of the GEMMs that are shipped
SHIPPED = (
    (4096, torch.bfloat16, "none", False),
    (4096, torch.bfloat16, "none", True),
    (4096, torch.float16, "tanh", False),
    (4096, torch.bfloat16, "relu", False),
    (4096, torch.bfloat16, "silu", True),
    (128, torch.bfloat16, "none", False),
    (16, torch.bfloat16, "none", False),
    (16, torch.bfloat16, "none", True),
    (4096, torch.float32, "none", False),
    (4096, torch.float32, "silu", True),
)


def shipped_launches() -> Iterator[Launch]:
    """Representative launches, on meta tensors, for the ahead-of-time gate."""
    for rows, dtype, function, gated in SHIPPED:
        x, a = (torch.empty((rows, n), dtype=dtype, device="meta") for n in (768, 3072))
        h = torch.empty((rows, 6144), dtype=dtype, device="meta") if gated else a
        weight = torch.empty((h.shape[1], 768), dtype=dtype, device="meta")
        saved = h if rows == 4096 else None
        yield _linear_activation_launch(x, weight, weight[:, 0], a, saved, function, gated)
        if function == "none" and rows == 4096 and dtype == torch.bfloat16:
            yield _activation_launch(h, a, function, gated)
