"""Forward of the cross entropy of a vocabulary projection, over the labelled rows only.

A row is labelled if its label is not `ignore_index`; the other rows are called rows without a
label. The host never reads the number of labelled rows. A first kernel writes a list of all
row indices, with the labelled rows first, and at its end the number of labelled rows. Grids have
the largest size that may be needed, and programs without a labelled row end at once. The call
therefore needs no synchronisation, a CUDA graph can capture it, and no product is computed for a
block of rows without a label. The products gather the rows of hidden through this list. The
position of a row in the list is called its place.

The forward also returns the maximum and the sum of exponentials of each row's logits (Milakov and
Gimelshein 2018). It computes both for parts of the vocabulary and combines the parts in a fixed
order. It returns both numbers instead of their log-sum-exp, because the log-sum-exp would be
rounded as coarsely as a logit. At a logit of 1e4, this rounding would change a probability by
0.05 %. Parts and tiles do not depend on the number of rows, so the loss of a row has the same bits
in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import LOG2E
from fastbert.kernels.gemm import product_tile
from fastbert.kernels.launch import Launch, dense, run
from fastbert.kernels.tiles import Tile, ceil_div, cross_entropy_tile

REDUCTIONS = ("mean", "sum", "none")
# The forward divides a vocabulary into at most this many parts.
MOST_SPLITS = 128
# LIST_BLOCK is the number of elements that a kernel with a single program reads at once.
# COMBINED_ROWS is the number of rows of a block in _combine_kernel.
LIST_BLOCK = 4096
COMBINED_ROWS = 32
# The initial value of a running maximum. Its product with log2(e) is finite, so that a logit of
# -inf gives no NaN.
LOWEST = tl.constexpr(-2.0e38)


@triton.jit
def labelled_rows(order_ptr, places, count):
    """Return the rows at `places` in the list `order`.

    For a place from `count` on, the result is the first row of the list.
    """
    return tl.load(order_ptr + tl.where(places < count, places, 0))


@triton.jit
def logits_tile(
    hidden_ptr, weight_ptr, bias_ptr, rows, cols, rows_total, columns, depth,
    stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return the logits of `rows` for the classes `cols`, fp32 [BLOCK_M, BLOCK_N].

    Logits beyond the vocabulary are -inf. A logit has the same bits in the forward and in the
    backward.
    """
    logits = product_tile(
        hidden_ptr, weight_ptr, rows, cols, rows_total, columns, depth,
        stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < columns, other=0.0).to(tl.float32)
        logits += bias[None, :]
    return tl.where((cols < columns)[None, :], logits, -float("inf"))


@triton.jit(do_not_specialize=["rows_total", "ignore_index"])
def _partition_kernel(
    # (T,), int32 or int64
    labels_ptr,
    # (T + 1,), int32
    order_ptr,
    stride_labels, rows_total, ignore_index, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `order`: labelled rows, other rows in reverse order, and the number of labelled rows."""
    count = 0
    for first in range(0, rows_total, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = rows < rows_total
        labels = tl.load(labels_ptr + rows.to(tl.int64) * stride_labels, mask=inside, other=0)
        labelled = (inside & (labels != ignore_index)).to(tl.int32)
        before = count + tl.cumsum(labelled, axis=0) - labelled
        places = tl.where(labelled == 1, before, rows_total - 1 - (rows - before))
        tl.store(order_ptr + places, rows, mask=inside)
        count += tl.sum(labelled, axis=0)
    tl.store(order_ptr + rows_total, count)


@triton.jit(do_not_specialize=["rows_total"])
def _partials_kernel(
    # (T, K) and (V, K); fp32, fp16 or bf16
    hidden_ptr, weight_ptr,
    # (V,), any floating dtype; or None
    bias_ptr,
    # (T,), int32 or int64
    labels_ptr,
    # (T + 1,), int32
    order_ptr,
    # (2, splits, capacity), fp32; capacity is a multiple of BLOCK_M
    partials_ptr,
    # (T,), fp32, by place
    own_ptr,
    stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col, stride_labels,
    rows_total, capacity, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Write, for a block of rows, the statistics of one part of the vocabulary.

    The statistics are the maximum and the sum of exponentials of the logits. If a row has its label
    in the part, also write the logit of the label.
    """
    splits = tl.cdiv(columns, BLOCK_N * BLOCKS_PER_SPLIT)
    count = tl.load(order_ptr + rows_total)
    row_blocks = tl.cdiv(count, BLOCK_M)
    if tl.program_id(0) >= row_blocks * splits:
        return
    # Programs with adjacent numbers read the same part of the weight, which stays in the L2 cache.
    split = tl.program_id(0) // row_blocks
    places = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = labelled_rows(order_ptr, places, count)
    labels = tl.load(labels_ptr + rows.to(tl.int64) * stride_labels)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    own = tl.zeros([BLOCK_M], tl.float32)
    first = split * BLOCKS_PER_SPLIT * BLOCK_N
    end = tl.minimum(first + BLOCKS_PER_SPLIT * BLOCK_N, columns)
    for first_column in range(first, end, BLOCK_N):
        cols = first_column + tl.arange(0, BLOCK_N)
        logits = logits_tile(
            hidden_ptr, weight_ptr, bias_ptr, rows, cols, rows_total, columns, depth,
            stride_hidden_row, stride_hidden_col, stride_weight_row, stride_weight_col,
            BLOCK_M, BLOCK_N, BLOCK_K, HAS_BIAS, EVEN_K,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logits, axis=1))
        exponentials = tl.exp2((logits - higher[:, None]) * LOG2E)
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(exponentials, axis=1)
        highest = higher
        own += tl.sum(tl.where(cols[None, :] == labels[:, None], logits, 0.0), axis=1)
    offsets = split.to(tl.int64) * capacity + places
    tl.store(partials_ptr + offsets, highest)
    tl.store(partials_ptr + splits.to(tl.int64) * capacity + offsets, total)
    holds_label = (labels >= first) & (labels < end)
    tl.store(own_ptr + places, own, mask=holds_label & (places < count))


@triton.jit(do_not_specialize=["rows_total"])
def _combine_kernel(
    # (T,), int32 or int64
    labels_ptr,
    # (T + 1,), int32
    order_ptr,
    # (2, splits, capacity), fp32
    partials_ptr,
    # (T,), fp32, by place
    own_ptr,
    # (2, T), fp32, by place
    statistics_ptr,
    # (T,), fp32, by row
    losses_ptr,
    stride_labels, rows_total, capacity, columns, splits,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Combine the parts of the vocabulary into the statistics and the loss of each row.

    The statistics and the loss of a row without a label are 0.
    """
    count = tl.load(order_ptr + rows_total)
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = places < rows_total
    parts = tl.arange(0, BLOCK_S)
    offsets = parts.to(tl.int64)[:, None] * capacity + places[None, :]
    # For a block without a labelled row, `_partials_kernel` has written nothing.
    used = tl.where(tl.program_id(0) * BLOCK_M < count, splits, 0)
    has_part = (parts < used)[:, None]
    # [BLOCK_S, BLOCK_M]
    partials = tl.load(partials_ptr + offsets, mask=has_part, other=LOWEST)
    highest = tl.max(partials, axis=0)
    sums_ptr = partials_ptr + tl.cast(splits, tl.int64) * capacity
    sums = tl.load(sums_ptr + offsets, mask=has_part, other=0.0)
    total = tl.sum(sums * tl.exp2((partials - highest[None, :]) * LOG2E), axis=0)

    rows = tl.load(order_ptr + places, mask=inside, other=0).to(tl.int64)
    labels = tl.load(labels_ptr + rows * stride_labels, mask=inside, other=0)
    own = tl.load(own_ptr + places, mask=places < count, other=0.0)
    # A label outside the vocabulary makes the loss NaN, and the gradients in the backward too.
    total = tl.where((labels >= 0) & (labels < columns), total, float("nan"))
    labelled = places < count
    loss = tl.log(tl.where(labelled, total, 1.0)) - (own - highest)
    tl.store(losses_ptr + rows, tl.where(labelled, loss, 0.0), mask=inside)
    tl.store(statistics_ptr + places, tl.where(labelled, highest, 0.0), mask=inside)
    sums_ptr = statistics_ptr + tl.cast(rows_total, tl.int64)
    tl.store(sums_ptr + places, tl.where(labelled, total, 0.0), mask=inside)


@triton.jit(do_not_specialize=["rows_total"])
def _reduce_kernel(
    # (T,), fp32
    losses_ptr,
    # (T + 1,), int32
    order_ptr,
    # (), fp32
    loss_ptr,
    rows_total, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum or the mean of the losses."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, rows_total, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + rows, mask=rows < rows_total, other=0.0).to(tl.float64)
    loss = tl.sum(total, axis=0)
    if IS_MEAN:
        loss /= tl.maximum(tl.load(order_ptr + rows_total), 1).to(tl.float64)
    tl.store(loss_ptr, loss.to(tl.float32))


class Projection(NamedTuple):
    """The inputs of the forward and the backward, and sizes that follow from these inputs.

    Args:
        hidden: Rows (T, K); fp32, fp16 or bf16.
        weight: Projection (V, K) in the dtype of `hidden`.
        bias: Bias (V,) in any floating dtype, or None.
        labels: Labels (T,), int32 or int64.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def depth(self) -> int:
        return self.hidden.shape[1]

    @property
    def columns(self) -> int:
        return self.weight.shape[0]

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.rows, self.tile[0].block_m)

    @property
    def tile(self) -> tuple[Tile, int]:
        return cross_entropy_tile(self.hidden.dtype)

    @property
    def blocks_per_split(self) -> int:
        """Number of column blocks of a part: at least 2, because starting a program takes time."""
        blocks = ceil_div(self.columns, self.tile[0].block_n)
        return max(2, ceil_div(blocks, MOST_SPLITS))

    @property
    def splits(self) -> int:
        return ceil_div(self.columns, self.tile[0].block_n * self.blocks_per_split)

    def arguments(self, order: Tensor) -> dict[str, object]:
        """Return the arguments by name that a kernel needs to compute a tile of logits."""
        tile, block_k = self.tile
        return {
            "hidden_ptr": self.hidden,
            "weight_ptr": self.weight,
            "bias_ptr": self.bias,
            "labels_ptr": self.labels,
            "order_ptr": order,
            "stride_hidden_row": self.hidden.stride(0),
            "stride_hidden_col": self.hidden.stride(1),
            "stride_weight_row": self.weight.stride(0),
            "stride_weight_col": self.weight.stride(1),
            "stride_labels": self.labels.stride(0),
            "rows_total": self.rows,
            "columns": self.columns,
            "depth": self.depth,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": block_k,
            "HAS_BIAS": self.bias is not None,
            "EVEN_K": self.depth % block_k == 0,
        }


def is_mean(reduction: str) -> bool:
    """Return whether the reduction is "mean"; raise ValueError if it is unknown."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, allowed: {', '.join(REDUCTIONS)}")
    return reduction == "mean"


def _partition_launch(labels, order, ignore_index: int) -> Launch:
    arguments = {
        "labels_ptr": labels,
        "order_ptr": order,
        "stride_labels": labels.stride(0),
        "rows_total": labels.shape[0],
        "ignore_index": ignore_index,
        "BLOCK": LIST_BLOCK,
    }
    return Launch("cross_entropy_partition", _partition_kernel, (1,), arguments, 8, 1)


def _partials_launch(given: Projection, order, partials, own) -> Launch:
    tile, _ = given.tile
    arguments = {
        **given.arguments(order),
        "partials_ptr": partials,
        "own_ptr": own,
        "capacity": partials.shape[2],
        "BLOCKS_PER_SPLIT": given.blocks_per_split,
    }
    return Launch(
        "cross_entropy_partials",
        _partials_kernel,
        (given.row_blocks * given.splits,),
        arguments,
        tile.num_warps,
        tile.num_stages,
    )


def _combine_launch(given: Projection, order, partials, own, statistics, losses) -> Launch:
    arguments = {
        "labels_ptr": given.labels,
        "order_ptr": order,
        "partials_ptr": partials,
        "own_ptr": own,
        "statistics_ptr": statistics,
        "losses_ptr": losses,
        "stride_labels": given.labels.stride(0),
        "rows_total": given.rows,
        "capacity": partials.shape[2],
        "columns": given.columns,
        "splits": given.splits,
        "BLOCK_M": COMBINED_ROWS,
        "BLOCK_S": triton.next_power_of_2(max(given.splits, 1)),
    }
    grid = (ceil_div(given.rows, COMBINED_ROWS),)
    return Launch("cross_entropy_combine", _combine_kernel, grid, arguments, 4, 1)


def _reduce_launch(losses, order, loss, mean: bool) -> Launch:
    arguments = {
        "losses_ptr": losses,
        "order_ptr": order,
        "loss_ptr": loss,
        "rows_total": losses.shape[0],
        "IS_MEAN": mean,
        "BLOCK": LIST_BLOCK,
    }
    return Launch("cross_entropy_reduce", _reduce_kernel, (1,), arguments, 8, 1)


def forward_launches(
    hidden, weight, bias, labels, order, partials, own, statistics, losses, loss, ignore_index, mean
) -> list[Launch]:
    """Return the launches of `linear_cross_entropy_forward` in order."""
    given = Projection(hidden, weight, bias, labels)
    launches = [
        _partition_launch(labels, order, ignore_index),
        _partials_launch(given, order, partials, own),
        _combine_launch(given, order, partials, own, statistics, losses),
    ]
    return launches if loss is None else [*launches, _reduce_launch(losses, order, loss, mean)]


def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cross entropy of hidden Wᵀ + bias, without a synchronisation.

    Args:
        hidden: Rows (T, K); fp32, fp16 or bf16. All tensors may have any strides.
        weight: Projection (V, K) in the dtype of `hidden`.
        bias: Bias (V,) in any floating dtype, or None.
        labels: Labels (T,), int32 or int64.
        ignore_index: Label of rows that are left out of the loss.
        reduction: "mean", "sum" or "none".

    Returns:
        loss: fp32 (), or (T,) for the reduction "none". The loss of a row without a label is 0, and
            the mean is 0 if no row has a label. A label outside [0, V) that is not `ignore_index`
            makes the loss NaN.
        statistics: fp32 (2, T), the maximum and the sum of exponentials of the logits of each row.
            The rows are in the order of `order`.
        order: int32 (T + 1,), the indices of the rows with a label, the indices of the rows without
            a label, and the number of rows with a label.

    Raises:
        ValueError: If `reduction` is unknown.
    """
    (bias,) = dense(bias)
    given, mean = Projection(hidden, weight, bias, labels), is_mean(reduction)
    device = hidden.device
    order = torch.empty(given.rows + 1, dtype=torch.int32, device=device)
    capacity = given.row_blocks * given.tile[0].block_m
    partials = torch.empty((2, given.splits, capacity), dtype=torch.float32, device=device)
    own, losses = (torch.empty(given.rows, dtype=torch.float32, device=device) for _ in range(2))
    statistics = torch.empty((2, given.rows), dtype=torch.float32, device=device)
    loss = None if reduction == "none" else torch.empty((), dtype=torch.float32, device=device)
    results = (order, partials, own, statistics, losses, loss)
    run(forward_launches, (hidden, weight, bias, labels), results, ignore_index, mean)
    return losses if loss is None else loss, statistics, order
