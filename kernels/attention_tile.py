"""What the attention kernels share: where a tile lies, what it may attend, a problem's arguments.

One kernel serves dense and packed input: packed sequences begin at ``cu_seqlens`` rows of batch 0,
dense ones at row 0 of their own batch. Key j is visible to query i iff i + offset - left <= j <= i
+ offset + right, with offset = Lk - Lq of the sequence at hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import (
    INFINITY,
    INTERPRETED,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2E,
    Launch,
    Tile,
    attention_tile,
    dot,
    dropout_arguments,
    padded_head_dim,
)

# Lengths and counts change from batch to batch: no new binary for each divisibility.
UNSPECIALISED = [
    "heads",
    "batches",
    "q_blocks",
    "k_blocks",
    "q_length",
    "k_length",
    "q_rows",
    "k_rows",
    "dropout_threshold",
    "window_left",
    "window_right",
]


@triton.jit
def sequence_bounds(batch, cu_seqlens_ptr, length, IS_VARLEN: tl.constexpr):
    """First row and length of a sequence."""
    start = batch * 0
    if IS_VARLEN:
        start = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - start
    return start, length


@triton.jit
def head_pointer(ptr, batch, head, start, stride_batch, stride_head, stride_row):
    """Where row 0 of the sequence lies in this head."""
    # int64 before the strides multiply: a tensor may have more than 2**31 elements.
    offset = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return ptr + offset + start.to(tl.int64) * stride_row


@triton.jit
def tile_offsets(rows, stride_row, stride_dim, BLOCK_D: tl.constexpr):
    """Offsets of whole rows, [rows, BLOCK_D]."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    return rows.to(tl.int64)[:, None] * stride_row + dims[None, :] * stride_dim


@triton.jit
def load_rows(
    ptr, rows, inside, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Tile [rows, BLOCK_D], 0 beyond HEAD_DIM and, if IS_CHECKED, where not `inside` [rows]."""
    pointers = ptr + tile_offsets(rows, stride_row, stride_dim, BLOCK_D)
    dims_inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if IS_CHECKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=inside[:, None] & dims_inside, other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=dims_inside, other=0.0)


@triton.jit
def store_rows(
    ptr, tile, rows, inside, stride_row, stride_dim, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores tile [rows, BLOCK_D] where `inside` [rows]."""
    pointers = ptr + tile_offsets(rows, stride_row, stride_dim, BLOCK_D)
    dims_inside = tl.arange(0, BLOCK_D) < HEAD_DIM
    tl.store(pointers, tile, mask=inside[:, None] & dims_inside[None, :])


@triton.jit
def zero_slack(
    ptr, batch, head, block, blocks, cu_seqlens_ptr, batches, rows_total,
    stride_head, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeroes this head's rows beyond cu_seqlens[-1]; the blocks of the last sequence share them."""
    if batch == batches - 1:
        used = tl.load(cu_seqlens_ptr + batches)
        base = head_pointer(ptr, head * 0, head, head * 0, 0, stride_head, stride_row)
        zeros = tl.zeros([BLOCK, BLOCK_D], ptr.dtype.element_ty)
        for first in range(used + block * BLOCK, rows_total, blocks * BLOCK):
            rows = first + tl.arange(0, BLOCK)
            inside = rows < rows_total
            store_rows(base, zeros, rows, inside, stride_row, stride_dim, HEAD_DIM, BLOCK_D)


@triton.jit
def empty_slack(
    lse_ptr, batch, head, block, blocks, cu_seqlens_ptr, batches, rows_total, stride_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets lse of this head's rows beyond cu_seqlens[-1] to -inf, as zero_slack zeroes the rows."""
    if batch == batches - 1:
        used = tl.load(cu_seqlens_ptr + batches)
        base = lse_ptr + head.to(tl.int64) * stride_head
        for first in range(used + block * BLOCK, rows_total, blocks * BLOCK):
            rows = first + tl.arange(0, BLOCK)
            tl.store(base + rows, tl.full([BLOCK], -INFINITY, tl.float32), mask=rows < rows_total)


@triton.jit
def visible_range(
    first, last, offset, length, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What positions first..last see of the other side, and which of its tiles need no masking.

    Returns low, high (the exact range that at least one of them sees) and start, full_start,
    full_stop: tiles [start, full_start) and [full_stop, high) need masks, tiles [full_start,
    full_stop) do not.
    """
    low = length * 0
    high = length
    full_low = low
    full_high = length
    if HAS_LEFT:
        low = tl.minimum(tl.maximum(first + offset - left, 0), length)
        full_low = tl.maximum(last + offset - left, 0)
    if HAS_RIGHT:
        high = tl.maximum(tl.minimum(last + offset + right + 1, length), low)
        full_high = tl.maximum(tl.minimum(first + offset + right + 1, length), 0)
    start = low // BLOCK * BLOCK
    end = (high + BLOCK - 1) // BLOCK * BLOCK
    full_start = (full_low + BLOCK - 1) // BLOCK * BLOCK
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_stop = tl.maximum(full_high // BLOCK * BLOCK, full_start)
    return low, high, start, full_start, full_stop


@triton.jit
def phase_range(phase: tl.constexpr, start, full_start, full_stop, high):
    """The range of phase 0 (leading masked tiles), 1 (full tiles) or 2 (trailing masked tiles)."""
    if phase == 0:
        return start, full_start
    elif phase == 1:
        return full_start, full_stop
    else:
        return full_stop, high


@triton.jit
def allowed_pairs(
    rows, cols, mask_ptr, offset, q_len, k_len, left, right, stride_mask_row, stride_mask_key,
    HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    IS_BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Pairs that may attend. rows and cols broadcast against each other in either orientation.

    Full tiles (not IS_BOUNDARY) look at the mask alone. A mask that is the same for every query
    (MASK_ROW) is loaded as one row.
    """
    allowed = cols < k_len
    if IS_BOUNDARY:
        if HAS_LEFT:
            allowed = allowed & (cols >= rows + (offset - left))
        if HAS_RIGHT:
            allowed = allowed & (cols <= rows + (offset + right))
    if HAS_MASK:
        offsets = cols.to(tl.int64) * stride_mask_key
        inside = cols < k_len
        if not MASK_ROW:
            offsets += rows.to(tl.int64) * stride_mask_row
            inside = inside & (rows < q_len)
        allowed = allowed & (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0)
    return allowed


@triton.jit
def attended_keys(
    cols, allowed, mask_ptr, low, high, stride_mask_key,
    HAS_MASK: tl.constexpr, MASK_ROW: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_N] that a row of the tile attends: others may hold NaN, and 0 * NaN is NaN.

    allowed is [BLOCK_M, BLOCK_N], low and high bound what the tile sees through the window.
    """
    attended = (cols >= low) & (cols < high)
    if HAS_MASK:
        if MASK_ROW:
            pointers = mask_ptr + cols.to(tl.int64) * stride_mask_key
            attended = attended & (tl.load(pointers, mask=attended, other=0) != 0)
        else:
            attended = attended & (tl.max(allowed.to(tl.int32), axis=0) > 0)
    return attended


@triton.jit
def logits(
    products, rows, cols, allowed, bias_ptr, scale, q_len, k_len, stride_bias_row, stride_bias_key,
    HAS_BIAS: tl.constexpr, SCALING: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Products q kᵀ as logits: raw (SCALING 0), or scaled and biased."""
    if SCALING:
        products = products * scale
    if HAS_BIAS:
        offsets = rows.to(tl.int64) * stride_bias_row + cols.to(tl.int64) * stride_bias_key
        inside = (rows < q_len) & (cols < k_len)
        products += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if IS_MASKED:
        products = tl.where(allowed, products, -INFINITY)
    return products


@triton.jit
def transposed_product(a, b):
    """(a bᵀ)ᵀ [rows of b, rows of a], rounded as a bᵀ is.

    In fp32 the weights must be those whose statistics were taken. A GPU adds along the rows in
    order, whichever operand comes first; the library that multiplies in the interpreter does not.
    """
    if INTERPRETED:
        return tl.trans(dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32)))
    else:
        return dot(b, tl.trans(a), tl.zeros([b.shape[0], a.shape[0]], tl.float32))


@triton.jit
def exponentials(scores, maximum, scale, SCALING: tl.constexpr):
    """exp of logits less their maximum (or log-sum-exp), which broadcasts.

    Raw scores take the scale and log2(e) as one factor, and then maximum is in units of log2.
    Scaled scores are subtracted first: a bias of finfo.min times log2(e) would overflow.
    """
    if SCALING == 0:
        return tl.exp2(scores * (scale * LOG2E) - maximum)
    elif SCALING == 1:
        return tl.exp2((scores - maximum) * LOG2E)
    else:
        # The product with log2(e) rounds by up to |x| 2**-24, which fp32 notices: take off whole
        # powers of two first. Where exp is 0 anyway, -inf - -inf must not arise.
        x = scores - maximum
        x = tl.where(x < -150.0, -150.0, x)
        powers = tl.floor(x * LOG2E + 0.5)
        rest = (x - powers * LN2_HIGH) - powers * LN2_LOW
        return tl.exp2(powers) * tl.exp2(rest * LOG2E)


@triton.jit
def online_softmax(scores, maximum, scale, SCALING: tl.constexpr, IS_GUARDED: tl.constexpr):
    """One step of the running softmax: weights [M, N], new maximum [M], factor of the past [M].

    A row without any allowed key so far has maximum -inf; IS_GUARDED keeps -inf - -inf out of it.
    """
    tile_maximum = tl.max(scores, axis=1)
    if SCALING == 0:
        tile_maximum = tile_maximum * (scale * LOG2E)
    new_maximum = tl.maximum(maximum, tile_maximum)
    reference = new_maximum
    if IS_GUARDED:
        reference = tl.where(new_maximum == -INFINITY, 0.0, new_maximum)
    weights = exponentials(scores, reference[:, None], scale, SCALING)
    if SCALING == 0:
        rescale = tl.exp2(maximum - reference)
    else:
        rescale = exponentials(maximum, reference, scale, SCALING)
    return weights, new_maximum, rescale


@triton.jit
def log_sum_exp(maximum, total, SCALING: tl.constexpr):
    """Natural logarithm of the sum; -inf where there was nothing to sum."""
    empty = total == 0.0
    logarithm = tl.log2(tl.where(empty, 1.0, total))
    if SCALING:
        result = maximum + logarithm * LN2
    else:
        result = (maximum + logarithm) * LN2
    return tl.where(empty, -INFINITY, result)


class Problem(NamedTuple):
    """One attention problem: sizes for the grid, and the arguments that its kernels share."""

    batches: int
    heads: int
    max_q: int
    max_k: int
    head_dim: int
    arguments: dict[str, Any]

    def tile(self, pass_name: str) -> Tile:
        """Tile of one of its kernels, see ``attention_tile``."""
        arguments = self.arguments
        has_pairs = arguments["HAS_BIAS"] or (arguments["HAS_MASK"] and not arguments["MASK_ROW"])
        return attention_tile(pass_name, self.head_dim, arguments["q_ptr"].dtype, has_pairs)

    def launch(
        self, name: str, kernel: Any, tile: Tile, over_keys: bool = False, **own: Any
    ) -> Launch:
        """A launch of one program per block of queries (or keys), head and sequence."""
        q_blocks = triton.cdiv(self.max_q, tile.block_m)
        k_blocks = triton.cdiv(self.max_k, tile.block_n)
        if self.arguments["IS_VARLEN"]:
            # At least one block per sequence: the last one's zero the rows beyond cu_seqlens[-1].
            q_blocks, k_blocks = max(q_blocks, 1), max(k_blocks, 1)
        available = {
            **self.arguments,
            "q_blocks": q_blocks,
            "k_blocks": k_blocks,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **own,
        }
        arguments = {key: available[key] for key in kernel.arg_names}
        grid = ((k_blocks if over_keys else q_blocks) * self.heads * self.batches,)
        return Launch(name, kernel, grid, arguments, tile.num_warps, tile.num_stages)


def strides(name: str, x: Tensor | None, is_varlen: bool = False) -> dict[str, int]:
    """Stride arguments of q, k, v, out or a gradient: (B, H, L, D), or packed (T, H, D)."""
    if x is None:
        batch = head = row = dim = 0
    elif is_varlen:
        batch, (row, head, dim) = 0, x.stride()
    else:
        batch, head, row, dim = x.stride()
    return {
        f"stride_{name}_batch": batch,
        f"stride_{name}_head": head,
        f"stride_{name}_row": row,
        f"stride_{name}_dim": dim,
    }


def pair_strides(name: str, x: Tensor | None) -> dict[str, int]:
    """Stride arguments of mask or bias, expanded to (B, H, Lq, Lk)."""
    batch, head, row, key = (0, 0, 0, 0) if x is None else x.stride()
    return {
        f"stride_{name}_batch": batch,
        f"stride_{name}_head": head,
        f"stride_{name}_row": row,
        f"stride_{name}_key": key,
    }


def scaling(dtype: torch.dtype, has_bias: bool, scale: float) -> int:
    """How logits are scaled: 0 inside exp2, 1 before the softmax, 2 so and with exp in full fp32.

    0 is the fastest. It takes the maximum of raw products, which a scale <= 0 would reverse, and
    cannot add a bias.
    """
    if dtype == torch.float32:
        return 2
    return 1 if has_bias or scale <= 0 else 0


def longest(cu_seqlens: Tensor) -> int:
    """The longest sequence; reads the device, so callers that know it pass it."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def describe(
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
) -> Problem:
    """The problem behind the arguments of ``attention_forward``, which says what they are."""
    is_varlen = cu_seqlens_q is not None
    if is_varlen:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        batches, heads, head_dim = cu_seqlens_q.numel() - 1, q.shape[1], q.shape[2]
        max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
        max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
        q_rows, k_rows = q.shape[0], k.shape[0]
    else:
        batches, heads, max_q, head_dim = q.shape
        max_k = k.shape[2]
        q_rows, k_rows = max_q, max_k
    left, right = window[0], 0 if causal else window[1]
    dropout = dropout_arguments(dropout_p, seed)
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "mask_ptr": None if mask is None else mask.view(torch.uint8),
        "bias_ptr": bias,
        "seed_ptr": seed if dropout.enabled else None,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "cu_seqlens_k_ptr": cu_seqlens_k,
        **strides("q", q, is_varlen),
        **strides("k", k, is_varlen),
        **strides("v", v, is_varlen),
        **pair_strides("mask", mask),
        **pair_strides("bias", bias),
        # lse and delta are fp32 (B, H, Lq), or packed (H, Tq)
        "stride_lse_batch": 0 if is_varlen else heads * q_rows,
        "stride_lse_head": q_rows,
        "heads": heads,
        "batches": batches,
        "q_length": max_q,
        "k_length": max_k,
        "q_rows": q_rows,
        "k_rows": k_rows,
        "scale": float(scale),
        "dropout_threshold": dropout.threshold,
        "dropout_scale": dropout.scale,
        "window_left": left,
        "window_right": right,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "IS_VARLEN": is_varlen,
        "HAS_MASK": mask is not None,
        "MASK_ROW": mask is not None and mask.stride(2) == 0,
        "HAS_BIAS": bias is not None,
        "HAS_DROPOUT": dropout.enabled,
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "SCALING": scaling(q.dtype, bias is not None, scale),
    }
    return Problem(batches, heads, max_q, max_k, head_dim, arguments)


def allocate_rows(like: Tensor, problem: Problem) -> Tensor:
    """Memory for out or a gradient: (B, H, L, D) lying as (B, L, H, D), or packed (T, H, D)."""
    if problem.arguments["IS_VARLEN"]:
        # Without a sequence no program runs, and every row lies beyond cu_seqlens[-1].
        make = torch.empty if problem.batches else torch.zeros
        return make(like.shape, dtype=like.dtype, device=like.device)
    batch, heads, length, head_dim = like.shape
    shape = (batch, length, heads, head_dim)
    return torch.empty(shape, dtype=like.dtype, device=like.device).transpose(1, 2)
