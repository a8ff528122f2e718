"""Addresses, loads and stores of the rows of an attention tile.

The same kernels take dense and packed input. Sequence i of a packed tensor begins at row
``cu_seqlens[i]`` of batch 0, and a dense sequence begins at row 0 of its own batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastbert.kernels.common import INFINITY


@triton.jit
def program_item(blocks, heads):
    """Return the block, head and sequence of this program, if a head has `blocks` blocks."""
    program = tl.program_id(0)
    return program % blocks, program // blocks % heads, program // blocks // heads


@triton.jit
def sequence_bounds(batch, cu_seqlens_ptr, length, IS_VARLEN: tl.constexpr):
    """Return the first row and the length of a sequence."""
    start = batch * 0
    if IS_VARLEN:
        start = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - start
    return start, length


@triton.jit
def head_pointer(ptr, batch, head, start, stride_batch, stride_head, stride_row):
    """Return the pointer to the row `start`, where the sequence begins, in the head `head`."""
    # A tensor may have more than 2**31 elements, so the indices become int64 before the product.
    offset = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return ptr + offset + start.to(tl.int64) * stride_row


@triton.jit
def pair_pointer(ptr, batch, head, stride_batch, stride_head, IS_GIVEN: tl.constexpr):
    """Return the pointer to a mask or bias at `batch` and `head`; 0 if there is no such tensor."""
    if IS_GIVEN:
        return head_pointer(ptr, batch, head, head * 0, stride_batch, stride_head, 0)
    else:
        # Triton 3.6 cannot return the None that stands for an absent tensor.
        return 0


@triton.jit
def tile_offsets(rows, stride_row, stride_dim, BLOCK_D: tl.constexpr):
    """Return the offsets of the elements of `rows`, int64 [rows, BLOCK_D]."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    return rows.to(tl.int64)[:, None] * stride_row + dims[None, :] * stride_dim


@triton.jit
def load_rows(
    ptr, rows, inside, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Load a tile [rows, BLOCK_D], with 0 in the columns from HEAD_DIM on.

    With IS_CHECKED, only the rows where `inside` [rows] is true are read; the other rows are 0.
    """
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
    """Store a tile [rows, BLOCK_D] in the rows where `inside` [rows] is true."""
    pointers = ptr + tile_offsets(rows, stride_row, stride_dim, BLOCK_D)
    dims_inside = tl.arange(0, BLOCK_D) < HEAD_DIM
    tl.store(pointers, tile, mask=inside[:, None] & dims_inside[None, :])


@triton.jit
def zero_slack(
    ptr, batch, head, block, blocks, cu_seqlens_ptr, batches, rows_total,
    stride_head, stride_row, stride_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the rows of `head` from row cu_seqlens[-1] on to 0.

    The `blocks` programs of the last sequence share these rows. Other programs do nothing.
    """
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
    """Set lse of `head` to -inf from row cu_seqlens[-1] on, with programs as in `zero_slack`."""
    if batch == batches - 1:
        used = tl.load(cu_seqlens_ptr + batches)
        base = lse_ptr + head.to(tl.int64) * stride_head
        for first in range(used + block * BLOCK, rows_total, blocks * BLOCK):
            rows = first + tl.arange(0, BLOCK)
            tl.store(base + rows, tl.full([BLOCK], -INFINITY, tl.float32), mask=rows < rows_total)
