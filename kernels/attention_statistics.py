"""Statistics of each query row, which the backward of attention computes before the gradients.

The gradient of the logits S is dS = P * (dP - delta). P = exp(S - shift) * inverse are the softmax
weights, dP is their gradient (dout vᵀ with dropout applied), and delta = rowsum(P * dP). The
constant SCALING (attention_problem.scaling) selects one of two kernels:

- Delta, for SCALING 0 (16 bits, no bias, a scale above 0): shift is the saved log-sum-exp lse,
  inverse is 1, and delta = rowsum(dout * out) needs no product (Dao et al. 2022, appendix B.2).
- Statistics, otherwise: one pass over the keys computes the maximum, the sum and delta of each row,
  with two products in addition to the seven of the gradients. The kernel does not use lse, for two
  reasons. Rounding lse makes a relative error of |lse| 2**-24 in every weight of the row, which is
  too large for fp32 at large logits. With a bias of finfo.min, the rounded lse does not depend on
  the number of keys. The kernel does not compute delta from out either. Where one weight is nearly
  1, dP - delta cancels, so the rounding errors of such a delta would dominate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs, attended_keys, phase_range, visible_range
from fastbert.kernels.attention_problem import UNSPECIALISED, Problem, strides
from fastbert.kernels.attention_rows import (
    head_pointer,
    load_rows,
    pair_pointer,
    program_item,
    sequence_bounds,
)
from fastbert.kernels.attention_softmax import divided, logits, online_softmax
from fastbert.kernels.common import INFINITY, LOG2E, dot
from fastbert.kernels.launch import Launch
from fastbert.kernels.philox import dropout_keep


@triton.jit
def row_statistics(shift_ptr, inverse_ptr, delta_ptr, rows, q_len, SCALING: tl.constexpr):
    """Load the row statistics shift, inverse and delta, each fp32 [rows].

    shift is in the form that `exponentials` takes as maximum. It is +inf for a row without an
    allowed key and for a row beyond q_len, so that the weights of such rows are exactly 0.
    """
    inside = rows < q_len
    shift = tl.load(shift_ptr + rows, mask=inside, other=INFINITY)
    shift = tl.where(shift == -INFINITY, INFINITY, shift)
    delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
    if SCALING:
        inverse = tl.load(inverse_ptr + rows, mask=inside, other=0.0)
    else:
        shift = shift * LOG2E
        inverse = tl.full(rows.shape, 1.0, tl.float32)
    return shift, inverse, delta


@triton.jit(do_not_specialize=UNSPECIALISED)
def _delta_kernel(
    # (B, H, Lq, D), or packed (Tq, H, D); fp16 or bf16
    out_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32
    delta_ptr,
    # (B + 1,), int32; None for dense input
    cu_seqlens_q_ptr,
    stride_out_batch, stride_out_head, stride_out_row, stride_out_dim,
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_lse_batch, stride_lse_head, heads, q_blocks, q_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, IS_VARLEN: tl.constexpr,
):  # fmt: skip
    """Write delta = rowsum(dout * out) of one block of queries."""
    block, head, batch = program_item(q_blocks, heads)
    q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ptr = head_pointer(
        out_ptr, batch, head, q_start, stride_out_batch, stride_out_head, stride_out_row
    )
    dout_ptr = head_pointer(
        dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
    )
    delta_ptr = head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    inside = rows < q_len
    # out and dout: [BLOCK_M, BLOCK_D]
    out = load_rows(out_ptr, rows, inside, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(
        dout_ptr, rows, inside, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
    )
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + rows, delta, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _statistics_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32
    shift_ptr, inverse_ptr, delta_ptr,
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
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head,
    heads, q_blocks, q_length, k_length,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr,
):  # fmt: skip
    """Write the softmax maximum, the inverse of the sum, and delta for one block of queries."""
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
    maximum = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
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
                k_ptr, keys, attended, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D,
                phase != 1 or HAS_MASK,
            )  # fmt: skip
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = logits(
                scores, rows[:, None], keys[None, :], allowed, bias_ptr, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, phase != 1 or HAS_MASK,
            )  # fmt: skip
            weights, maximum, rescale = online_softmax(
                scores, maximum, scale, SCALING, phase != 1 or HAS_MASK or HAS_BIAS
            )
            total = total * rescale + tl.sum(weights, axis=1)
            v = load_rows(
                v_ptr, keys, attended, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D,
                phase != 1 or HAS_MASK,
            )  # fmt: skip
            dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if HAS_DROPOUT:
                keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            delta = delta * rescale + tl.sum(tl.where(allowed, weights * dweights, 0.0), axis=1)

    inverse = divided(1.0, total, SCALING)
    row = head_pointer(shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    tl.store(row + rows, maximum, mask=inside)
    row = head_pointer(inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    tl.store(row + rows, inverse, mask=inside)
    row = head_pointer(delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
    tl.store(row + rows, delta * inverse, mask=inside)


def allocate_statistics(scaling: int, lse: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the row statistics of a backward: delta, maximum and inverse.

    Args:
        scaling: The constant SCALING. If it is 0, maximum and inverse are None.
        lse: Log-sum-exp of the forward, which gives the shape of the statistics.
    """
    delta = torch.empty_like(lse)
    if scaling == 0:
        return delta, None, None
    return delta, torch.empty_like(lse), torch.empty_like(lse)


def statistics_launch(
    problem: Problem,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    allocated: tuple[Tensor | None, ...],
) -> tuple[Launch, dict[str, Any]]:
    """Return the launch that computes the row statistics of a backward.

    Args:
        problem: The sizes and the arguments of the call of attention.
        dout: Gradient of out, in the shape and dtype of out, at any strides.
        out: Output of the forward, (B, H, Lq, D) or packed (Tq, H, D).
        lse: Log-sum-exp of the forward, fp32 (B, H, Lq) or packed (H, Tq).
        allocated: Tensors to fill, from `allocate_statistics`.

    Returns:
        The launch, and a dictionary of the kernel arguments shift_ptr, inverse_ptr and delta_ptr,
        which are fp32 in the shape of `lse`. inverse_ptr is None for SCALING 0.
    """
    is_varlen = problem.arguments["IS_VARLEN"]
    dout_arguments = {"dout_ptr": dout, **strides("dout", dout, is_varlen)}
    delta, maximum, inverse = allocated
    if problem.arguments["SCALING"] == 0:
        statistics = {"shift_ptr": lse, "inverse_ptr": None, "delta_ptr": delta}
        launch = problem.launch(
            "attention_delta",
            _delta_kernel,
            problem.tile("delta"),
            out_ptr=out,
            delta_ptr=delta,
            **dout_arguments,
            **strides("out", out, is_varlen),
        )
        return launch, statistics
    statistics = {"shift_ptr": maximum, "inverse_ptr": inverse, "delta_ptr": delta}
    launch = problem.launch(
        "attention_statistics",
        _statistics_kernel,
        problem.tile("statistics"),
        **dout_arguments,
        **statistics,
    )
    return launch, statistics
