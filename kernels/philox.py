"""Random numbers computed from a seed and coordinates, and dropout masks from these numbers.

The generator is Philox4x32 with 7 rounds (Salmon et al. 2011). The C++ and CUDA kernels compute the
same words.
"""

from __future__ import annotations

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(7)


@triton.jit
def philox_product(factor: tl.constexpr, counter):
    """Return the high and the low word of the 64-bit product of two 32-bit words."""
    wide = counter.to(tl.uint64) * factor
    return (wide >> 32).to(tl.uint32), (wide & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Return the four words of Philox4x32-7 for the counter (c0, c1, c2, c3).

    The key is the 64-bit `seed`, with the low word first.
    """
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        high_0, low_0 = philox_product(0xD2511F53, c0)
        high_1, low_1 = philox_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def dropout_keep(seed, rows, c2, c3, first_column, threshold, COLUMNS: tl.constexpr):
    """Return a mask that is true for the elements of a tile that dropout keeps.

    The mask is int1 [number of rows, COLUMNS]; its first column is `first_column` of the matrix.

    Element (row, n) of the matrix takes word n % 4 of the counter (n // 4, row, c2, c3), so
    first_column must be a multiple of 4. Dropout keeps the element if and only if
    word >> 8 >= threshold.
    """
    groups = first_column // 4 + tl.arange(0, COLUMNS // 4)
    # [1, COLUMNS / 4]
    c0 = groups.to(tl.uint32)[None, :]
    # [rows, 1]
    c1 = rows.to(tl.uint32)[:, None]
    c2 = tl.zeros_like(c0) + c2.to(tl.uint32)
    c3 = tl.zeros_like(c0) + c3.to(tl.uint32)
    word_0, word_1, word_2, word_3 = philox(seed, c0, c1, c2, c3)
    keep_0 = (word_0 >> 8).to(tl.int32) >= threshold
    keep_1 = (word_1 >> 8).to(tl.int32) >= threshold
    keep_2 = (word_2 >> 8).to(tl.int32) >= threshold
    keep_3 = (word_3 >> 8).to(tl.int32) >= threshold
    # keep is [rows, COLUMNS / 4, 2, 2]. The last axis is bit 0 of the column number n, and the axis
    # before the last is bit 1.
    keep = tl.join(tl.join(keep_0, keep_2), tl.join(keep_1, keep_3))
    return keep.reshape(rows.shape[0], COLUMNS)
