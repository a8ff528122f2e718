"""Gradients of the tables of relative positions.

The pairs of tiles whose first query is `distance` rows after their first key have one window of
distances. In the first kernel, a program has one such distance, a multiple of the block size, and
one head. It goes through the tiles of its sequences and adds the gradients of the logits, by
distance, times the queries or the keys. Each pair of query and key belongs to one program. In the
second kernel, a program has a block of rows of a table, and adds the sums of the distances whose
index is in the block. Both add in a fixed order without atomics, so reruns agree bitwise.

The partial sums take less than 2 + 2 / (heads × diagonals) programs' worth of a window of rows per
multiprocessor, or one window for each head and distance if that is more; the size does not depend
on the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_mask import allowed_pairs, attended_keys
from fastbert.kernels.attention_problem import Problem
from fastbert.kernels.attention_rows import (
    head_pointer,
    load_rows,
    pair_pointer,
    sequence_bounds,
    tile_offsets,
)
from fastbert.kernels.attention_statistics import row_statistics
from fastbert.kernels.common import dot, narrow
from fastbert.kernels.launch import Launch
from fastbert.kernels.philox import dropout_keep
from fastbert.kernels.relative_terms import (
    UNSPECIALISED,
    by_distance,
    load_segment_scores,
    logit_gradients,
    relative_logits,
    segments_differ,
    sequence_pointer,
    softmax_weights,
    window_rows,
)
from fastbert.kernels.tiles import (
    Tile,
    ceil_div,
    multiprocessors,
    relative_tile,
    table_rows_tile,
    table_sums_columns,
    target_of,
)


@triton.jit
def _load_columns(
    ptr, rows, inside, first_dim, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load the columns from `first_dim` on as [rows, COLUMNS], with 0 from HEAD_DIM on."""
    pointers = ptr + first_dim.to(tl.int64) * stride_dim
    pointers += tile_offsets(rows, stride_row, stride_dim, COLUMNS)
    dims_inside = first_dim + tl.arange(0, COLUMNS) < HEAD_DIM
    return tl.load(pointers, mask=inside[:, None] & dims_inside[None, :], other=0.0)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "diagonals", "first_diagonal", "splits"])
def _sums_kernel(
    # (B, H, L, D), or packed (T, H, D); fp32, fp16 or bf16
    q_ptr, k_ptr, v_ptr, dout_ptr,
    # (B, H, Lq), or packed (H, Tq); fp32; inverse is None if SCALING is 0
    shift_ptr, inverse_ptr, delta_ptr,
    # (splits, H, diagonals, WINDOW, D) twice, and (splits, H, diagonals, WINDOW); contiguous fp32
    keys_sums_ptr, queries_sums_ptr, bias_sums_ptr,
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
    heads, batches, q_length, k_length, middle, diagonals, first_diagonal, splits,
    scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HAS_TABLE_BIAS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
    SUMS_KEYS: tl.constexpr, SUMS_QUERIES: tl.constexpr, SUMS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS columns of the sums of a window of distances over one split's sequences."""
    program = tl.program_id(0)
    distance = (program % diagonals + first_diagonal) * BLOCK_M
    head = program // diagonals % heads
    split = program // diagonals // heads
    first_dim = tl.program_id(1) * COLUMNS
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    keys_sums = tl.zeros([WINDOW, COLUMNS], tl.float32)
    queries_sums = tl.zeros([WINDOW, COLUMNS], tl.float32)
    bias_sums = tl.zeros([WINDOW], tl.float32)
    for sequence in range(split, batches, splits):
        # The interpreter counts in plain integers.
        batch = head * 0 + sequence
        q_start, q_len = sequence_bounds(batch, cu_seqlens_q_ptr, q_length, IS_VARLEN)
        k_start, k_len = sequence_bounds(batch, cu_seqlens_k_ptr, k_length, IS_VARLEN)
        offset = k_len - q_len
        q_row = head_pointer(
            q_ptr, batch, head, q_start, stride_q_batch, stride_q_head, stride_q_row
        )
        k_row = head_pointer(
            k_ptr, batch, head, k_start, stride_k_batch, stride_k_head, stride_k_row
        )
        v_row = head_pointer(
            v_ptr, batch, head, k_start, stride_v_batch, stride_v_head, stride_v_row
        )
        dout_row = head_pointer(
            dout_ptr, batch, head, q_start, stride_dout_batch, stride_dout_head, stride_dout_row
        )
        shift_row = head_pointer(
            shift_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
        )
        inverse_row = shift_row
        if SCALING:
            inverse_row = head_pointer(
                inverse_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
            )
        delta_row = head_pointer(
            delta_ptr, batch, head, q_start, stride_lse_batch, stride_lse_head, 1
        )
        mask_row = pair_pointer(
            mask_ptr, batch, head, stride_mask_batch, stride_mask_head, HAS_MASK
        )
        q_segments = sequence_pointer(
            q_segments_ptr, batch, q_start, q_length, IS_VARLEN, HAS_SEGMENTS
        )
        k_segments = sequence_pointer(
            k_segments_ptr, batch, k_start, k_length, IS_VARLEN, HAS_SEGMENTS
        )
        # Dropout needs tiles of keys that begin at a multiple of 4, so the tiles of queries begin
        # where the distance requires, also before the first query.
        low = tl.maximum(offset - distance - BLOCK_M + 1, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(k_len, q_len + offset - distance)
        for first_key in range(low, high, BLOCK_N):
            first_row = first_key - offset + distance
            keys = first_key + tl.arange(0, BLOCK_N)
            rows = first_row + tl.arange(0, BLOCK_M)
            # All loads leave out rows from q_len on.
            rows = tl.where(rows < 0, q_len, rows)
            # [BLOCK_M, BLOCK_N], or a shape that broadcasts to it
            allowed = allowed_pairs(
                rows[:, None], keys[None, :], mask_row, offset, q_len, k_len,
                0, 0, stride_mask_row, stride_mask_key, HAS_MASK, MASK_ROW, False, False, False,
            )  # fmt: skip
            attended = attended_keys(
                keys, allowed, mask_row, 0, k_len, stride_mask_key, HAS_MASK, MASK_ROW
            )
            # q and dout: [BLOCK_M, BLOCK_D]; k and v: [BLOCK_N, BLOCK_D]
            q = load_rows(
                q_row, rows, rows < q_len, stride_q_row, stride_q_dim, HEAD_DIM, BLOCK_D, True
            )
            k = load_rows(
                k_row, keys, attended, stride_k_row, stride_k_dim, HEAD_DIM, BLOCK_D, True
            )
            shift, inverse, delta = row_statistics(
                shift_row, inverse_row, delta_row, rows, q_len, SCALING
            )
            segment_scores = load_segment_scores(
                segment_scores_ptr, batch, head, q_start, rows, q_len,
                stride_lse_batch, stride_lse_head, HAS_SEGMENTS,
            )  # fmt: skip
            window = window_rows(index_ptr, first_row, first_key, offset, middle, BLOCK_N, WINDOW)
            differ = segments_differ(q_segments, k_segments, rows, keys, q_len, k_len, HAS_SEGMENTS)
            scores = relative_logits(
                q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale,
                q_len, k_len, position_keys_ptr, position_queries_ptr, position_bias_ptr,
                HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS, HAS_SEGMENTS, SCALING,
            )  # fmt: skip
            weights = softmax_weights(scores, shift, inverse, scale, SCALING)
            dout = load_rows(
                dout_row, rows, rows < q_len, stride_dout_row, stride_dout_dim,
                HEAD_DIM, BLOCK_D, True,
            )  # fmt: skip
            v = load_rows(
                v_row, keys, attended, stride_v_row, stride_v_dim, HEAD_DIM, BLOCK_D, True
            )
            dweights = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if HAS_DROPOUT:
                keep = dropout_keep(seed, rows, head, batch, first_key, dropout_threshold, BLOCK_N)
                dweights = tl.where(keep, dweights * dropout_scale, 0.0)
            dscores = logit_gradients(weights, dweights, delta, allowed, k_len)
            if SUMS_KEYS or SUMS_BIAS:
                # [WINDOW, BLOCK_M]
                spread = by_distance(dscores, WINDOW, False)
                if SUMS_BIAS:
                    bias_sums += tl.sum(spread, axis=1)
                if SUMS_KEYS:
                    columns = q
                    if COLUMNS < BLOCK_D:
                        columns = _load_columns(
                            q_row, rows, rows < q_len, first_dim, stride_q_row, stride_q_dim,
                            HEAD_DIM, COLUMNS,
                        )  # fmt: skip
                    keys_sums = dot(narrow(spread, q.dtype), columns, keys_sums)
            if SUMS_QUERIES:
                # [WINDOW, BLOCK_N]
                spread = by_distance(dscores, WINDOW, True)
                columns = k
                if COLUMNS < BLOCK_D:
                    columns = _load_columns(
                        k_row, keys, attended, first_dim, stride_k_row, stride_k_dim,
                        HEAD_DIM, COLUMNS,
                    )  # fmt: skip
                queries_sums = dot(narrow(spread, k.dtype), columns, queries_sums)

    places = program.to(tl.int64) * WINDOW + tl.arange(0, WINDOW)
    dims = first_dim + tl.arange(0, COLUMNS)[None, :]
    elements = places[:, None] * HEAD_DIM + dims
    if SUMS_KEYS:
        tl.store(keys_sums_ptr + elements, keys_sums * scale, mask=dims < HEAD_DIM)
    if SUMS_QUERIES:
        tl.store(queries_sums_ptr + elements, queries_sums * scale, mask=dims < HEAD_DIM)
    if SUMS_BIAS and first_dim == 0:
        tl.store(bias_sums_ptr + places, bias_sums * scale)


@triton.jit(
    do_not_specialize=[*UNSPECIALISED, "diagonals", "first_diagonal", "splits", "positions"]
)
def _rows_kernel(
    # (splits, H, diagonals, WINDOW, COLUMNS), contiguous fp32
    sums_ptr,
    # (P, H, COLUMNS), contiguous; fp32, fp16 or bf16
    gradient_ptr,
    # (2 N - 1,), int32
    index_ptr,
    heads, middle, positions, diagonals, first_diagonal, splits,
    COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write one block of rows of the gradient of a table."""
    row_blocks = tl.cdiv(positions, BLOCK_ROWS)
    head = tl.program_id(0) // row_blocks
    rows = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (dims < COLUMNS)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for diagonal in range(diagonals):
        distances = (diagonal + first_diagonal) * BLOCK_M - (BLOCK_N - 1)
        distances += tl.arange(0, WINDOW)
        exists = (distances >= -middle) & (distances <= middle)
        window = tl.load(index_ptr + (distances + middle), mask=exists, other=-1)
        chosen = rows[:, None] == window[None, :]
        if tl.max(tl.max(chosen.to(tl.int32), axis=1), axis=0) > 0:
            for split in range(splits):
                plane = head.to(tl.int64) + tl.cast(split, tl.int64) * heads
                plane = plane * diagonals + diagonal
                places = plane * WINDOW + tl.arange(0, WINDOW)
                pointers = sums_ptr + places[:, None] * COLUMNS + dims[None, :]
                sums = tl.load(pointers, mask=inside, other=0.0)
                total = dot(chosen.to(tl.float32), sums, total)
    pointers = gradient_ptr + (rows.to(tl.int64) * heads + head)[:, None] * COLUMNS + dims[None, :]
    total = narrow(total, gradient_ptr.dtype.element_ty)
    tl.store(pointers, total, mask=(rows < positions)[:, None] & inside)


class _Plan(NamedTuple):
    """The tile of the first kernel, and its numbers of diagonals, of splits and of elements."""

    tile: Tile
    window: int
    first: int
    diagonals: int
    splits: int


def _plan(problem: Problem) -> _Plan:
    q = problem.arguments["q_ptr"]
    tile = relative_tile("sums", problem.head_dim, q.dtype, target_of(q))
    # A pair is on the diagonal of the distance between its query and the first key of its tile. The
    # least such distance is 1 - Lq, and the greatest is Lk - 1.
    first = -ceil_div(max(problem.max_q - 1, 0), tile.block_m)
    diagonals = max(problem.max_k - 1, 0) // tile.block_m + 1 - first
    # Two programs for each multiprocessor keep the GPU busy.
    wanted = ceil_div(2 * multiprocessors(q), max(1, problem.heads * diagonals))
    window = triton.next_power_of_2(tile.block_m + tile.block_n)
    return _Plan(tile, window, first, diagonals, max(1, min(problem.batches, wanted)))


def allocate_sums(problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Allocate the partial sums of position_keys, position_queries and position_bias, or None."""
    plan = _plan(problem)
    device = problem.arguments["q_ptr"].device
    shape = (plan.splits, problem.heads, plan.diagonals, plan.window)

    def allocate(name: str, columns: int) -> Tensor | None:
        if not problem.arguments[name]:
            return None
        return torch.empty((*shape, columns), dtype=torch.float32, device=device)

    keys, queries = (allocate(name, problem.head_dim) for name in ("HAS_KEYS", "HAS_QUERIES"))
    return keys, queries, allocate("HAS_TABLE_BIAS", 1)


def table_launches(
    problem: Problem,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
    shared: dict[str, Any],
) -> Iterator[Launch]:
    """Yield the launches that compute the gradients of the tables.

    Args:
        problem: The sizes and the arguments of the call.
        gradients: Gradients of position_keys, position_queries and position_bias to fill, or None.
        sums: Partial sums from `allocate_sums`.
        shared: The arguments of dout and of the row statistics, by name.
    """
    plan = _plan(problem)
    tile = plan.tile
    own = {
        "diagonals": plan.diagonals,
        "first_diagonal": plan.first,
        "splits": plan.splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WINDOW": plan.window,
        "COLUMNS": table_sums_columns(problem.head_dim, problem.arguments["q_ptr"].dtype),
    }
    names = ("keys", "queries", "bias")
    has = [x is not None for x in sums]
    available = {
        **problem.arguments,
        **shared,
        **own,
        **{f"{name}_sums_ptr": x for name, x in zip(names, sums, strict=True)},
    }
    # The sums of both tables do not fit into the registers together at large head dims.
    together = problem.head_dim <= 64 or not (has[0] and has[1])
    wanted = [has] if together else [[True, False, has[2]], [False, True, False]]
    # The bias alone has one column.
    chunks = ceil_div(problem.head_dim, own["COLUMNS"]) if has[0] or has[1] else 1
    grid = (plan.splits * problem.heads * plan.diagonals, chunks)
    for parts in wanted:
        flags = dict(zip(("SUMS_KEYS", "SUMS_QUERIES", "SUMS_BIAS"), parts, strict=True))
        given = {**available, **flags}
        chosen = {name: given[name] for name in _sums_kernel.arg_names}
        yield Launch(
            "relative_attention_sums", _sums_kernel, grid, chosen, tile.num_warps, tile.num_stages
        )
    for name, x, gradient in zip(names, sums, gradients, strict=True):
        if x is not None and gradient is not None:
            yield _rows_launch(problem, name, x, gradient, own)


def _rows_launch(
    problem: Problem, name: str, sums: Tensor, gradient: Tensor, own: dict[str, Any]
) -> Launch:
    columns = sums.shape[-1]
    tile = table_rows_tile(columns)
    available = {
        **problem.arguments,
        **own,
        "sums_ptr": sums,
        "gradient_ptr": gradient,
        "positions": gradient.shape[0],
        "COLUMNS": columns,
        "BLOCK_ROWS": tile.block_m,
        "BLOCK_D": tile.block_n,
    }
    arguments = {name: available[name] for name in _rows_kernel.arg_names}
    grid = (
        ceil_div(gradient.shape[0], tile.block_m) * problem.heads,
        ceil_div(columns, tile.block_n),
    )
    kind = "bias" if name == "bias" else "table"
    return Launch(
        f"relative_attention_{kind}_rows", _rows_kernel, grid, arguments, tile.num_warps, 1
    )
