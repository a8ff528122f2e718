"""Softmax weights of chosen heads and query rows; attention itself never stores the weights.

One program computes a block of the chosen rows of one head. If the log-sum-exp lse of the forward
is given and SCALING is 0 (16 bits, no bias, a scale above 0), one pass over the keys writes
exp(S - lse) for the logits S. Otherwise a first pass computes the maximum and the sum of each row,
because the rounding error of lse is too large in fp32 and with a bias of finfo.min.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs
from fastbert.kernels.attention_problem import UNSPECIALISED, Problem, describe
from fastbert.kernels.attention_rows import (
    head_pointer,
    load_rows,
    pair_pointer,
    program_item,
    sequence_bounds,
)
from fastbert.kernels.attention_softmax import divided, exponentials, logits, online_softmax
from fastbert.kernels.common import INFINITY, LOG2E, dot, narrow
from fastbert.kernels.launch import Launch
from fastbert.kernels.tiles import ceil_div


@triton.jit(do_not_specialize=[*UNSPECIALISED, "chosen_heads", "chosen_rows", "row_blocks"])
def _weights_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32; or None
    lse_ptr,
    # (B, chosen heads, chosen rows, Lk), in the dtype of q
    weights_ptr,
    # (chosen heads,) and (chosen rows,), int64; None takes all
    heads_ptr, rows_ptr,
    # (B, H, Lq, Lk), expanded: the mask in uint8, the bias in any floating dtype; each may be None
    mask_ptr, bias_ptr,
    # (B + 1,), int32; None for dense input
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
    """Write the softmax weights for one block of the chosen rows of one head."""
    block, place, batch = program_item(row_blocks, chosen_heads)
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
    mask_ptr = pair_pointer(mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK)
    bias_ptr = pair_pointer(bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS)
    offset = k_len - q_len
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_ptr, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
    shift = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_LSE:
        lse_ptr = head_pointer(lse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
        # `exponentials` takes the maximum times log2(e) here, because HAS_LSE implies SCALING 0.
        shift = tl.load(lse_ptr + rows, mask=rows < q_len, other=-INFINITY) * LOG2E
        total += 1.0
    # Pass 0 computes the maximum and the sum of each row, and pass 1 writes the weights. No pass
    # holds a whole row, so a row may be longer than a tile.
    for weights_pass in tl.static_range(1 if HAS_LSE else 0, 2):
        # Pass 1 goes to the end of the longest sequence, and writes 0 beyond the end of the
        # program's own sequence.
        for first_key in range(0, k_len if weights_pass == 0 else k_length, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, True,
            )  # fmt: skip
            # [BLOCK_N, BLOCK_D]
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
                weights = weights * divided(1.0, total, SCALING)[:, None]
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
    """Return the launch that writes the softmax weights.

    Args:
        problem: The sizes and the arguments of the call of attention.
        lse: Log-sum-exp of the forward, or None.
        weights: Tensor to fill, (B, heads, rows, Lk), contiguous in its last dimension.
        heads: As in `attention_weights`.
        rows: As in `attention_weights`.
    """
    tile = problem.tile("weights")
    batches, chosen_heads, chosen_rows, _ = weights.shape
    row_blocks = ceil_div(chosen_rows, tile.block_m)
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
    """Compute softmax weights before dropout; `attention_forward` describes the other arguments.

    Args:
        lse: Log-sum-exp that `attention_forward` returned, which can save a pass over the keys; or
            None.
        heads: Indices of the heads, int64 (n,) on the device of `q`. The kernel does not check
            them. None takes all heads.
        rows: Positions of the queries, int64 (n,), unchecked like `heads`. None takes all queries.
        options: Further arguments of `attention_forward`, except `path` and `into`.

    Returns:
        Weights (B, heads, rows, Lk) in the dtype of `q`, which are 0 for queries and keys beyond
        the end of a packed sequence.

    Raises:
        ValueError: As in `attention_forward`.
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
