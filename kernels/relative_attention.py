"""Attention with relative positions and segments in its logits: forward and softmax weights.

``relative_terms.py`` describes the terms. One program computes a block of queries of one head in a
loop over tiles of keys, as in attention.py. A tile of 32 × 32 pairs multiplies the queries by the
64 rows of `position_keys` in its window and the keys by those of `position_queries`, so that each
table adds as many products as plain attention has. By the counts of the PTX machine, shared memory
is busy several times as long as the matrix units. Nothing of this was measured on a GPU.
"""

from __future__ import annotations

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
from fastbert.kernels.attention_softmax import divided, exponentials, online_softmax
from fastbert.kernels.common import INFINITY, dot, narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.philox import dropout_keep
from fastbert.kernels.relative_terms import (
    UNSPECIALISED,
    Inputs,
    load_segment_scores,
    relative_inputs,
    relative_launch,
    relative_logits,
    relative_problem,
    segments_differ,
    sequence_pointer,
    window_rows,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, out_ptr,
    # (2 N - 1,), int32
    index_ptr,
    # (P, H, D), (P, H, D) and (P, H), contiguous; each may be None
    position_keys_ptr, position_queries_ptr, position_bias_ptr,
    # (B, L), or packed (T,), contiguous integers; or None
    q_segments_ptr, k_segments_ptr,
    # (B, H, Lq), or packed (H, Tq), contiguous; or None
    segment_scores_ptr,
    # (B, H, Lq, Lk), expanded, uint8; or None
    mask_ptr,
    # (1,), int64; or None
    seed_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_out_batch, stride_out_head, stride_out_row, stride_out_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, q_blocks, q_length, k_length, q_rows, middle,
    scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HAS_TABLE_BIAS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Store the output of one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    if IS_VARLEN:
        zero_slack(
            out_ptr, batch, head, block, q_blocks, cu_seqlens_q_ptr, batches, q_rows,
            stride_out_head, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    first_row = block * BLOCK_M
    if first_row >= q_len:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    v_ptr = head_pointer(v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row)
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

    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    maximum = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
        # [BLOCK_N, BLOCK_D]
        k = load_rows(
            k_ptr, keys, keys < k_len, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True
        )
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
        if HAS_DROPOUT:
            keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        # [BLOCK_N, BLOCK_D]
        v = load_rows(v_ptr, keys, attended, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
        out = dot(narrow(weights, v.dtype), v, out * rescale[:, None])

    inverse = divided(dropout_scale, total, SCALING)
    out = narrow(out * inverse[:, None], out_ptr.dtype.element_ty)
    out_ptr = head_pointer(
        out_ptr, batch, head, q_start, stride_out_batch, stride_out_head, stride_out_row
    )
    store_rows(out_ptr, out, rows, rows < q_len, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _weights_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr,
    # (B, H, Lq, Lk), contiguous, in the dtype of q
    weights_ptr,
    # The terms, the mask and the lengths are as in _forward_kernel.
    index_ptr, position_keys_ptr, position_queries_ptr, position_bias_ptr,
    q_segments_ptr, k_segments_ptr, segment_scores_ptr,
    mask_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_lse_batch, stride_lse_head,
    heads, q_blocks, q_length, k_length, middle, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, HAS_TABLE_BIAS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Write the softmax weights of one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    first_row = block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
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
    plane = (batch.to(tl.int64) * heads + head) * q_length
    pointers = weights_ptr + (plane + rows)[:, None] * k_length
    offset = k_len - q_len
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    shift = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Pass 0 computes the maximum and the sum of each row, and pass 1 writes the weights. Pass 1
    # goes to the end of the longest sequence, and writes 0 beyond the end of the program's own.
    for weights_pass in tl.static_range(0, 2):
        for first_key in range(0, k_len if weights_pass == 0 else k_length, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
                0, 0, stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, False, False, False,
            )  # fmt: skip
            # [BLOCK_N, BLOCK_D]
            k = load_rows(
                k_ptr, keys, keys < k_len, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True
            )
            window = window_rows(index_ptr, first_row, first_key, offset, middle, BLOCK_N, WINDOW)
            differ = segments_differ(
                q_segments_ptr, k_segments_ptr, rows, keys, q_len, k_len, HAS_SEGMENTS
            )
            scores = relative_logits(
                q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale,
                q_len, k_len, position_keys_ptr, position_queries_ptr, position_bias_ptr,
                HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS, HAS_SEGMENTS, SCALING,
            )  # fmt: skip
            if weights_pass == 0:
                weights, shift, rescale = online_softmax(scores, shift, scale, SCALING, True)
                total = total * rescale + tl.sum(weights, axis=1)
            else:
                finite = tl.where(shift == -INFINITY, 0.0, shift)
                weights = exponentials(scores, finite[:, None], scale, SCALING)
                weights = weights * divided(1.0, total, SCALING)[:, None]
                weights = tl.where((rows < q_len)[:, None], weights, 0.0)
                inside = (rows < q_length)[:, None] & (keys < k_length)[None, :]
                weights = narrow(weights, weights_ptr.dtype.element_ty)
                tl.store(pointers + keys[None, :], weights, mask=inside)


def _forward_launch(*tensors_and_numbers: Any) -> Launch:
    *tensors, out, numbers = tensors_and_numbers
    problem = relative_problem(Inputs(*tensors), numbers)
    return forward_launch(problem, out)


def forward_launch(problem: Problem, out: Tensor) -> Launch:
    """Return the launch of `relative_attention_forward`."""
    own = strides("out", out, problem.arguments["IS_VARLEN"])
    return relative_launch(problem, "forward", _forward_kernel, out_ptr=out, **own)


def relative_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, **options: Any
) -> Tensor:
    """Compute attention with the terms of positions and segments.

    Args:
        q: Queries (B, H, Lq, D) at any strides, or packed (Tq, H, D); fp32, fp16 or bf16.
        k: Keys (B, H, Lk, D) at any strides, or packed (Tk, H, D), in the dtype of `q`.
        v: Values, as `k`.
        index: Row of each distance, int32 (2 N - 1,), with N at least Lq and Lk. The kernels do not
            check that a row is in the tables.
        options: The tables position_keys, position_queries and position_bias, q_segments,
            k_segments and segment_scores in the shapes of ``fastbert.ops.relative_attention``; the
            mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seed, dropout_p and scale
            as in `attention_forward`.

    Returns:
        (B, H, Lq, D), stored in the order of (B, Lq, H, D), or contiguous (Tq, H, D), in the dtype
        of `q`. It is 0 for a query that attends to no key, and in rows beyond the last sequence.

    Raises:
        ValueError: As in `attention_forward`.
    """
    inputs, numbers = relative_inputs(q, k, v, index, **options)
    is_varlen = inputs.cu_seqlens_q is not None
    out = allocate_rows(q, is_varlen)
    if is_varlen and inputs.cu_seqlens_q.shape[0] == 1:
        # Without a sequence, no program runs.
        out.zero_()
    run(_forward_launch, inputs, (out,), numbers)
    return out


def _weights_launch(*tensors_and_numbers: Any) -> Launch:
    *tensors, weights, numbers = tensors_and_numbers
    return weights_launch(relative_problem(Inputs(*tensors), numbers), weights)


def weights_launch(problem: Problem, weights: Tensor) -> Launch:
    """Return the launch of `relative_attention_weights`."""
    return relative_launch(problem, "weights", _weights_kernel, weights_ptr=weights)


def relative_attention_weights(q: Tensor, k: Tensor, index: Tensor, **options: Any) -> Tensor:
    """Compute softmax weights before dropout, with the arguments of `relative_attention_forward`.

    Returns:
        Weights (B, H, Lq, Lk) in the dtype of `q`, which are 0 for queries and keys beyond the end
        of a packed sequence.

    Raises:
        ValueError: As in `attention_forward`.
    """
    inputs, numbers = relative_inputs(q, k, k, index, **options)
    ends = inputs.cu_seqlens_q
    batches = q.shape[0] if ends is None else ends.shape[0] - 1
    shape = (batches, q.shape[1], numbers.max_q, numbers.max_k)
    weights = torch.empty(shape, dtype=q.dtype, device=q.device)
    run(_weights_launch, inputs, (weights,), numbers)
    return weights
