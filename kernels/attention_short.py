"""Attention over few keys, all of which one program holds: the kernels for BERT's lengths.

The forward takes up to 512 keys of head dim 64. A work item is a sequence, a head, and a group of
query tiles. For each of its work items, a program loads all keys and values of the head into shared
memory once, and loops over the query tiles of the item. The grid is persistent: it has at most as
many programs as the GPU runs at once, and these programs share the work items. Scores are computed
in chunks of keys, so that few registers are in use and several programs fit on one multiprocessor.
If a dense batch has keys that fill the chunks exactly, and no mask and no window, no chunk is
masked. Otherwise every chunk is masked.

The backward is one kernel. Each score is computed once for dq, dk and dv, which takes 5 products;
the general path needs 7. The loop also computes delta = rowsum(dout * out). delta is also the sum
rowsum(P * dP) with the softmax weights P and their gradient dP. This sum would not need out, but it
would be a reduction across warps, with 96 shuffles and a dozen barriers for each query tile. One
program computes a whole head and sums dk and dv over the query tiles in a fixed order, so there are
no atomic additions and reruns agree bitwise. The backward always masks. The rows of its tiles are
keys, so that a mask of keys takes one predicate per row.

The result of the forward for a row depends on its sequence alone, not on the rest of the batch or
on the longest sequence. Keys and values that no query of a work item attends to are not read,
because they may hold NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs, attended_keys, visible_range
from fastbert.kernels.attention_problem import (
    UNSPECIALISED,
    Problem,
    strides,
)
from fastbert.kernels.attention_rows import (
    empty_slack,
    head_pointer,
    load_rows,
    pair_pointer,
    sequence_bounds,
    store_rows,
    zero_slack,
)
from fastbert.kernels.attention_softmax import (
    divided,
    exponentials,
    log_sum_exp,
    logits,
    online_softmax,
)
from fastbert.kernels.common import INFINITY, LOG2E, dot, narrow
from fastbert.kernels.launch import Launch
from fastbert.kernels.philox import dropout_keep
from fastbert.kernels.tiles import (
    attention_path,
    ceil_div,
    multiprocessors,
    short_attention_obstacle,
    short_attention_tile,
    target_of,
)


@triton.jit
def opaque_zero(counter):
    """Return 0 for a loop counter >= 0, in a form that the compiler cannot simplify.

    The compiler does not move values that depend on this 0 out of the loop of the counter.
    Computing the offsets and predicates of a tile again in each step costs little, but keeping them
    takes many registers.
    """
    return tl.minimum(counter, 0)


@triton.jit
def _zero_slack_of_heads(
    ptr, heads, cu_seqlens_ptr, batches, rows_total, stride_head, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the rows of every head from row cu_seqlens[-1] on to 0; all programs share the work."""
    blocks = (tl.num_programs(0) + heads - 1) // heads
    for share in range(tl.program_id(0), heads * blocks, tl.num_programs(0)):
        zero_slack(
            ptr, batches - 1, share % heads, share // heads, blocks, cu_seqlens_ptr, batches,
            rows_total, stride_head, stride_row, stride_dim, HEAD_DIM, BLOCK_D, BLOCK,
        )  # fmt: skip


@triton.jit
def _seen_keys(
    keys, first_row, last_row, step, mask_ptr, q_len, k_len, left, right,
    stride_mask_row, stride_mask_key,
    HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return which keys at least one query of several query tiles may attend to, bool [BLOCK_N].

    The tiles begin at the queries first_row, first_row + step, … up to last_row.
    """
    offset = k_len - q_len
    low, high, _, _, _ = visible_range(
        first_row, last_row, offset, k_len, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    # A work item without rows reads no keys.
    high = tl.where(first_row <= last_row, high, low)
    seen = attended_keys(
        keys, keys < k_len, mask_ptr, low, high, stride_mask_key, HAS_MASK and MASK_ROW, True
    )
    if HAS_MASK and not MASK_ROW:
        counts = tl.zeros_like(keys)
        for row in range(first_row, last_row + 1, step):
            rows = row + tl.arange(0, BLOCK_M)
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_ptr, offset, q_len, k_len,
                left, right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, True,
            )  # fmt: skip
            counts = tl.maximum(counts, tl.max(allowed.to(tl.int32), axis=0))
        seen = seen & (counts > 0)
    return seen


@triton.jit(do_not_specialize=[*UNSPECIALISED, "groups", "items"])
def _short_forward_kernel(
    # (B, H, L, D), or packed (T, H, D); fp16 or bf16
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
    heads, batches, groups, items, q_length, k_length, q_rows,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr, IS_FULL: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the output and the log-sum-exp lse of the program's share of the work items."""
    IS_MASKED: tl.constexpr = HAS_MASK or HAS_LEFT or HAS_RIGHT or not IS_FULL
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    if IS_VARLEN:
        blocks = (tl.num_programs(0) + heads - 1) // heads
        for share in range(tl.program_id(0), heads * blocks, tl.num_programs(0)):
            empty_slack(
                lse_ptr, batches - 1, share % heads, share // heads, blocks, cu_seqlens_q_ptr,
                batches, q_rows, stride_lse_head, BLOCK_M,
            )  # fmt: skip
        _zero_slack_of_heads(
            out_ptr, heads, cu_seqlens_q_ptr, batches, q_rows,
            stride_out_head, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        group = item % groups
        head = item // groups % heads
        batch = item // groups // heads
        none = opaque_zero(item)
        keys = none + tl.arange(0, BLOCK_N)
        q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
        k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
        q_base = head_pointer(
            q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row
        )
        k_base = head_pointer(
            k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row
        )
        v_base = head_pointer(
            v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row
        )
        out_base = head_pointer(
            out_ptr, batch, head, q_start, stride_out_batch, stride_out_head, stride_out_row
        )
        lse_base = head_pointer(lse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
        mask_base = pair_pointer(
            mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK
        )
        bias_base = pair_pointer(
            bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS
        )
        first = group * BLOCK_M
        step = groups * BLOCK_M
        keys_t = ()
        values = ()
        for chunk in tl.static_range(CHUNKS):
            seen = _seen_keys(
                keys + chunk * BLOCK_N, first, q_len - 1, step, mask_base, q_len, k_len,
                window_left, window_right, stride_mask_row, stride_mask_key,
                HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, BLOCK_M,
            )  # fmt: skip
            # k and v: [BLOCK_N, BLOCK_D]
            k = load_rows(
                k_base, keys + chunk * BLOCK_N, seen, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D,
                IS_MASKED,
            )  # fmt: skip
            v = load_rows(
                v_base, keys + chunk * BLOCK_N, seen, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D,
                IS_MASKED,
            )  # fmt: skip
            # Triton does not compile a starred tuple.
            keys_t = keys_t + (tl.trans(k),)  # noqa: RUF005
            values = values + (v,)  # noqa: RUF005
        for first_row in range(first, q_len, step):
            rows = first_row + tl.arange(0, BLOCK_M)
            inside = rows < q_len
            # [BLOCK_M, BLOCK_D]
            q = load_rows(q_base, rows, inside, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
            maximum = tl.full([BLOCK_M], -INFINITY, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                first_key = chunk * BLOCK_N + opaque_zero(first_row)
                cols = first_key + tl.arange(0, BLOCK_N)
                # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
                allowed = allowed_pairs(
                    rows[:, None], cols[None, :], mask_base, k_len - q_len, q_len, k_len,
                    window_left, window_right, stride_mask_row, stride_mask_key,
                    HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
                scores = dot(q, keys_t[chunk], tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                scores = logits(
                    scores, rows[:, None], cols[None, :], allowed, bias_base, scale, q_len, k_len,
                    stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, IS_MASKED,
                )  # fmt: skip
                weights, maximum, rescale = online_softmax(
                    scores, maximum, scale, SCALING, IS_MASKED or HAS_BIAS
                )
                total = total * rescale + tl.sum(weights, axis=1)
                if HAS_DROPOUT:
                    keep = dropout_keep(
                        seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N
                    )
                    weights = tl.where(keep, weights, 0.0)
                weights = narrow(weights, values[chunk].dtype)
                out = dot(weights, values[chunk], out * rescale[:, None])
            inverse = divided(dropout_scale, total, SCALING)
            out = narrow(out * inverse[:, None], out_ptr.dtype.element_ty)
            store_rows(
                out_base, out, rows, inside, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D
            )
            tl.store(lse_base + rows, log_sum_exp(maximum, total, SCALING), mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "items"])
def _short_backward_kernel(
    # (B, H, L, D), or packed (T, H, D); fp16 or bf16
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32
    lse_ptr,
    # (B, H, L, D), or packed (T, H, D), in the dtype of q
    dq_ptr, dk_ptr, dv_ptr,
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
    stride_dout_batch, stride_dout_head, stride_dout_row, stride_dout_dim,
    stride_dq_batch, stride_dq_head, stride_dq_row, stride_dq_dim,
    stride_dk_batch, stride_dk_head, stride_dk_row, stride_dk_dim,
    stride_dv_batch, stride_dv_head, stride_dv_row, stride_dv_dim,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_key,
    stride_bias_batch, stride_bias_head, stride_bias_row, stride_bias_key,
    stride_lse_batch, stride_lse_head,
    heads, batches, items, q_length, k_length, q_rows, k_rows,
    scale, dropout_threshold, dropout_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALING: tl.constexpr,
):  # fmt: skip
    """Store dq, dk and dv of the program's share of the heads of all sequences."""
    if IS_VARLEN:
        _zero_slack_of_heads(
            dq_ptr, heads, cu_seqlens_q_ptr, batches, q_rows,
            stride_dq_head, stride_dq_row, stride_dq_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        _zero_slack_of_heads(
            dk_ptr, heads, cu_seqlens_k_ptr, batches, k_rows,
            stride_dk_head, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
        _zero_slack_of_heads(
            dv_ptr, heads, cu_seqlens_k_ptr, batches, k_rows,
            stride_dv_head, stride_dv_row, stride_dv_dim, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % heads
        batch = item // heads
        none = opaque_zero(item)
        keys = tl.arange(0, BLOCK_N)
        if BLOCK_N <= 64 or HAS_DROPOUT or IS_VARLEN:
            # Without this addition, these variants spill registers on sm_80. With the addition,
            # other variants spill registers on sm_100.
            keys += none
        q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
        k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
        q_base = head_pointer(
            q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row
        )
        k_base = head_pointer(
            k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row
        )
        v_base = head_pointer(
            v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row
        )
        out_base = head_pointer(
            out_ptr, batch, head, q_start, stride_out_batch, stride_out_head, stride_out_row
        )
        dout_base = head_pointer(
            dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
        )
        dq_base = head_pointer(
            dq_ptr, batch, head, q_start, stride_dq_batch, stride_dq_head, stride_dq_row
        )
        dk_base = head_pointer(
            dk_ptr, batch, head, k_start, stride_dk_batch, stride_dk_head, stride_dk_row
        )
        dv_base = head_pointer(
            dv_ptr, batch, head, k_start, stride_dv_batch, stride_dv_head, stride_dv_row
        )
        lse_base = head_pointer(lse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1)
        mask_base = pair_pointer(
            mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK
        )
        bias_base = pair_pointer(
            bias_ptr, batch, head, stride_bias_batch, stride_bias_head, HAS_BIAS
        )
        seen = _seen_keys(
            keys, none, q_len - 1, BLOCK_M, mask_base, q_len, k_len, window_left, window_right,
            stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, HAS_LEFT, HAS_RIGHT, BLOCK_M,
        )  # fmt: skip
        # k and v: [BLOCK_N, BLOCK_D]
        k = load_rows(k_base, keys, seen, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True)
        v = load_rows(v_base, keys, seen, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        # The softmax of a single key is constant, so the gradient is exactly 0; rounding would give
        # another value.
        dscores_scale = tl.where(k_len == 1, 0.0, scale)
        for first_row in range(0, q_len, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            inside = rows < q_len
            # q, dout and out: [BLOCK_M, BLOCK_D]
            q = load_rows(q_base, rows, inside, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True)
            dout = load_rows(
                dout_base, rows, inside, stride_dout_row, stride_dout_dim, HEAD_DIM, BLOCK_D, True
            )
            out = load_rows(
                out_base, rows, inside, stride_out_row, stride_out_dim, HEAD_DIM, BLOCK_D, True
            )
            delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
            # A row that attends to no key or is beyond q_len gets an lse of +inf, so that its
            # weights are exactly 0.
            lse = tl.load(lse_base + rows, mask=inside, other=INFINITY)
            lse = tl.where(lse == -INFINITY, INFINITY, lse)
            if not SCALING:
                lse = lse * LOG2E
            # Tiles of scores are [BLOCK_N, BLOCK_M], so their products with dout and q need no
            # transposition.
            allowed = seen[:, None]
            if HAS_LEFT or HAS_RIGHT or (HAS_MASK and not MASK_ROW):
                allowed = allowed & allowed_pairs(
                    rows[None, :], keys[:, None], mask_base, k_len - q_len, q_len, k_len,
                    window_left, window_right, stride_mask_row, stride_mask_key,
                    HAS_MASK and not MASK_ROW, False, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
            scores = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            scores = logits(
                scores, rows[None, :], keys[:, None], allowed, bias_base, scale, q_len, k_len,
                stride_bias_row, stride_bias_key, HAS_BIAS, SCALING, True,
            )  # fmt: skip
            weights = exponentials(scores, lse[None, :], scale, SCALING)
            dweights = dot(v, tl.trans(dout), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            dropped = weights
            if HAS_DROPOUT:
                first_key = opaque_zero(first_row)
                # The seed is loaded here so that no register holds Philox keys during the products.
                seed = tl.load(seed_ptr + first_key)
                keep = tl.trans(
                    dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                )
                dropped = tl.where(keep, weights, 0.0)
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            dv = dot(narrow(dropped, dout.dtype), dout, dv)
            dscores = narrow(weights * (dweights - delta[None, :]), q.dtype)
            dk = dot(dscores, q, dk)
            dq_t = dot(tl.trans(k), dscores, tl.zeros([BLOCK_D, BLOCK_M], tl.float32))
            dq = tl.trans(narrow(dq_t * dscores_scale, dq_ptr.dtype.element_ty))
            store_rows(dq_base, dq, rows, inside, stride_dq_row, stride_dq_dim, HEAD_DIM, BLOCK_D)
        dk = narrow(dk * dscores_scale, dk_ptr.dtype.element_ty)
        dv = narrow(dv * dropout_scale, dv_ptr.dtype.element_ty)
        here = keys < k_len
        store_rows(dk_base, dk, keys, here, stride_dk_row, stride_dk_dim, HEAD_DIM, BLOCK_D)
        store_rows(dv_base, dv, keys, here, stride_dv_row, stride_dv_dim, HEAD_DIM, BLOCK_D)


def serves(problem: Problem, pass_name: str, path: str | None) -> bool:
    """Return whether the kernels of this file compute a pass, the forward or the backward.

    Args:
        problem: The sizes and the arguments of the call of attention.
        pass_name: "forward" or "backward".
        path: "short", "general", or None for the choice of `attention_path`.

    Raises:
        ValueError: If `path` is unknown, or if it is "short" and the kernels cannot run the pass.
    """
    if path not in (None, "short", "general"):
        raise ValueError(f"path: got {path!r}, allowed: None, 'short', 'general'")
    dtype = problem.arguments["q_ptr"].dtype
    shape = (pass_name, problem.max_k, problem.head_dim, dtype)
    target = target_of(problem.arguments["q_ptr"])
    if path == "short" and (obstacle := short_attention_obstacle(*shape, target)):
        raise ValueError(f"path: 'short' cannot serve: {obstacle}")
    arguments = problem.arguments
    chosen = path or attention_path(
        *shape,
        has_key_mask=arguments["MASK_ROW"],
        has_pairs=problem.has_pairs,
        target=target,
    )
    return chosen == "short"


def _query_groups(q_blocks: int, heads: int, programs: int, chunks: int) -> int:
    """Return the number of groups into which the query tiles of a head are divided.

    With several groups, few heads can fill the GPU. The slowest program takes
    ceil(heads * groups / programs) work items. The assumed cost of an item is the number of its
    query tiles plus half a tile for each chunk of keys that it loads.

    Args:
        q_blocks: Number of query tiles of a head.
        heads: Number of heads of all sequences together.
        programs: Number of programs that the GPU runs at once.
        chunks: Number of chunks of keys.
    """
    candidates = [2**i for i in range(q_blocks.bit_length())] if q_blocks else [1]
    return min(
        candidates,
        key=lambda groups: (
            ceil_div(heads * groups, programs) * (ceil_div(q_blocks, groups) + chunks / 2)
        ),
    )


def short_forward_launch(problem: Problem, out: Tensor, lse: Tensor) -> Launch:
    """Return the launch of the short forward.

    Args:
        problem: The sizes and the arguments of the call of attention.
        out: Output to fill, in the shape and dtype of q, at any strides.
        lse: Log-sum-exp to fill, contiguous fp32 (B, H, Lq), or packed (H, Tq).
    """
    has_dropout = problem.arguments["HAS_DROPOUT"]
    tile, chunks, resident = short_attention_tile(
        "forward", problem.max_k, problem.head_dim, target_of(out), has_dropout
    )
    is_varlen = problem.arguments["IS_VARLEN"]
    heads = problem.batches * problem.heads
    programs = resident * multiprocessors(out)
    groups = _query_groups(ceil_div(problem.max_q, tile.block_m), heads, programs, chunks)
    launch = problem.launch(
        "attention_short_forward",
        _short_forward_kernel,
        tile,
        out_ptr=out,
        lse_ptr=lse,
        groups=groups,
        items=heads * groups,
        CHUNKS=chunks,
        IS_FULL=not is_varlen and problem.max_k == chunks * tile.block_n,
        **strides("out", out, is_varlen),
    )
    return launch._replace(grid=(min(heads * groups, programs),))


def short_backward_launch(
    problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Launch:
    """Return the launch of the short backward; all tensors except lse may have any strides.

    Args:
        problem: The sizes and the arguments of the call of attention.
        dout: Gradient of out.
        out: Output of the forward.
        lse: Log-sum-exp of the forward, contiguous.
        dq: Gradient of q to fill, in the shape and dtype of q.
        dk: Gradient of k to fill, in the shape and dtype of k.
        dv: Gradient of v to fill, in the shape and dtype of v.
    """
    has_dropout = problem.arguments["HAS_DROPOUT"]
    tile, _, resident = short_attention_tile(
        "backward", problem.max_k, problem.head_dim, target_of(out), has_dropout
    )
    is_varlen = problem.arguments["IS_VARLEN"]
    heads = problem.batches * problem.heads
    launch = problem.launch(
        "attention_short_backward",
        _short_backward_kernel,
        tile,
        out_ptr=out,
        dout_ptr=dout,
        lse_ptr=lse,
        dq_ptr=dq,
        dk_ptr=dk,
        dv_ptr=dv,
        items=heads,
        **strides("out", out, is_varlen),
        **strides("dout", dout, is_varlen),
        **strides("dq", dq, is_varlen),
        **strides("dk", dk, is_varlen),
        **strides("dv", dv, is_varlen),
    )
    return launch._replace(grid=(min(heads, resident * multiprocessors(out)),))
