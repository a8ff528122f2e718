"""Softmax weights of chosen heads and query rows: what attention itself never writes.

One program owns a block of the chosen rows of one head. Given the log-sum-exp that the forward
saved it writes exp(S - lse) in one pass over the keys, one product. Without one, and where one
rounding of lse would show (fp32, or a bias of finfo.min), a first pass finds the maximum and the
sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs
from fastbert.kernels.attention_problem import UNSPECIALISED, Problem, describe
from fastbert.kernels.attention_rows import head_pointer, load_rows, sequence_bounds
from fastbert.kernels.attention_softmax import exponentials, logits, online_softmax
from fastbert.kernels.common import INFINITY, LOG2E, dot, narrow
from fastbert.kernels.launch import Launch


@triton.jit(do_not_specialize=[*UNSPECIALISED, "chosen_heads", "chosen_rows", "row_blocks"])
def _weights_kernel(
    q_ptr, k_ptr, lse_ptr, weights_ptr, heads_ptr, rows_ptr, mask_ptr, bias_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    stride_q_batch, stride_q_head, stride_q_row, stride_q_dim,
    stride_k_batch, stride_k_head, stride_k_row, stride_k_dim,
    stride_weights_batch, stride_weights_head, stride_weights_row,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head,
    chosen_heads, chosen_rows, row_blocks, q_length, k_length, scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCALING: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_HEADS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % row_blocks
    place = tl.program_id(0) // row_blocks % chosen_heads
    batch = tl.program_id(0) // row_blocks // chosen_heads
    places = block * BLOCK_M + tl.arange(0, BLOCK_M)
    weights_ptr += batch.to(tl.int64) * stride_weights_batch
    weights_ptr += place.to(tl.int64) * stride_weights_head
    head = place
    if HAS_HEADS:
        head = tl.load(heads_ptr + place).to(tl.int32)
    rows = places
    if HAS_ROWS:
        rows = tl.load(rows_ptr + places, mask=places < chosen_rows, other=0).to(tl.int32)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
    q_ptr = head_pointer(q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row)
    k_ptr = head_pointer(k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row)
    none = head * 0
    if HAS_MASK:
        mask_ptr = head_pointer(mask_ptr, batch, head, none, stride_mask_batch, stride_mask_head, 0)
    if HAS_BIAS:
        bias_ptr = head_pointer(bias_ptr, batch, head, none, stride_bias_batch, stride_bias_head, 0)
    offset = k_len - q_len
    q = load_rows(q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    shift = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_LSE:
        lse_ptr = head_pointer(lse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
        # In the units of `exponentials`; HAS_LSE implies raw scores.
        shift = tl.load(lse_ptr + rows, mask=rows < q_len, other=-INFINITY) * LOG2E
        total += 1.0
    # Pass 0 finds each row's maximum and sum, pass 1 writes the weights: no row need fit.
    for weights_pass in tl.static_range(1 if HAS_LSE else 0, 2):
        # All keys of the longest sequence: what lies beyond this one's is written as 0.
        for first_key in range(0, k_len if weights_pass == 0 else k_length, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, True,
            )  # fmt: skip
            k = load_rows(
                k_ptr, keys, keys < k_len, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True
            )
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = logits(
                scores, rows[:, None], keys[None, :], allowed, bias_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, True,
            )  # fmt: skip
            if weights_pass == 0:
                weights, shift, rescale = online_softmax(scores, shift, scale, SCALING, True)
                total = total * rescale + tl.sum(weights, axis=1)
            else:
                finite = tl.where(shift == -INFINITY, 0.0, shift)
                weights = exponentials(scores, finite[:, None], scale, SCALING)
                weights = weights / tl.where(total == 0.0, 1.0, total)[:, None]
                weights = tl.where((rows < q_len)[:, None], weights, 0.0)
                pointers = weights_ptr + places.to(tl.int64)[:, None] * stride_weights_row
                pointers += keys[None, :]
                inside = (places < chosen_rows)[:, None] & (keys < k_length)[None, :]
                tl.store(pointers, narrow(weights, weights_ptr.dtype.element_ty), mask=inside)


def weights_launch(
    problem: Problem,
    lse: Tensor | None,
    weights: Tensor,
    heads: Tensor | None = None,
    rows: Tensor | None = None,
) -> Launch:
    tile = problem.tile("weights")
    batches, chosen_heads, chosen_rows, _ = weights.shape
    row_blocks = triton.cdiv(chosen_rows, tile.block_m)
    uses_lse = lse is not None and problem.arguments["SCALING"] == 0
    launch = problem.launch(
        "attention_weights",
        _weights_kernel,
        tile,
        lse_ptr=lse if uses_lse else None,
        weights_ptr=weights,
        heads_ptr=heads,
        rows_ptr=rows,
        stride_weights_batch=weights.stride(0),
        stride_weights_head=weights.stride(1),
        stride_weights_row=weights.stride(2),
        chosen_heads=chosen_heads,
        chosen_rows=chosen_rows,
        row_blocks=row_blocks,
        HAS_LSE=uses_lse,
        HAS_HEADS=heads is not None,
        HAS_ROWS=rows is not None,
    )
    return launch._replace(grid=(row_blocks * chosen_heads * batches,))


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    *,
    heads: Tensor | None = None,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float,
    **options: object,
) -> Tensor:
    """Softmax weights (B, heads, rows, Lk) before dropout, in q's dtype.

    heads and rows are int64 (n,) on the device of q, every number within bounds; None takes all.
    The rest as for ``attention_forward``, whose lse spares a pass; rows and keys beyond a packed
    sequence get 0.
    """
    problem = describe(q, k, k, mask=mask, bias=bias, scale=scale, **options)
    shape = (
        problem.batches,
        problem.heads if heads is None else heads.numel(),
        problem.max_q if rows is None else rows.numel(),
        problem.max_k,
    )
    weights = torch.empty(shape, dtype=q.dtype, device=q.device)
    weights_launch(problem, lse, weights, heads, rows).run(on=q)
    return weights
