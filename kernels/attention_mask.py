"""Functions that decide which queries may attend to which keys.

Query i sees key j if and only if i + offset - left <= j <= i + offset + right. The offset of a
sequence is its Lk - Lq, and left and right are the limits of the window. Without HAS_LEFT,
the window has no limit on the left, and without HAS_RIGHT, it has none on the right.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_range(
    first, last, offset, length, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the range of keys that a block of queries sees, or of queries for a block of keys.

    The block has the positions from `first` to `last`, both included. `length` is the number of
    keys for a block of queries, and the number of queries for a block of keys.

    Returns:
        low, high: The range [low, high) of positions that at least one position of the block sees.
        start, full_start, full_stop: Limits of the tiles of BLOCK positions. The tiles in
            [start, full_start) and [full_stop, high) need masks. Every position of the block sees
            all positions in [full_start, full_stop).
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
    """Return the positions where the tiles of a phase begin and end.

    The tiles of phase 0 are masked, those of phase 1 are full, and those of phase 2 are masked.
    """
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
    """Return where a query may attend to a key: bool, broadcastable to the tile of rows and cols.

    rows are positions of queries, and cols are positions of keys. One of them has the shape [n, 1],
    and the other has the shape [1, m]. Without IS_BOUNDARY, the tile is full, which means that the
    window hides none of its keys. A mask that is the same for every query (MASK_ROW) is loaded as
    one row.
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
    """Return which keys at least one query of the tile may attend to, bool [BLOCK_N].

    The caller loads all other keys and values as 0, because they may hold NaN, and 0 * NaN is NaN.
    allowed is [BLOCK_M, BLOCK_N]; [low, high) is the range that the tile sees through the window.
    """
    attended = (cols >= low) & (cols < high)
    if HAS_MASK:
        if MASK_ROW:
            pointers = mask_ptr + cols.to(tl.int64) * stride_mask_key
            attended = attended & (tl.load(pointers, mask=attended, other=0) != 0)
        else:
            attended = attended & (tl.max(allowed.to(tl.int32), axis=0) > 0)
    return attended
