"""The terms of relative positions and of segments in a tile of logits, and their sums by distance.

The distance of query i and key j is i + Lk - Lq - j. A tile of BLOCK_M queries and BLOCK_N keys has
BLOCK_M + BLOCK_N - 1 distances, one after another, which are the window of the tile. The kernels
load the rows of a table for the window, multiply them by the queries or by the keys, and gather the
element of each pair. Pair (m, n) of a tile has the element m - n + BLOCK_N - 1 of the window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import attention_problem
from fastbert.kernels.attention_problem import Numbers, Problem, canonical, problem_of
from fastbert.kernels.attention_rows import head_pointer
from fastbert.kernels.attention_softmax import exponentials, logits
from fastbert.kernels.common import dot, in_place
from fastbert.kernels.launch import Launch, dense
from fastbert.kernels.tiles import relative_registers, relative_tile, target_of

UNSPECIALISED = [*attention_problem.UNSPECIALISED, "middle"]


@triton.jit
def window_rows(
    index_ptr, first_row, first_key, offset, middle, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the row of the tables for each distance of a tile, int32 [WINDOW].

    The first of the distances is that of the first query and the last key of the tile. A distance
    that is outside the index belongs to no pair of the sequence and takes the nearest row.
    """
    distances = first_row - first_key + offset - (BLOCK_N - 1) + tl.arange(0, WINDOW)
    distances = tl.minimum(tl.maximum(distances, -middle), middle)
    return tl.load(index_ptr + (distances + middle))


@triton.jit
def load_window(table_ptr, window, head, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows `window` of one head of a contiguous table (P, H, D), as [WINDOW, BLOCK_D]."""
    dims = tl.arange(0, BLOCK_D)
    rows = (window.to(tl.int64) * heads + head)[:, None] * HEAD_DIM
    pointers = table_ptr + rows + dims[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def take(tile, places):
    """Return the elements of `tile` at `places`, which are row-major, in the shape of `places`.

    The tile and the places are made flat, because a gather of one axis goes through shared memory.
    A gather of two axes would keep the axis inside a warp and move the elements by shuffles, which
    takes so many registers that they spill.
    """
    count: tl.constexpr = tile.shape[0] * tile.shape[1]
    wanted: tl.constexpr = places.shape[0] * places.shape[1]
    taken = tl.gather(tl.reshape(tile, [count]), tl.reshape(places, [wanted]), 0)
    return tl.reshape(taken, [places.shape[0], places.shape[1]])


@triton.jit
def distance_places(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the place in the window of the distance of each pair, int32 [BLOCK_M, BLOCK_N]."""
    rows = in_place(tl.arange(0, BLOCK_M))
    return rows[:, None] - tl.arange(0, BLOCK_N)[None, :] + (BLOCK_N - 1)


@triton.jit
def by_distance(tile, WINDOW: tl.constexpr, OF_KEYS: tl.constexpr):
    """Return a tile of pairs [M, N] by distance, as [WINDOW, N] with OF_KEYS, or [WINDOW, M].

    The element (w, x) is that of the pair whose distance is w, and whose key, or query, is x. It is
    0 if the tile has no such pair.
    """
    BLOCK_M: tl.constexpr = tile.shape[0]
    BLOCK_N: tl.constexpr = tile.shape[1]
    distances = in_place(tl.arange(0, WINDOW))[:, None] - (BLOCK_N - 1)
    if OF_KEYS:
        keys = tl.arange(0, BLOCK_N)[None, :]
        rows = distances + keys
        exists = (rows >= 0) & (rows < BLOCK_M)
    else:
        rows = tl.arange(0, BLOCK_M)[None, :]
        keys = rows - distances
        exists = (keys >= 0) & (keys < BLOCK_N)
    return tl.where(exists, take(tile, tl.where(exists, rows * BLOCK_N + keys, 0)), 0.0)


@triton.jit
def add_position_terms(
    scores, q, k, window, position_keys_ptr, position_queries_ptr, position_bias_ptr, head, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, HAS_TABLE_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the terms of the tables of positions to the products q kᵀ of a tile [M, N]."""
    BLOCK_M: tl.constexpr = scores.shape[0]
    BLOCK_N: tl.constexpr = scores.shape[1]
    WINDOW: tl.constexpr = window.shape[0]
    if HAS_TABLE_BIAS:
        bias = tl.load(position_bias_ptr + (window.to(tl.int64) * heads + head)).to(tl.float32)
        scores += take(bias[:, None], distance_places(BLOCK_M, BLOCK_N))
    if HAS_KEYS:
        # [WINDOW, BLOCK_D]
        table = load_window(position_keys_ptr, window, head, heads, HEAD_DIM, BLOCK_D)
        # [WINDOW, BLOCK_M]
        products = dot(table, tl.trans(q), tl.zeros([WINDOW, BLOCK_M], tl.float32))
        # [BLOCK_N, BLOCK_M], so that neighbouring threads read neighbouring banks of shared memory
        places = tl.trans(distance_places(BLOCK_M, BLOCK_N)) * BLOCK_M
        scores += tl.trans(take(products, places + tl.arange(0, BLOCK_M)[None, :]))
    if HAS_QUERIES:
        table = load_window(position_queries_ptr, window, head, heads, HEAD_DIM, BLOCK_D)
        # [WINDOW, BLOCK_N]
        products = dot(table, tl.trans(k), tl.zeros([WINDOW, BLOCK_N], tl.float32))
        places = distance_places(BLOCK_M, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        scores += take(products, places)
    return scores


@triton.jit
def sequence_pointer(ptr, batch, start, length, IS_VARLEN: tl.constexpr, IS_GIVEN: tl.constexpr):
    """Return the pointer to the first element of a sequence in (B, L) or (T,); 0 if absent."""
    if IS_GIVEN:
        if IS_VARLEN:
            return ptr + start.to(tl.int64)
        else:
            return ptr + batch.to(tl.int64) * length
    else:
        return 0


@triton.jit
def segments_differ(
    q_segments_ptr, k_segments_ptr, rows, keys, q_len, k_len, IS_GIVEN: tl.constexpr
):
    """Return where the segments of query and key differ, bool [rows, keys]; 0 if absent."""
    if IS_GIVEN:
        q_segments = tl.load(q_segments_ptr + rows, mask=rows < q_len, other=0)
        k_segments = tl.load(k_segments_ptr + keys, mask=keys < k_len, other=0)
        return q_segments[:, None] != k_segments[None, :]
    else:
        return 0


@triton.jit
def load_segment_scores(
    ptr, batch, head, start, rows, q_len, stride_batch, stride_head, IS_GIVEN: tl.constexpr
):
    """Return the segment scores of `rows` of a head, fp32 [rows]; 0 if absent."""
    if IS_GIVEN:
        ptr = head_pointer(ptr, batch, head, start, stride_batch, stride_head, 1)
        return tl.load(ptr + rows, mask=rows < q_len, other=0.0).to(tl.float32)
    else:
        return 0


@triton.jit
def relative_logits(
    q, k, window, differ, segment_scores, rows, keys, allowed, head, heads, scale, q_len, k_len,
    position_keys_ptr, position_queries_ptr, position_bias_ptr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, HAS_TABLE_BIAS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Return the logits [M, N] of a tile as `logits` does, with all terms in addition.

    window is from `window_rows`, differ from `segments_differ`, and segment_scores is from
    `load_segment_scores`.
    """
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    scores = add_position_terms(
        scores, q, k, window, position_keys_ptr, position_queries_ptr, position_bias_ptr,
        head, heads, HEAD_DIM, BLOCK_D, HAS_KEYS, HAS_QUERIES, HAS_TABLE_BIAS,
    )  # fmt: skip
    if HAS_SEGMENTS:
        scores += tl.where(differ, segment_scores[:, None], 0.0)
    return logits(
        scores, rows[:, None], keys[None, :], allowed, 0, scale, q_len, k_len, 0, 0,
        False, SCALING, True,
    )  # fmt: skip


@triton.jit
def softmax_weights(scores, shift, inverse, scale, SCALING: tl.constexpr):
    """Return the softmax weights [M, N] from logits and the statistics of `row_statistics`."""
    weights = exponentials(scores, shift[:, None], scale, SCALING)
    if SCALING:
        weights *= inverse[:, None]
    return weights


@triton.jit
def logit_gradients(weights, dweights, delta, allowed, k_len):
    """Return the gradient [M, N] of the logits, from the weights and their gradient."""
    # v may hold NaN at pairs that are not allowed, and 0 * NaN is NaN. The softmax of a single key
    # is constant, so the gradient is exactly 0; rounding would give another value.
    exists = allowed & (k_len > 1)
    return tl.where(exists, weights * (dweights - delta[:, None]), 0.0)


# The launchers


class Inputs(NamedTuple):
    """The tensors of a call in the form that the kernels take, in the order of `relative_problem`.

    The tensors other than q, k, v and the mask are contiguous. The mask is viewed as uint8, and
    packed segment scores are (H, Tq).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    index: Tensor
    position_keys: Tensor | None
    position_queries: Tensor | None
    position_bias: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    segment_scores: Tensor | None


def relative_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    position_bias: Tensor | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
    segment_scores: Tensor | None = None,
    **options: Any,
) -> tuple[Inputs, Numbers]:
    """Return the tensors and the numbers of a call; `options` are those of `canonical`."""
    (q, k, v, mask, _, cu_q, cu_k, seed), numbers = canonical(q, k, v, **options)
    if segment_scores is not None and cu_q is not None:
        segment_scores = segment_scores.t()
    tables = dense(index, position_keys, position_queries, position_bias)
    segments = dense(q_segments, k_segments, segment_scores)
    return Inputs(q, k, v, mask, cu_q, cu_k, seed, *tables, *segments), numbers


def relative_problem(inputs: Inputs, numbers: Numbers) -> Problem:
    """Return the problem of attention, with the arguments of the terms in addition.

    Raises:
        ValueError: As in `attention_forward`.
    """
    x = inputs
    problem = problem_of(
        x.q, x.k, x.v, x.mask, None, x.cu_seqlens_q, x.cu_seqlens_k, x.seed, numbers
    )
    terms = {
        "index_ptr": x.index,
        "position_keys_ptr": x.position_keys,
        "position_queries_ptr": x.position_queries,
        "position_bias_ptr": x.position_bias,
        "q_segments_ptr": x.q_segments,
        "k_segments_ptr": x.k_segments,
        "segment_scores_ptr": x.segment_scores,
        "middle": x.index.shape[0] // 2,
        "HAS_KEYS": x.position_keys is not None,
        "HAS_QUERIES": x.position_queries is not None,
        "HAS_TABLE_BIAS": x.position_bias is not None,
        "HAS_SEGMENTS": x.segment_scores is not None,
    }
    return problem._replace(arguments={**problem.arguments, **terms})


def relative_launch(
    problem: Problem, pass_name: str, kernel: Any, over_keys: bool = False, **own: Any
) -> Launch:
    """Return the launch of a pass over tiles of pairs; `own` is as in ``Problem.launch``."""
    q = problem.arguments["q_ptr"]
    tile = relative_tile(pass_name, problem.head_dim, q.dtype, target_of(q))
    window = triton.next_power_of_2(tile.block_m + tile.block_n)
    name = f"relative_attention_{pass_name}"
    launch = problem.launch(name, kernel, tile, over_keys, WINDOW=window, **own)
    return launch._replace(max_registers=relative_registers(problem.head_dim, q.dtype))
