"""Matrix products inside kernels: the order of the tiles, and the loop over K of one tile."""

from __future__ import annotations

import triton
import triton.language as tl

from fastbert.kernels.common import dot

# The number of row blocks that form a group. The programs of a group read the same columns of one
# operand from the L2 cache.
GROUP_M = 8


@triton.jit
def tile_position(tile, row_blocks, column_blocks, GROUP_M: tl.constexpr):
    """Return the row block and the column block of a tile; GROUP_M row blocks form a group."""
    group = tile // (GROUP_M * column_blocks)
    group_rows = tl.minimum(row_blocks - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * column_blocks)
    return group * GROUP_M + within % group_rows, within // group_rows


@triton.jit
def product_tile(
    a_ptr, b_ptr, rows, cols, rows_total, columns, depth,
    stride_a_row, stride_a_k, stride_b_col, stride_b_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return the tile of the product a b at `rows` and `cols`, fp32 [BLOCK_M, BLOCK_N].

    a is (M, K) and b is (K, N), at any strides. To pass the weight (N, K) of a linear layer as b,
    set stride_b_col to weight.stride(0) and stride_b_k to weight.stride(1). Rows and columns beyond
    the end wrap around to the start, so that no mask is needed; their results have no meaning, and
    the caller must not store them.
    """
    ks = tl.arange(0, BLOCK_K)
    # The operator % wraps the indices, because the compiler still sees that they are consecutive
    # and loads 16 bytes at once. After ``tl.where``, the compiler would not see this.
    a_rows = (rows % rows_total).to(tl.int64)
    b_cols = (cols % columns).to(tl.int64)
    a_rows_ptr = a_ptr + a_rows[:, None] * stride_a_row
    b_cols_ptr = b_ptr + b_cols[None, :] * stride_b_col
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_k in range(0, depth, BLOCK_K):
        k = (first_k + ks).to(tl.int64)
        # a [BLOCK_M, BLOCK_K], b [BLOCK_K, BLOCK_N]
        if EVEN_K:
            a = tl.load(a_rows_ptr + k[None, :] * stride_a_k)
            b = tl.load(b_cols_ptr + k[:, None] * stride_b_k)
        else:
            inside = k < depth
            a = tl.load(a_rows_ptr + k[None, :] * stride_a_k, mask=inside[None, :], other=0.0)
            b = tl.load(b_cols_ptr + k[:, None] * stride_b_k, mask=inside[:, None], other=0.0)
        accumulator = dot(a, b, accumulator)
    return accumulator


@triton.jit
def halves(x):
    """Return the left and the right half of the columns of a tile [M, N], each [M, N / 2]."""
    parts = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return tl.split(tl.permute(parts, [0, 2, 1]))
