"""Gradient of the additive bias of attention: dS summed over the broadcast dimensions of the bias.

A program computes a tile of the gradient in a loop over the combinations of sequence, head, query
block and key block that add to the tile. For each combination, two products and the row statistics
give dS = P * (dP - delta) again. S are the logits, P are the softmax weights, dP is their gradient,
and delta = rowsum(P * dP). The two products come in addition to the products of dq, dk and dv. dS
itself is not stored, only its sum in the shape of the bias. The sum stays in registers and has a
fixed order, so there are no atomic additions and reruns agree bitwise. Blocks outside the window or
the sequence are skipped.

If many combinations add to few tiles, as for a bias (1, H, 1, Lk), several programs divide the
combinations of a tile. A second launch then adds their partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs
from fastbert.kernels.attention_problem import UNSPECIALISED, Numbers, Problem
from fastbert.kernels.attention_rows import head_pointer, load_rows, pair_pointer, sequence_bounds
from fastbert.kernels.attention_softmax import exponentials, logits
from fastbert.kernels.attention_statistics import row_statistics
from fastbert.kernels.common import dot, narrow
from fastbert.kernels.launch import Launch
from fastbert.kernels.philox import dropout_keep
from fastbert.kernels.reduction import sum_partials_launch
from fastbert.kernels.tiles import Tile, attention_tile, ceil_div, target_of

# If several programs divide the combinations of each tile, there are at most this many programs in
# all. The number is the same for every GPU, so that the sums have the same order and the results
# have the same bits.
PROGRAMS = 512


@triton.jit(
    do_not_specialize=[
        *UNSPECIALISED, "combinations", "bias_heads", "partials", "stride_dbias_partial"
    ]
)  # fmt: skip
def _bias_gradient_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32
    shift_ptr, inverse_ptr, delta_ptr,
    # (partials, *shape of the bias before it was expanded), contiguous; fp32, or for a single
    # partial the dtype of the bias
    dbias_ptr,
    # (B, H, Lq, Lk), expanded: the mask in uint8 or None, the bias in any floating dtype
    mask_ptr, bias_ptr,
    # (1,), int64; or None
    seed_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head, stride_dbias_partial,
    heads, q_blocks, k_blocks, q_length, k_length, combinations, bias_heads, partials,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr, SUMS_ROWS: tl.constexpr, SUMS_KEYS: tl.constexpr,
):  # fmt: skip
    """Write one tile of the gradient of the bias, or one partial sum of the tile."""
    # A combination is a sequence, a head, a query block and a key block. A program sums its share
    # of the combinations that add to one tile of the gradient.
    row_tiles = q_blocks
    key_tiles = k_blocks
    if SUMS_ROWS:
        row_tiles = 1
    if SUMS_KEYS:
        key_tiles = 1
    shared_heads = heads // bias_heads
    tile = tl.program_id(0) // partials
    partial = tl.program_id(0) % partials
    key_tile = tile % key_tiles
    row_tile = tile // key_tiles % row_tiles
    bias_head = tile // key_tiles // row_tiles % bias_heads
    bias_batch = tile // key_tiles // row_tiles // bias_heads
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)

    share = tl.cdiv(combinations, partials)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for combination in range(partial * share, tl.minimum((partial + 1) * share, combinations)):
        # Where the bias has size 1 in a dimension, the gradient is summed over this dimension. The
        # index in this dimension then comes from the combination, and the index of the tile is 0.
        # Otherwise the index comes from the tile.
        rest = combination
        key_block = key_tile
        row_block = row_tile
        if SUMS_KEYS:
            key_block = rest % k_blocks
            rest = rest // k_blocks
        if SUMS_ROWS:
            row_block = rest % q_blocks
            rest = rest // q_blocks
        head = bias_head + rest % shared_heads
        batch = bias_batch + rest // shared_heads
        q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
        k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
        offset = k_len - q_len
        first_row = row_block * BLOCK_M
        first_key = key_block * BLOCK_N
        is_visible = (first_row < q_len) & (first_key < k_len)
        if HAS_LEFT:
            is_visible = is_visible & (first_key + BLOCK_N > first_row + offset - window_left)
        if HAS_RIGHT:
            is_visible = is_visible & (first_key < first_row + BLOCK_M + offset + window_right)
        if is_visible:
            rows = first_row + tl.arange(0, BLOCK_M)
            keys = first_key + tl.arange(0, BLOCK_N)
            q_rows_ptr = head_pointer(
                q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row
            )
            k_rows_ptr = head_pointer(
                k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row
            )
            v_rows_ptr = head_pointer(
                v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row
            )
            dout_rows_ptr = head_pointer(
                dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
            )
            shift, inverse, delta = row_statistics(
                head_pointer(shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1),
                head_pointer(
                    inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
                ),
                head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1),
                rows, q_len, SCALING,
            )  # fmt: skip
            mask_pairs_ptr = pair_pointer(
                mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK
            )
            bias_pairs_ptr = pair_pointer(
                bias_ptr, batch, head, stride_bias_batch, stride_bias_head, True
            )
            # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_pairs_ptr, offset, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, True,
            )  # fmt: skip
            # q and dout: [BLOCK_M, BLOCK_D]; k and v: [BLOCK_N, BLOCK_D]
            q = load_rows(
                q_rows_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True
            )
            k = load_rows(
                k_rows_ptr, keys, keys < k_len, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True
            )
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = logits(
                scores, rows[:, None], keys[None, :], allowed, bias_pairs_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, True, SCALING, True,
            )  # fmt: skip
            weights = exponentials(scores, shift[:, None], scale, SCALING) * inverse[:, None]
            dout = load_rows(
                dout_rows_ptr, rows, rows < q_len, stride_dout_row, stride_dout_dim,
                HEAD_DIM, BLOCK_D, True,
            )  # fmt: skip
            v = load_rows(
                v_rows_ptr, keys, keys < k_len, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True
            )
            dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if HAS_DROPOUT:
                keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            # v may hold NaN at pairs that are not allowed, and 0 * NaN is NaN.
            total += tl.where(allowed, weights * (dweights - delta[:, None]), 0.0)

    # The gradient is contiguous, of shape (B, H, Lq, Lk) with size 1 where the bias has size 1.
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    keys = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    bias_rows = q_length
    bias_keys = k_length
    if SUMS_ROWS:
        total = tl.sum(total, axis=0)[None, :]
        rows = tl.zeros([1, 1], tl.int32)
        bias_rows = 1
    if SUMS_KEYS:
        total = tl.sum(total, axis=1)[:, None]
        keys = tl.zeros([1, 1], tl.int32)
        bias_keys = 1
    first = (bias_batch.to(tl.int64) * bias_heads + bias_head) * bias_rows
    pointers = dbias_ptr + partial.to(tl.int64) * stride_dbias_partial
    pointers += (first + rows) * bias_keys + keys
    inside = (rows < bias_rows) & (keys < bias_keys)
    tl.store(pointers, narrow(total, dbias_ptr.dtype.element_ty), mask=inside)


def _tiles(dbias: Tensor, numbers: Numbers, tile: Tile) -> int:
    """Return the number of tiles of `dbias`, the gradient of the bias."""
    batches, heads, rows, keys = dbias.shape
    q_blocks = ceil_div(numbers.max_q, tile.block_m) if rows > 1 else 1
    k_blocks = ceil_div(numbers.max_k, tile.block_n) if keys > 1 else 1
    return batches * heads * q_blocks * k_blocks


def _combinations(bias: Tensor, dbias: Tensor, numbers: Numbers, tile: Tile) -> int:
    """Return the number of combinations of sequence, head and blocks that add to a tile of `dbias`.

    `bias` is the bias expanded to (B, H, Lq, Lk).
    """
    blocks = ceil_div(numbers.max_q, tile.block_m) * ceil_div(numbers.max_k, tile.block_n)
    every = bias.shape[0] * bias.shape[1] * blocks
    return every // max(_tiles(dbias, numbers, tile), 1)


def allocate_bias_sums(q: Tensor, bias: Tensor, dbias: Tensor, numbers: Numbers) -> Tensor | None:
    """Allocate the partial sums of the gradient of the bias, fp32 (1, partials, elements).

    Args:
        q: Queries, dense or packed.
        bias: Bias expanded to (B, H, Lq, Lk).
        dbias: Gradient of the bias, as in `bias_gradient_launches`.
        numbers: The numerical arguments of the call of attention.

    Returns:
        The partial sums, or None if one program computes each tile of the gradient.
    """
    tile = attention_tile("bias", q.shape[-1], q.dtype, True, target_of(q))
    tiles = _tiles(dbias, numbers, tile)
    combinations = _combinations(bias, dbias, numbers, tile)
    partials = min(combinations, PROGRAMS // max(tiles, 1))
    if partials <= 1 or dbias.numel() == 0:
        return None
    shape = (1, partials, dbias.numel())
    return torch.empty(shape, dtype=torch.float32, device=dbias.device)


def bias_gradient_launches(
    problem: Problem,
    numbers: Numbers,
    dbias: Tensor,
    sums: Tensor | None,
    arguments: dict[str, Any],
) -> Iterator[Launch]:
    """Yield the launches that compute the gradient of the bias.

    Args:
        problem: The sizes and the arguments of the call of attention.
        numbers: The numerical arguments of the call of attention.
        dbias: Gradient to fill, contiguous (B or 1, H or 1, Lq or 1, Lk or 1), in the dtype of the
            bias.
        sums: Partial sums from `allocate_bias_sums`, or None.
        arguments: Kernel arguments of dout and of the row statistics, by name.
    """
    tile = problem.tile("bias")
    _, heads, rows, keys = dbias.shape
    if dbias.numel() == 0:
        return
    partials = 1 if sums is None else sums.shape[1]
    launch = problem.launch(
        "attention_bias_gradient",
        _bias_gradient_kernel,
        tile,
        dbias_ptr=dbias if sums is None else sums,
        stride_dbias_partial=dbias.numel(),
        combinations=_combinations(problem.arguments["bias_ptr"], dbias, numbers, tile),
        bias_heads=heads,
        partials=partials,
        SUMS_ROWS=rows == 1,
        SUMS_KEYS=keys == 1,
        **arguments,
    )
    yield launch._replace(grid=(_tiles(dbias, numbers, tile) * partials,))
    if sums is not None:
        yield sum_partials_launch(sums, dbias)
