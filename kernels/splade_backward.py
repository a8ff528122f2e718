"""Backward of SPLADE's head, from the largest logits and their rows, which its forward returns.

The gradient reaches, for each sequence and class, the token with the largest logit. The gradient of
the logits therefore has B V elements that may differ from 0, and not T V. After training, most of
these are 0 as well.

- dweight: a program adds, for a block of classes, the hidden row of each sequence's token, in the
  order of the sequences. It reads B V K elements of hidden, and no row whose gradient is 0. A
  product with the gradients of all logits would take T / B times as many operations.
- dhidden: a first kernel lists, for each tile of M tokens, the classes whose largest logit is in
  the tile. A second kernel multiplies the gradients of these classes, a matrix with one element in
  each column, by the rows of the weight. It takes 2 M B V K operations, where a product with the
  gradients of all logits would take 2 T V K.

No kernel uses atomics, and reruns agree bitwise. No call waits for the GPU: the grids have the
largest size that may be needed, and a program without work ends at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import dot, narrow
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.tiles import ceil_div, splade_registers, splade_tile, target_of

# Number of classes that `_lists_kernel` reads at once.
LIST_BLOCK = 4096
# Properties of a tile of tokens: its sequence, its first row, the row after its last row, and the
# start and the number of its classes in the list of the sequence.
TILE_FIELDS = 5


@triton.jit
def _gradients_at(
    dy_ptr, logits_ptr, rows_ptr, sequence, own_classes, classes, stride_dy_row, stride_dy_col,
    mask,
):  # fmt: skip
    """Return the row of the largest logit, or -1, and the gradient of this logit, in fp32.

    `sequence` and `own_classes` are int64. Without a row, the gradient is 0.
    """
    offsets = sequence * classes + own_classes
    row = tl.load(rows_ptr + offsets, mask=mask, other=-1)
    has_row = row >= 0
    logit = tl.load(logits_ptr + offsets, mask=has_row, other=0.0)
    dy_offsets = sequence * stride_dy_row + own_classes * stride_dy_col
    dy = tl.load(dy_ptr + dy_offsets, mask=has_row, other=0.0).to(tl.float32)
    # The derivative of log(1 + x) is 1 / (1 + x).
    return row, tl.div_rn(dy, 1.0 + logit)


@triton.jit(do_not_specialize=["rows_total", "sequences"])
def _dweight_kernel(
    # (B, V), in the dtype of hidden; fp32; int32
    dy_ptr, logits_ptr, rows_ptr,
    # (T, K), fp32, fp16 or bf16
    hidden_ptr,
    # (V, K), contiguous, in the dtype of weight
    dweight_ptr,
    # (V,), any floating dtype; or None
    dbias_ptr,
    stride_dy_row, stride_dy_col, stride_hidden_row, stride_hidden_col,
    rows_total, sequences, classes, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write dweight for BLOCK_M classes and BLOCK_N columns, and dbias for these classes."""
    column_blocks = tl.cdiv(depth, BLOCK_N)
    own_classes = tl.program_id(0) // column_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = own_classes < classes
    columns_ptr = hidden_ptr + columns[None, :] * stride_hidden_col
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # The gradient of the bias is added in fp64, as partial sums are in reduction.py.
    bias_total = tl.zeros([BLOCK_M], tl.float64)
    for sequence in range(sequences):
        row, gradient = _gradients_at(
            dy_ptr, logits_ptr, rows_ptr, tl.cast(sequence, tl.int64), own_classes.to(tl.int64),
            classes, stride_dy_row, stride_dy_col, inside,
        )  # fmt: skip
        # [BLOCK_M, BLOCK_N]
        hidden = tl.load(
            columns_ptr + row.to(tl.int64)[:, None] * stride_hidden_row,
            mask=((gradient != 0.0) & (row < rows_total))[:, None] & (columns < depth)[None, :],
            other=0.0,
        )
        total += gradient[:, None] * hidden.to(tl.float32)
        if HAS_BIAS:
            bias_total += gradient.to(tl.float64)
    offsets = own_classes.to(tl.int64)[:, None] * depth + columns[None, :]
    mask = inside[:, None] & (columns < depth)[None, :]
    tl.store(dweight_ptr + offsets, narrow(total, dweight_ptr.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        dbias = narrow(bias_total.to(tl.float32), dbias_ptr.dtype.element_ty)
        # The programs of the first columns write dbias.
        end = tl.where(tl.program_id(0) % column_blocks == 0, classes, 0)
        tl.store(dbias_ptr + own_classes, dbias, mask=own_classes < end)


@triton.jit(do_not_specialize=["rows_total", "sequences", "tiles_total"])
def _lists_kernel(
    # (B + 1,), int32
    cu_seqlens_ptr,
    # (B, V), int32
    rows_ptr, lists_ptr,
    # (TILE_FIELDS, tiles_total), int32
    tiles_ptr,
    rows_total, sequences, classes, tiles_total,
    BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the properties of one tile of BLOCK_M tokens, and the list of its classes.

    The tiles of a sequence begin at its first token. The lists of its tiles follow each other in
    its row of `lists`, each in the order of the classes. The rows of hidden after the last sequence
    are divided into tiles without classes. BLOCK_B is a power of two above B.
    """
    tile = tl.program_id(0)
    parts = tl.arange(0, BLOCK_B)
    begins = tl.load(cu_seqlens_ptr + parts, mask=parts <= sequences, other=0)
    ends = tl.load(cu_seqlens_ptr + parts + 1, mask=parts < sequences, other=0)
    ends = tl.where(parts == sequences, rows_total, ends)
    # The number of tiles of each sequence, and the number of its first tile.
    counts = (ends - begins + BLOCK_M - 1) // BLOCK_M
    first_tiles = tl.cumsum(counts, axis=0) - counts
    own = (first_tiles <= tile) & (tile < first_tiles + counts)
    sequence = tl.sum(tl.where(own, parts, 0), axis=0)
    first = tl.sum(tl.where(own, begins + (tile - first_tiles) * BLOCK_M, 0), axis=0)
    end = tl.minimum(first + BLOCK_M, tl.sum(tl.where(own, ends, 0), axis=0))
    # A tile from the last one on has no rows, so that its sequence is 0 by chance.
    stop = tl.where((sequence < sequences) & (first < end), classes, 0)
    base = sequence.to(tl.int64) * classes
    start = 0
    for first_class in range(0, stop, BLOCK):
        own_classes = first_class + tl.arange(0, BLOCK)
        rows = tl.load(rows_ptr + base + own_classes, mask=own_classes < stop, other=-1)
        start += tl.sum(((rows >= 0) & (rows < first)).to(tl.int32), axis=0)
    listed = start
    for first_class in range(0, stop, BLOCK):
        own_classes = first_class + tl.arange(0, BLOCK)
        rows = tl.load(rows_ptr + base + own_classes, mask=own_classes < stop, other=-1)
        is_listed = ((rows >= first) & (rows < end)).to(tl.int32)
        places = listed + tl.cumsum(is_listed, axis=0) - is_listed
        tl.store(lists_ptr + base + places, own_classes, mask=is_listed == 1)
        listed += tl.sum(is_listed, axis=0)
    tl.store(tiles_ptr + tile, sequence)
    tl.store(tiles_ptr + tiles_total + tile, first)
    tl.store(tiles_ptr + 2 * tiles_total + tile, end)
    tl.store(tiles_ptr + 3 * tiles_total + tile, start)
    tl.store(tiles_ptr + 4 * tiles_total + tile, listed - start)


@triton.jit(do_not_specialize=["tiles_total"])
def _dhidden_kernel(
    # (B, V), in the dtype of hidden; fp32; int32
    dy_ptr, logits_ptr, rows_ptr,
    # (V, K), fp32, fp16 or bf16
    weight_ptr,
    # (B, V), int32
    lists_ptr,
    # (TILE_FIELDS, tiles_total), int32
    tiles_ptr,
    # (T, K), contiguous, in the dtype of hidden
    dhidden_ptr,
    stride_dy_row, stride_dy_col, stride_weight_row, stride_weight_col,
    classes, depth, tiles_total,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write dhidden for one tile of BLOCK_M tokens and BLOCK_N columns.

    The terms of BLOCK_K classes are added first, because one chain of additions over a vocabulary
    would lose accuracy.
    """
    # Programs with adjacent numbers read the same columns of the weight.
    tile = tl.program_id(0) % tiles_total
    columns = (tl.program_id(0) // tiles_total * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    sequence = tl.load(tiles_ptr + tile).to(tl.int64)
    tokens = tl.load(tiles_ptr + tiles_total + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(tiles_ptr + 2 * tiles_total + tile)
    start = tl.load(tiles_ptr + 3 * tiles_total + tile)
    count = tl.load(tiles_ptr + 4 * tiles_total + tile)
    list_ptr = lists_ptr + sequence * classes + start
    columns_ptr = weight_ptr + columns[None, :] * stride_weight_col
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_K):
        places = first + tl.arange(0, BLOCK_K)
        listed = places < count
        own_classes = tl.load(list_ptr + places, mask=listed, other=0).to(tl.int64)
        row, gradient = _gradients_at(
            dy_ptr, logits_ptr, rows_ptr, sequence, own_classes, classes,
            stride_dy_row, stride_dy_col, listed,
        )  # fmt: skip
        # [BLOCK_M, BLOCK_K]
        dlogits = tl.where(row[None, :] == tokens[:, None], gradient[None, :], 0.0)
        # [BLOCK_K, BLOCK_N]
        weight = tl.load(
            columns_ptr + own_classes[:, None] * stride_weight_row,
            mask=listed[:, None] & (columns < depth)[None, :],
            other=0.0,
        )
        dlogits = narrow(dlogits, weight_ptr.dtype.element_ty)
        total += dot(dlogits, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    offsets = tokens.to(tl.int64)[:, None] * depth + columns[None, :]
    mask = (tokens < end)[:, None] & (columns < depth)[None, :]
    tl.store(dhidden_ptr + offsets, narrow(total, dhidden_ptr.dtype.element_ty), mask=mask)


class Head(NamedTuple):
    """The inputs of the head, and sizes that follow from these inputs.

    Args:
        hidden: Rows (T, K); fp32, fp16 or bf16.
        weight: Projection (V, K) in the dtype of `hidden`.
        cu_seqlens: Cumulative lengths (B + 1,), int32.
    """

    hidden: Tensor
    weight: Tensor
    cu_seqlens: Tensor

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def depth(self) -> int:
        return self.weight.shape[1]

    @property
    def tiles(self) -> int:
        """Largest number of tiles of tokens in the backward.

        Each sequence, and the rows after the last sequence, may have one tile that is not full.
        """
        tile, _ = splade_tile("dhidden", self.hidden.dtype)
        return self.hidden.shape[0] // tile.block_m + self.sequences + 1


def _dweight_launch(head: Head, dy, logits, rows, dweight, dbias) -> Launch:
    tile, _ = splade_tile("dweight", head.hidden.dtype)
    arguments = {
        "dy_ptr": dy,
        "logits_ptr": logits,
        "rows_ptr": rows,
        "hidden_ptr": head.hidden,
        "dweight_ptr": dweight,
        "dbias_ptr": dbias,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "stride_hidden_row": head.hidden.stride(0),
        "stride_hidden_col": head.hidden.stride(1),
        "rows_total": head.hidden.shape[0],
        "sequences": head.sequences,
        "classes": head.classes,
        "depth": head.depth,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_BIAS": dbias is not None,
    }
    grid = (ceil_div(head.classes, tile.block_m) * ceil_div(head.depth, tile.block_n),)
    return Launch(
        "splade_dweight", _dweight_kernel, grid, arguments, tile.num_warps, tile.num_stages
    )


def _lists_launch(head: Head, rows, lists, tiles) -> Launch:
    tile, _ = splade_tile("dhidden", head.hidden.dtype)
    arguments = {
        "cu_seqlens_ptr": head.cu_seqlens,
        "rows_ptr": rows,
        "lists_ptr": lists,
        "tiles_ptr": tiles,
        "rows_total": head.hidden.shape[0],
        "sequences": head.sequences,
        "classes": head.classes,
        "tiles_total": head.tiles,
        "BLOCK_M": tile.block_m,
        "BLOCK_B": triton.next_power_of_2(head.sequences + 1),
        "BLOCK": LIST_BLOCK,
    }
    return Launch("splade_lists", _lists_kernel, (head.tiles,), arguments, 8, 1)


def _dhidden_launch(head: Head, dy, logits, rows, lists, tiles, dhidden) -> Launch:
    tile, block_k = splade_tile("dhidden", head.hidden.dtype)
    arguments = {
        "dy_ptr": dy,
        "logits_ptr": logits,
        "rows_ptr": rows,
        "weight_ptr": head.weight,
        "lists_ptr": lists,
        "tiles_ptr": tiles,
        "dhidden_ptr": dhidden,
        "stride_dy_row": dy.stride(0),
        "stride_dy_col": dy.stride(1),
        "stride_weight_row": head.weight.stride(0),
        "stride_weight_col": head.weight.stride(1),
        "classes": head.classes,
        "depth": head.depth,
        "tiles_total": head.tiles,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
    }
    grid = (head.tiles * ceil_div(head.depth, tile.block_n),)
    return Launch(
        "splade_dhidden",
        _dhidden_kernel,
        grid,
        arguments,
        tile.num_warps,
        tile.num_stages,
        max_registers=splade_registers(head.hidden.dtype, target_of(head.hidden)),
    )


def backward_launches(
    dy, hidden, weight, cu_seqlens, logits, rows, lists, tiles, dhidden, dweight, dbias
) -> list[Launch]:
    """Return the launches of `splade_backward` in order."""
    head = Head(hidden, weight, cu_seqlens)
    return [
        _dweight_launch(head, dy, logits, rows, dweight, dbias),
        _lists_launch(head, rows, lists, tiles),
        _dhidden_launch(head, dy, logits, rows, lists, tiles, dhidden),
    ]


def splade_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    logits: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of `splade_forward`; reruns agree bitwise.

    Args:
        dy: Gradient of the result (B, V), in the dtype of `hidden`, at any strides.
        hidden: As in the forward.
        weight: As in the forward.
        bias: As in the forward.
        cu_seqlens: As in the forward.
        logits: The largest logits that the forward returned.
        rows: The rows that the forward returned.

    Returns:
        dhidden (T, K), which is 0 for rows that have no largest logit; dweight (V, K); and dbias
        (V,), or None without a bias. Each gradient is contiguous and has the dtype of the tensor to
        which it belongs.
    """
    (cu_seqlens,) = dense(cu_seqlens)
    head, device = Head(hidden, weight, cu_seqlens), hidden.device
    dhidden, dweight = (
        torch.empty(x.shape, dtype=x.dtype, device=device) for x in (hidden, weight)
    )
    dbias = None if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=device)
    lists = torch.empty(rows.shape, dtype=torch.int32, device=device)
    tiles = torch.empty((TILE_FIELDS, head.tiles), dtype=torch.int32, device=device)
    inputs = (dy, hidden, weight, cu_seqlens, logits.contiguous(), rows.contiguous())
    run(backward_launches, inputs, (lists, tiles, dhidden, dweight, dbias))
    return dhidden, dweight, dbias
