"""Forward of attention, softmax(q kᵀ scale + bias) v, dense and packed.

One program computes a block of queries of one head in a loop over tiles of keys, with the running
softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1). Only the first and the last tiles of
keys check the window and the length. In the tiles between, neither of them hides a key from a query
of the block. The backward reads out and lse, the log-sum-exp of each query's logits.

These kernels are the general path. attention_short.py has the short path, for few keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_backward import attention_backward
from fastbert.kernels.attention_mask import allowed_pairs, attended_keys, phase_range, visible_range
from fastbert.kernels.attention_problem import (
    UNSPECIALISED,
    Numbers,
    Problem,
    allocate_rows,
    canonical,
    problem_of,
    strides,
)
from fastbert.kernels.attention_rows import (
    empty_slack,
    head_pointer,
    load_rows,
    pair_pointer,
    program_item,
    sequence_bounds,
    store_rows,
    zero_slack,
)
from fastbert.kernels.attention_short import serves, short_forward_launch
from fastbert.kernels.attention_softmax import divided, log_sum_exp, logits, online_softmax
from fastbert.kernels.common import INFINITY, dot, narrow
from fastbert.kernels.launch import Launch, run
from fastbert.kernels.philox import dropout_keep

__all__ = ["attention_backward", "attention_forward"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, out_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32
    lse_ptr,
    # (B, H, Lq, Lk), expanded: the mask in uint8, the bias in any floating dtype; each may be None
    mask_ptr, bias_ptr,
    # (1,), int64; or None
    seed_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_v_batch, stride_v_head, stride_v_row, stride_v_dim,
    stride_out_batch, stride_out_head, stride_out_row, stride_out_dim,
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
    """Store the output and lse, the log-sum-exp of the logits, of one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    if IS_VARLEN:
        empty_slack(
            lse_ptr, batch, head, block, q_blocks, cu_seqlens_q_ptr, batches, q_rows,
            stride_lse_head, BLOCK_M,
        )  # fmt: skip
        zero_slack(
            out_ptr, batch, head, block, q_blocks, cu_seqlens_q_ptr, batches, q_rows,
            stride_out_head, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    first_row = block * BLOCK_M
    if first_row >= q_len:
        return
    lse_ptr = head_pointer(lse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    v_ptr = head_pointer(v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row)
    mask_ptr = pair_pointer(mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK)
    bias_ptr = pair_pointer(bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    offset = k_len - q_len
    last_row = tl.minimum(first_row + BLOCK_M, q_len) - 1
    low, high, start, full_start, full_stop = visible_range(
        first_row, last_row, offset, k_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )

    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    maximum = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Phase 0 computes the masked tiles before the full tiles. Without a left limit of the window,
    # there are no such tiles, so phase 0 is not compiled.
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
            # [BLOCK_N, BLOCK_D]
            k = load_rows(
                k_ptr, keys, keys < k_len, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, phase != 1
            )
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = logits(
                scores, rows[:, None], keys[None, :], allowed, bias_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, phase != 1 or HAS_MASK,
            )  # fmt: skip
            weights, maximum, rescale = online_softmax(
                scores, maximum, scale, SCALING, phase != 1 or HAS_MASK or HAS_BIAS
            )
            total = total * rescale + tl.sum(weights, axis=1)
            if HAS_DROPOUT:
                keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                weights = tl.where(keep, weights, 0.0)
            # [BLOCK_N, BLOCK_D]
            v = load_rows(
                v_ptr,
                keys,
                attended,
                stride_v_row,
                stride_v_dim,
                HEAD_DIM,
                BLOCK_D,
                phase != 1 or HAS_MASK,
            )
            out = dot(narrow(weights, v.dtype), v, out * rescale[:, None])

    inverse = divided(dropout_scale, total, SCALING)
    out = narrow(out * inverse[:, None], out_ptr.dtype.element_ty)
    out_ptr = head_pointer(
        out_ptr, batch, head, q_start, stride_out_batch, stride_out_head, stride_out_row
    )
    store_rows(out_ptr, out, rows, rows < q_len, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D)
    tl.store(lse_ptr + rows, log_sum_exp(maximum, total, SCALING), mask=rows < q_len)


def general_forward_launch(problem: Problem, out: Tensor, lse: Tensor) -> Launch:
    """Return the launch of `attention_forward` on the general path, for any number of keys."""
    tile = problem.tile("forward")
    return problem.launch(
        "attention_forward",
        _forward_kernel,
        tile,
        out_ptr=out,
        lse_ptr=lse,
        **strides("out", out, problem.arguments["IS_VARLEN"]),
    )


def _forward_launch(
    q, k, v, mask, bias, cu_seqlens_q, cu_seqlens_k, seed, out, lse, numbers: Numbers, path
) -> Launch:
    tensors = (q, k, v, mask, bias, cu_seqlens_q, cu_seqlens_k, seed)
    problem = problem_of(*tensors, numbers)
    is_short = serves(problem, "forward", path)
    launch = short_forward_launch if is_short else general_forward_launch
    return launch(problem, out, lse)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    path: str | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention and the natural log-sum-exp of its scaled and biased logits.

    Args:
        q: Queries (B, H, Lq, D) at any strides, or packed (Tq, H, D); fp32, fp16 or bf16.
        k: Keys (B, H, Lk, D) at any strides, or packed (Tk, H, D), in the dtype of `q`.
        v: Values, as `k`.
        mask: Bool, True where a query attends to a key; expanded to (B, H, Lq, Lk). For packed
            input, Lq and Lk are the largest lengths, and positions are counted inside each
            sequence.
        bias: Floating tensor that is added to q kᵀ scale; shape as for `mask`.
        cu_seqlens_q: Cumulative lengths of packed queries, int32 (B + 1,); None for dense input.
        cu_seqlens_k: Cumulative lengths of packed keys; `cu_seqlens_q` by default.
        max_seqlen_q: Largest length of the packed query sequences; None reads it from the device.
        max_seqlen_k: Largest length of the packed key sequences; None reads it from the device.
        seed: Seed of dropout, int64 (1,) on the device of `q`; may be None without dropout.
        dropout_p: Probability with which a weight is dropped.
        scale: Factor of the products q kᵀ.
        causal: Whether a query attends only to keys at its own position or earlier.
        window: Numbers of keys before and after its own position that a query attends to; -1 means
            no limit.
        path: "short", "general", or None for the choice of `attention_path`.
        into: Tensors for the results: out at any strides, and a contiguous lse. None allocates
            both tensors.

    Returns:
        out: (B, H, Lq, D), stored in the order of (B, Lq, H, D), or contiguous (Tq, H, D), in the
            dtype of `q`. It is 0 for a query that attends to no key, and in rows beyond the last
            sequence.
        lse: fp32 (B, H, Lq) or (H, Tq); -inf for a query that attends to no key, and in rows beyond
            the last sequence.

    Raises:
        ValueError: If D is outside 1..256, if `dropout_p` is outside [0, 1], if there is dropout
            without a seed, or if `path` is unknown or cannot serve the call.
    """
    tensors, numbers = canonical(
        q, k, v,
        mask=mask, bias=bias, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seed=seed, dropout_p=dropout_p,
        scale=scale, causal=causal, window=window,
    )  # fmt: skip
    is_varlen = cu_seqlens_q is not None
    out, lse = allocate_results(q, is_varlen) if into is None else into
    if is_varlen and cu_seqlens_q.shape[0] == 1:
        # Without a sequence, no program runs, and no row belongs to a sequence.
        out.zero_()
        lse.fill_(-math.inf)
    run(_forward_launch, tensors, (out, lse), numbers, path)
    return out, lse


def allocate_results(q: Tensor, is_varlen: bool) -> tuple[Tensor, Tensor]:
    """Allocate the results of `attention_forward` for queries `q`, dense or packed."""
    shape = (q.shape[1], q.shape[0]) if is_varlen else q.shape[:3]
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    return allocate_rows(q, is_varlen), lse
