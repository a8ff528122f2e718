"""Backward of attention, which recomputes the softmax weights (Dao 2023, algorithm 2).

The kernels of this file are the general path; attention_short.py has the short path. The first
launch of the general path computes the statistics of each query row. The next launch computes dq
with one program per block of queries. Then dk and dv are computed with one program per block of
keys. If the gradient of the bias is wanted, the last launches compute it. Each gradient is summed
in a fixed order without atomics, so reruns agree bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_bias import allocate_bias_sums, bias_gradient_launches
from fastbert.kernels.attention_mask import allowed_pairs, attended_keys, phase_range, visible_range
from fastbert.kernels.attention_problem import (
    UNSPECIALISED,
    Numbers,
    Problem,
    allocate_rows,
    canonical,
    problem_of,
    scaling,
    strides,
)
from fastbert.kernels.attention_rows import (
    head_pointer,
    load_rows,
    pair_pointer,
    program_item,
    sequence_bounds,
    store_rows,
    zero_slack,
)
from fastbert.kernels.attention_short import serves, short_backward_launch
from fastbert.kernels.attention_softmax import exponentials, logits, transposed_product
from fastbert.kernels.attention_statistics import (
    allocate_statistics,
    row_statistics,
    statistics_launch,
)
from fastbert.kernels.common import dot, narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.philox import dropout_keep


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dkv_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32; inverse is None if SCALING is 0
    shift_ptr, inverse_ptr, delta_ptr,
    # (B, H, Lk, D), or packed (Tk, H, D), both at the same strides
    dk_ptr, dv_ptr,
    # (B, H, Lq, Lk), expanded: the mask in uint8, the bias in any floating dtype; each may be None
    mask_ptr, bias_ptr,
    # (1,), int64; or None
    seed_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, k_blocks, q_length, k_length, k_rows,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr, HAS_DK: tl.constexpr, HAS_DV: tl.constexpr,
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
    bias_ptr = pair_pointer(bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    last_key = tl.minimum(first_key + BLOCK_N, k_len) - 1
    # With left and right of the window exchanged and the offset negated, `visible_range` returns
    # the range of queries that may attend to a block of keys.
    low, high, start, full_start, full_stop = visible_range(
        first_key, last_key, -offset, q_len, window_right, window_left, HAS_RIGHT, HAS_LEFT, BLOCK_M
    )
    inside = keys < k_len
    # k and v: [BLOCK_N, BLOCK_D]
    k = load_rows(k_ptr, keys, inside, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True)
    v = load_rows(v_ptr, keys, inside, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for phase in tl.static_range(0 if HAS_RIGHT else 1, 3):
        phase_start, phase_stop = phase_range(phase, start, full_start, full_stop, high)
        for first_row in range(phase_start, phase_stop, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            seen = (rows >= low) & (rows < high)
            # q and dout: [BLOCK_M, BLOCK_D]
            q = load_rows(
                q_ptr, rows, seen, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, phase != 1
            )
            dout = load_rows(
                dout_ptr,
                rows,
                seen,
                stride_dout_row,
                stride_dout_dim,
                HEAD_DIM,
                BLOCK_D,
                phase != 1,
            )
            shift, inverse, delta = row_statistics(
                shift_ptr, inverse_ptr, delta_ptr, rows, q_len, SCALING
            )
            # The tiles of scores and weights are [BLOCK_N, BLOCK_M], so their products with dout
            # and q need no transposition.
            allowed = allowed_pairs(
                rows[None, :], keys[:, None], mask_ptr, offset, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, phase != 1,
            )  # fmt: skip
            scores = transposed_product(q, k)
            scores = logits(
                scores, rows[None, :], keys[:, None], allowed, bias_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, phase != 1 or HAS_MASK,
            )  # fmt: skip
            weights = exponentials(scores, shift[None, :], scale, SCALING)
            if SCALING:
                weights *= inverse[None, :]
            if HAS_DROPOUT:
                keep = tl.trans(
                    dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                )
            if HAS_DV:
                dropped = weights
                if HAS_DROPOUT:
                    dropped = tl.where(keep, weights, 0.0)
                dv = dot(narrow(dropped, dout.dtype), dout, dv)
            if HAS_DK:
                dweights = transposed_product(dout, v)
                if HAS_DROPOUT:
                    dweights = tl.where(keep, dweights * dropout_scale, 0.0)
                dscores = weights * (dweights - delta[None, :])
                if phase != 1 or HAS_MASK:
                    # v may hold NaN at pairs that are not allowed, and 0 * NaN is NaN.
                    dscores = tl.where(allowed, dscores, 0.0)
                dk = dot(narrow(dscores, q.dtype), q, dk)

    if HAS_DK:
        dk_ptr = head_pointer(
            dk_ptr, batch, head, k_start, stride_dk_batch, stride_dk_head, stride_dk_row
        )
        # The softmax of a single key is constant, so the gradient is exactly 0; rounding would give
        # another value.
        dk = narrow(tl.where(k_len == 1, 0.0, dk * scale), dk_ptr.dtype.element_ty)
        store_rows(dk_ptr, dk, keys, inside, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D)
    if HAS_DV:
        dv_ptr = head_pointer(
            dv_ptr, batch, head, k_start, stride_dk_batch, stride_dk_head, stride_dk_row
        )
        dv = narrow(dv * dropout_scale, dv_ptr.dtype.element_ty)
        store_rows(dv_ptr, dv, keys, inside, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dq_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32; inverse is None if SCALING is 0
    shift_ptr, inverse_ptr, delta_ptr,
    # (B, H, Lq, D), or packed (Tq, H, D)
    dq_ptr,
    # (B, H, Lq, Lk), expanded: the mask in uint8, the bias in any floating dtype; each may be None
    mask_ptr, bias_ptr,
    # (1,), int64; or None
    seed_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, q_blocks, q_length, k_length, q_rows,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr,
):  # fmt: skip
    """Write dq of one block of queries."""
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
    bias_ptr = pair_pointer(bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    last_row = tl.minimum(first_row + BLOCK_M, q_len) - 1
    low, high, start, full_start, full_stop = visible_range(
        first_row, last_row, offset, k_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    inside = rows < q_len
    # q and dout: [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, inside, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(
        dout_ptr, rows, inside, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
    )
    shift, inverse, delta = row_statistics(shift_ptr, inverse_ptr, delta_ptr, rows, q_len, SCALING)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(0 if HAS_LEFT else 1, 3):
        phase_start, phase_stop = phase_range(phase, start, full_start, full_stop, high)
        for first_key in range(phase_start, phase_stop, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, phase != 1,
            )  # fmt: skip
            attended = attended_keys(
                keys, allowed, mask_ptr, low, high, stride_mask_key, HAS_MASK, MASK_ROW
            )
            # k and v: [BLOCK_N, BLOCK_D]
            k = load_rows(
                k_ptr,
                keys,
                attended,
                stride_k_row,
                stride_k_dim,
                HEAD_DIM,
                BLOCK_D,
                phase != 1 or HAS_MASK,
            )
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = logits(
                scores, rows[:, None], keys[None, :], allowed, bias_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, phase != 1 or HAS_MASK,
            )  # fmt: skip
            weights = exponentials(scores, shift[:, None], scale, SCALING)
            if SCALING:
                weights *= inverse[:, None]
            v = load_rows(
                v_ptr, keys, keys < k_len, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, phase != 1
            )
            dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if HAS_DROPOUT:
                keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            dscores = weights * (dweights - delta[:, None])
            if phase != 1 or HAS_MASK:
                # v may hold NaN at pairs that are not allowed, and 0 * NaN is NaN.
                dscores = tl.where(allowed, dscores, 0.0)
            dq = dot(narrow(dscores, k.dtype), k, dq)

    dq_ptr = head_pointer(
        dq_ptr, batch, head, q_start, stride_dq_batch, stride_dq_head, stride_dq_row
    )
    # The softmax of a single key is constant, so the gradient is exactly 0; rounding would give
    # another value.
    dq = narrow(tl.where(k_len == 1, 0.0, dq * scale), dq_ptr.dtype.element_ty)
    store_rows(dq_ptr, dq, rows, inside, stride_dq_row, stride_dq_dim, HEAD_DIM, BLOCK_D)


def backward_launches(
    problem: Problem,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    statistics: tuple[Tensor | None, ...],
    numbers: Numbers,
    dbias: Tensor | None = None,
    sums: Tensor | None = None,
) -> Iterator[Launch]:
    """Yield the launches of the general path of the backward, in order.

    Args:
        problem: The sizes and the arguments of the call of attention.
        dout: Gradient of out, at any strides.
        out: Output of the forward.
        lse: Log-sum-exp of the forward.
        dq: Gradient of q to fill, in the shape of q, at any strides.
        dk: Gradient of k to fill, in the shape of k, at any strides.
        dv: Gradient of v to fill, in the shape of v, at the strides of `dk`.
        statistics: Row statistics from `allocate_statistics`.
        numbers: The numerical arguments of the call of attention.
        dbias: Gradient of the bias to fill, as in `attention_backward`, or None.
        sums: Partial sums of dbias from `allocate_bias_sums`, or None.
    """
    is_varlen = problem.arguments["IS_VARLEN"]
    launch, by_name = statistics_launch(problem, dout, out, lse, statistics)
    yield launch
    shared = {"dout_ptr": dout, **by_name, **strides("dout", dout, is_varlen)}
    tile = problem.tile("dq")
    yield problem.launch(
        "attention_dq", _dq_kernel, tile, dq_ptr=dq, **shared, **strides("dq", dq, is_varlen)
    )
    tile = problem.tile("dkv")
    # In 16 bits with a head dim above 128, the sums of dk and of dv do not fit into the registers
    # together, so two launches compute them.
    is_split = problem.head_dim > 128 and dk.dtype != torch.float32
    for has_dk, has_dv in ((True, False), (False, True)) if is_split else ((True, True),):
        yield problem.launch(
            "attention_dkv",
            _dkv_kernel,
            tile,
            over_keys=True,
            dk_ptr=dk,
            dv_ptr=dv,
            HAS_DK=has_dk,
            HAS_DV=has_dv,
            **shared,
            **strides("dk", dk, is_varlen),
        )
    if dbias is not None:
        yield from bias_gradient_launches(problem, numbers, dbias, sums, shared)


def _backward_launches(
    q, k, v, mask, bias, cu_seqlens_q, cu_seqlens_k, seed, dout, out, lse,
    dq, dk, dv, delta, maximum, inverse, dbias, sums, numbers: Numbers, path,
) -> list[Launch]:  # fmt: skip
    tensors = (q, k, v, mask, bias, cu_seqlens_q, cu_seqlens_k, seed)
    problem = problem_of(*tensors, numbers)
    # The gradient of the bias needs the row statistics, which only the general path computes.
    if dbias is None and serves(problem, "backward", path):
        return [short_backward_launch(problem, dout, out, lse, dq, dk, dv)]
    statistics = (delta, maximum, inverse)
    gradients = (dq, dk, dv)
    return list(
        backward_launches(problem, dout, out, lse, *gradients, statistics, numbers, dbias, sums)
    )


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    dbias: Tensor | None = None,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `attention_forward`, which describes the arguments not listed here.

    Args:
        dout: Gradient of out, in the shape and dtype of out, at any strides.
        out: Output of the forward.
        lse: Log-sum-exp of the forward.
        into: Tensors for dq, dk and dv at any strides; on the general path, dk and dv must have the
            same strides. None allocates tensors that are stored in the order of out.
        dbias: Tensor for the gradient of the bias: contiguous, in the dtype of the bias and in the
            shape that the bias had before it was expanded. With None, no gradient of the bias is
            computed. With a tensor, the general path is used, whatever `path` is.

    Returns:
        dq, dk and dv in the shapes and the dtype of q, k and v. They are 0 in rows beyond the last
        sequence. A query that attends to no key adds 0 to all of them.

    Raises:
        ValueError: As in `attention_forward`.
    """
    tensors, numbers = canonical(
        q, k, v,
        mask=mask, bias=bias, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seed=seed, dropout_p=dropout_p,
        scale=scale, causal=causal, window=window,
    )  # fmt: skip
    is_varlen = cu_seqlens_q is not None
    dq, dk, dv = into or (allocate_rows(x, is_varlen) for x in (q, k, v))
    if (cu_seqlens_q.shape[0] - 1 if is_varlen else q.shape[0]) == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    sums = None
    if dbias is not None:
        assert bias is not None
        sums = allocate_bias_sums(q, bias, dbias, numbers)
    statistics = allocate_statistics(scaling(q.dtype, bias is not None, scale), lse)
    results = (dq, dk, dv, *statistics, dbias, sums)
    run(_backward_launches, (*tensors, dout, out, lse), results, numbers, path)
    return dq, dk, dv
