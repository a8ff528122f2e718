"""Backward of attention with relative positions, which computes the softmax weights again.

The first launch computes the maximum, the sum and delta of each query row, as
attention_statistics.py explains. Then dq and the gradient of the segment scores have one program
per block of queries, and dk and dv one per block of keys. relative_tables.py has the gradients of
the tables of positions. Each gradient is summed in a fixed order without atomics, so reruns agree
bitwise.

In units of the product q kᵀ, a table of keys adds 2 to the statistics, 4 to dq, 2 to dkv and 4 to
its own gradient, and so does a table of queries with dkv in the place of dq.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs, attended_keys
from fastbert.kernels.attention_problem import Problem, allocate_rows, strides
from fastbert.kernels.attention_rows import (
    head_pointer,
    load_rows,
    pair_pointer,
    program_item,
    sequence_bounds,
    store_rows,
    zero_slack,
)
from fastbert.kernels.attention_softmax import divided, log_sum_exp, online_softmax
from fastbert.kernels.attention_statistics import row_statistics
from fastbert.kernels.common import INFINITY, dot, narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.philox import dropout_keep
from fastbert.kernels.relative_tables import allocate_sums, table_launches
from fastbert.kernels.relative_terms import (
    UNSPECIALISED,
    Inputs,
    by_distance,
    load_segment_scores,
    load_window,
    logit_gradients,
    relative_inputs,
    relative_launch,
    relative_logits,
    relative_problem,
    segments_differ,
    sequence_pointer,
    softmax_weights,
    window_rows,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _statistics_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32; inverse is None if SCALING is 0
    shift_ptr, inverse_ptr, delta_ptr,
    # The terms, the mask, the seed and the lengths are as in relative_attention.py.
    index_ptr, position_keys_ptr, position_queries_ptr, position_bias_ptr,
    q_segments_ptr, k_segments_ptr, segment_scores_ptr,
    mask_ptr, seed_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_lse_batch, stride_lse_head,
    heads, q_blocks, q_length, k_length, middle, scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HAS_TABLE_BIAS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Write the statistics that `row_statistics` loads for one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    first_row = block * BLOCK_M
    if first_row >= q_len:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    v_ptr = head_pointer(v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row)
    dout_ptr = head_pointer(
        dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
    )
    mask_ptr = pair_pointer(mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK)
    q_segments_ptr = sequence_pointer(
        q_segments_ptr, batch, q_start, q_length, IS_VARLEN, HAS_SEGMENTS
    )
    k_segments_ptr = sequence_pointer(
        k_segments_ptr, batch, k_start, k_length, IS_VARLEN, HAS_SEGMENTS
    )
    segment_scores = load_segment_scores(
        segment_scores_ptr, batch, head, q_start, rows, q_len, stride_lse_batch, stride_lse_head,
        HAS_SEGMENTS,
    )  # fmt: skip
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    inside = rows < q_len
    # q and dout: [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, inside, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(
        dout_ptr, rows, inside, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
    )
    maximum = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for first_key in range(0, k_len, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
        allowed = allowed_pairs(
            rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
            0, 0, stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, False, False, False,
        )  # fmt: skip
        attended = attended_keys(
            keys, allowed, mask_ptr, 0, k_len, stride_mask_key, HAS_MASK, MASK_ROW
        )
        # k and v: [BLOCK_N, BLOCK_D]
        k = load_rows(k_ptr, keys, attended, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True)
        window = window_rows(index_ptr, first_row, first_key, offset, middle, BLOCK_N, WINDOW)
        differ = segments_differ(
            q_segments_ptr, k_segments_ptr, rows, keys, q_len, k_len, HAS_SEGMENTS
        )
        scores = relative_logits(
            q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale,
            q_len, k_len, position_keys_ptr, position_queries_ptr, position_bias_ptr,
            HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS, HAS_SEGMENTS, SCALING,
        )  # fmt: skip
        weights, maximum, rescale = online_softmax(scores, maximum, scale, SCALING, True)
        total = total * rescale + tl.sum(weights, axis=1)
        v = load_rows(v_ptr, keys, attended, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
        dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if HAS_DROPOUT:
            keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
            dweights = tl.where(keep, dweights * dropout_scale, 0.0)
        delta = delta * rescale + tl.sum(tl.where(allowed, weights * dweights, 0.0), axis=1)

    inverse = divided(1.0, total, SCALING)
    shift_ptr = head_pointer(shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    if SCALING:
        tl.store(shift_ptr + rows, maximum, mask=inside)
        row = head_pointer(inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
        tl.store(row + rows, inverse, mask=inside)
    else:
        tl.store(shift_ptr + rows, log_sum_exp(maximum, total, SCALING), mask=inside)
    row = head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    tl.store(row + rows, delta * inverse, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dq_kernel(
    # As in _statistics_kernel
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, inverse_ptr, delta_ptr,
    # (B, H, Lq, D), or packed (Tq, H, D)
    dq_ptr,
    # (B, H, Lq), or packed (H, Tq), in the dtype of the segment scores; or None
    dsegment_scores_ptr,
    # As in _statistics_kernel
    index_ptr, position_keys_ptr, position_queries_ptr, position_bias_ptr,
    q_segments_ptr, k_segments_ptr, segment_scores_ptr,
    mask_ptr, seed_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, q_blocks, q_length, k_length, q_rows, middle,
    scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HAS_TABLE_BIAS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Write dq, and the gradient of the segment scores, of one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    if IS_VARLEN:
        zero_slack(
            dq_ptr, batch, head, block, q_blocks, cu_seqlens_q_ptr, batches, q_rows,
            stride_dq_head, stride_dq_row, stride_dq_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    first_row = block * BLOCK_M
    if first_row >= q_len:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    v_ptr = head_pointer(v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row)
    dout_ptr = head_pointer(
        dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
    )
    shift_ptr = head_pointer(shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    if SCALING:
        inverse_ptr = head_pointer(
            inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
        )
    delta_ptr = head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    mask_ptr = pair_pointer(mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK)
    q_segments_ptr = sequence_pointer(
        q_segments_ptr, batch, q_start, q_length, IS_VARLEN, HAS_SEGMENTS
    )
    k_segments_ptr = sequence_pointer(
        k_segments_ptr, batch, k_start, k_length, IS_VARLEN, HAS_SEGMENTS
    )
    segment_scores = load_segment_scores(
        segment_scores_ptr, batch, head, q_start, rows, q_len, stride_lse_batch, stride_lse_head,
        HAS_SEGMENTS,
    )  # fmt: skip
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    inside = rows < q_len
    # q and dout: [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, inside, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(
        dout_ptr, rows, inside, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
    )
    shift, inverse, delta = row_statistics(shift_ptr, inverse_ptr, delta_ptr, rows, q_len, SCALING)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dsegment_scores = tl.zeros([BLOCK_M], tl.float32)
    for first_key in range(0, k_len, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
        allowed = allowed_pairs(
            rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
            0, 0, stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, False, False, False,
        )  # fmt: skip
        attended = attended_keys(
            keys, allowed, mask_ptr, 0, k_len, stride_mask_key, HAS_MASK, MASK_ROW
        )
        # k and v: [BLOCK_N, BLOCK_D]
        k = load_rows(k_ptr, keys, attended, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True)
        window = window_rows(index_ptr, first_row, first_key, offset, middle, BLOCK_N, WINDOW)
        differ = segments_differ(
            q_segments_ptr, k_segments_ptr, rows, keys, q_len, k_len, HAS_SEGMENTS
        )
        scores = relative_logits(
            q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale,
            q_len, k_len, position_keys_ptr, position_queries_ptr, position_bias_ptr,
            HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS, HAS_SEGMENTS, SCALING,
        )  # fmt: skip
        weights = softmax_weights(scores, shift, inverse, scale, SCALING)
        v = load_rows(v_ptr, keys, attended, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
        dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if HAS_DROPOUT:
            keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
            dweights = tl.where(keep, dweights * dropout_scale, 0.0)
        dscores = logit_gradients(weights, dweights, delta, allowed, k_len)
        dq = dot(narrow(dscores, k.dtype), k, dq)
        if HAS_KEYS:
            # [WINDOW, BLOCK_M]
            spread = narrow(by_distance(dscores, WINDOW, False), k.dtype)
            table = load_window(position_keys_ptr, window, head, heads, HEAD_DIM, BLOCK_D)
            dq = dot(tl.trans(spread), table, dq)
        if HAS_SEGMENTS:
            dsegment_scores += tl.sum(tl.where(differ, dscores, 0.0), axis=1)

    dq_ptr = head_pointer(
        dq_ptr, batch, head, q_start, stride_dq_batch, stride_dq_head, stride_dq_row
    )
    dq = narrow(dq * scale, dq_ptr.dtype.element_ty)
    store_rows(dq_ptr, dq, rows, inside, stride_dq_row, stride_dq_dim, HEAD_DIM, BLOCK_D)
    if HAS_SEGMENTS:
        row = head_pointer(
            dsegment_scores_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
        )
        dsegment_scores = narrow(dsegment_scores * scale, dsegment_scores_ptr.dtype.element_ty)
        tl.store(row + rows, dsegment_scores, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dkv_kernel(
    # As in _statistics_kernel
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, inverse_ptr, delta_ptr,
    # (B, H, Lk, D), or packed (Tk, H, D), both at the same strides
    dk_ptr, dv_ptr,
    # As in _statistics_kernel
    index_ptr, position_keys_ptr, position_queries_ptr, position_bias_ptr,
    q_segments_ptr, k_segments_ptr, segment_scores_ptr,
    mask_ptr, seed_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, k_blocks, q_length, k_length, k_rows, middle,
    scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HAS_TABLE_BIAS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr,
):  # fmt: skip
    """Write dk of one block of keys if HAS_DK, and dv if HAS_DV."""
    block, head, batch = program_item(k_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    if IS_VARLEN:
        if HAS_DK:
            zero_slack(
                dk_ptr, batch, head, block, k_blocks, cu_seqlens_k_ptr, batches, k_rows,
                stride_dk_head, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        if HAS_DV:
            zero_slack(
                dv_ptr, batch, head, block, k_blocks, cu_seqlens_k_ptr, batches, k_rows,
                stride_dk_head, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    first_key = block * BLOCK_N
    if first_key >= k_len:
        return
    keys = first_key + tl.arange(0, BLOCK_N)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    v_ptr = head_pointer(v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row)
    dout_ptr = head_pointer(
        dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
    )
    shift_ptr = head_pointer(shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    if SCALING:
        inverse_ptr = head_pointer(
            inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
        )
    delta_ptr = head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    mask_ptr = pair_pointer(mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK)
    q_segments_ptr = sequence_pointer(
        q_segments_ptr, batch, q_start, q_length, IS_VARLEN, HAS_SEGMENTS
    )
    k_segments_ptr = sequence_pointer(
        k_segments_ptr, batch, k_start, k_length, IS_VARLEN, HAS_SEGMENTS
    )
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    inside = keys < k_len
    # k and v: [BLOCK_N, BLOCK_D]
    k = load_rows(k_ptr, keys, inside, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True)
    v = load_rows(v_ptr, keys, inside, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first_row in range(0, q_len, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        # q and dout: [BLOCK_M, BLOCK_D]
        q = load_rows(
            q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True
        )
        dout = load_rows(
            dout_ptr, rows, rows < q_len, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
        )
        shift, inverse, delta = row_statistics(
            shift_ptr, inverse_ptr, delta_ptr, rows, q_len, SCALING
        )
        segment_scores = load_segment_scores(
            segment_scores_ptr, batch, head, q_start, rows, q_len,
            stride_lse_batch, stride_lse_head, HAS_SEGMENTS,
        )  # fmt: skip
        # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
        allowed = allowed_pairs(
            rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
            0, 0, stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, False, False, False,
        )  # fmt: skip
        window = window_rows(index_ptr, first_row, first_key, offset, middle, BLOCK_N, WINDOW)
        differ = segments_differ(
            q_segments_ptr, k_segments_ptr, rows, keys, q_len, k_len, HAS_SEGMENTS
        )
        scores = relative_logits(
            q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale,
            q_len, k_len, position_keys_ptr, position_queries_ptr, position_bias_ptr,
            HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS, HAS_SEGMENTS, SCALING,
        )  # fmt: skip
        weights = softmax_weights(scores, shift, inverse, scale, SCALING)
        if HAS_DROPOUT:
            keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
        if HAS_DV:
            dropped = weights
            if HAS_DROPOUT:
                dropped = tl.where(keep, weights, 0.0)
            dv = dot(tl.trans(narrow(dropped, dout.dtype)), dout, dv)
        if HAS_DK:
            dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if HAS_DROPOUT:
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            dscores = logit_gradients(weights, dweights, delta, allowed, k_len)
            dk = dot(tl.trans(narrow(dscores, q.dtype)), q, dk)
            if HAS_QUERIES:
                # [WINDOW, BLOCK_N]
                spread = narrow(by_distance(dscores, WINDOW, True), q.dtype)
                table = load_window(position_queries_ptr, window, head, heads, HEAD_DIM, BLOCK_D)
                dk = dot(tl.trans(spread), table, dk)

    if HAS_DK:
        dk_ptr = head_pointer(
            dk_ptr, batch, head, k_start, stride_dk_batch, stride_dk_head, stride_dk_row
        )
        dk = narrow(dk * scale, dk_ptr.dtype.element_ty)
        store_rows(dk_ptr, dk, keys, inside, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D)
    if HAS_DV:
        dv_ptr = head_pointer(
            dv_ptr, batch, head, k_start, stride_dk_batch, stride_dk_head, stride_dk_row
        )
        dv = narrow(dv * dropout_scale, dv_ptr.dtype.element_ty)
        store_rows(dv_ptr, dv, keys, inside, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D)


def backward_launches(
    problem: Problem,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsegment_scores: Tensor | None,
    statistics: tuple[Tensor, Tensor | None, Tensor],
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Iterator[Launch]:
    """Yield the launches of `relative_attention_backward`, in order.

    Args:
        problem: The sizes and the arguments of the call, from `relative_problem`.
        dout: Gradient of out, at any strides.
        dq: Gradient of q to fill.
        dk: Gradient of k to fill.
        dv: Gradient of v to fill, at the strides of `dk`.
        dsegment_scores: Gradient of the segment scores to fill, in the layout of `Inputs`, or None.
        statistics: Row statistics from `allocate_statistics`.
        gradients: Gradients of position_keys, position_queries and position_bias to fill, or None.
        sums: Partial sums of these gradients from `allocate_sums`, or None.
    """
    is_varlen = problem.arguments["IS_VARLEN"]
    shift, inverse, delta = statistics
    shared = {
        "dout_ptr": dout,
        "shift_ptr": shift,
        "inverse_ptr": inverse,
        "delta_ptr": delta,
        **strides("dout", dout, is_varlen),
    }
    yield relative_launch(problem, "statistics", _statistics_kernel, **shared)
    yield relative_launch(
        problem,
        "dq",
        _dq_kernel,
        dq_ptr=dq,
        dsegment_scores_ptr=dsegment_scores,
        **shared,
        **strides("dq", dq, is_varlen),
    )
    # The sums of dk and of dv do not fit into the registers together at large head dims.
    is_split = problem.head_dim > 64
    for has_dk, has_dv in ((True, False), (False, True)) if is_split else ((True, True),):
        yield relative_launch(
            problem,
            "dkv",
            _dkv_kernel,
            over_keys=True,
            dk_ptr=dk,
            dv_ptr=dv,
            HAS_DK=has_dk,
            HAS_DV=has_dv,
            **shared,
            **strides("dk", dk, is_varlen),
        )
    yield from table_launches(problem, gradients, sums, shared)


def allocate_statistics(problem: Problem) -> tuple[Tensor, Tensor | None, Tensor]:
    """Allocate the row statistics shift, inverse and delta, fp32 (B, H, Lq) or packed (H, Tq)."""
    arguments = problem.arguments
    rows = (problem.heads, arguments["q_rows"])
    shape = rows if arguments["IS_VARLEN"] else (problem.batches, *rows)
    device = arguments["q_ptr"].device
    shift, delta = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return shift, torch.empty_like(shift) if arguments["SCALING"] else None, delta


def _backward_launches(*tensors_and_numbers: Any) -> list[Launch]:
    *tensors, numbers = tensors_and_numbers
    count = len(Inputs._fields)
    problem = relative_problem(Inputs(*tensors[:count]), numbers)
    dout, dq, dk, dv, dscores, *others = tensors[count:]
    groups = (tuple(others[i : i + 3]) for i in (0, 3, 6))
    return list(backward_launches(problem, dout, dq, dk, dv, dscores, *groups))


def relative_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, index: Tensor, **options: Any
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `relative_attention_forward`, which describes the arguments.

    Args:
        dout: Gradient of out, in the shape and dtype of out, at any strides.

    Returns:
        The gradients of q, k, v, position_keys, position_queries, position_bias and segment_scores,
        each in the shape and dtype of its tensor, or None for a tensor that is None. They are 0 in
        rows beyond the last sequence. A query that attends to no key adds 0 to all of them.

    Raises:
        ValueError: As in `attention_forward`.
    """
    inputs, numbers = relative_inputs(q, k, v, index, **options)
    problem = relative_problem(inputs, numbers)
    is_varlen = inputs.cu_seqlens_q is not None
    dq, dk, dv = (allocate_rows(x, is_varlen) for x in (q, k, v))
    if problem.batches == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    # Rows beyond the last sequence have no program.
    scores = inputs.segment_scores
    dscores = None if scores is None else torch.zeros_like(scores)
    tables = (inputs.position_keys, inputs.position_queries, inputs.position_bias)
    gradients = [None if table is None else torch.empty_like(table) for table in tables]
    statistics, sums = allocate_statistics(problem), allocate_sums(problem)
    results = (dq, dk, dv, dscores, *statistics, *gradients, *sums)
    run(_backward_launches, (*inputs, dout), results, numbers)
    if dscores is not None and is_varlen:
        dscores = dscores.t().contiguous()
    return dq, dk, dv, *gradients, dscores
