"""One vector per sequence from the rows of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.arguments import check_cu_seqlens

POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len_tokens", "weightedmean")


def pool(rows: Tensor, cu_seqlens: Tensor, pooling: str = "mean", *, skip: int = 0) -> Tensor:
    """(T, H) rows of packed sequences → (B, H) in the rows' dtype, differentiable.

    rows: floating; ``last_hidden_state`` of packed input, from transformers' (1, T, H) its ``[0]``.
    cu_seqlens: int32 (B + 1,), rows ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]`` are sequence b;
    rows beyond the last one are not read. pooling: "cls" the first row, "last" the last one, "mean"
    (summed in fp32 for 16-bit rows) and "max" over the rows; "mean_sqrt_len_tokens" divides the sum
    by the square root of the length, and "weightedmean" weighs row i of a sequence by i + 1.
    Largest rows that are equal share the gradient of "max". A sequence without rows gives 0, and
    none is touched by what else is in the batch. skip: this many rows at the start of each sequence
    (a prompt) are left out; "weightedmean" still counts them.

    Raises ValueError or TypeError naming the argument, what was got and what is allowed; the values
    of ``cu_seqlens`` are looked at on the CPU only.
    """
    _check(rows, cu_seqlens, pooling, skip)
    bounds = cu_seqlens.long()
    whole = bounds.diff().unsqueeze(1)
    places = _places(rows, bounds) if skip or pooling == "weightedmean" else None
    if skip and places is not None:
        keep = places >= skip
        rows, places = rows[keep], places[keep]
        bounds = torch.nn.functional.pad((whole[:, 0] - skip).clamp(min=0).cumsum(0), (1, 0))
    lengths = bounds.diff().unsqueeze(1)
    if pooling == "cls":
        return _rows_at(rows, bounds[:-1], lengths == 0)
    if pooling == "last":
        return _rows_at(rows, bounds[1:] - 1, lengths == 0)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    # unsafe: the check that the offsets cover all rows would be a synchronisation.
    if pooling == "max":
        largest = torch.segment_reduce(wide, "max", offsets=bounds, unsafe=True)
        return largest.masked_fill(lengths == 0, 0.0).to(rows.dtype)
    divisor = lengths.clamp(min=1)
    if places is not None and pooling == "weightedmean":
        wide = wide * (places + 1).unsqueeze(1)
        divisor = ((whole * (whole + 1) - skip * (skip + 1)) // 2).clamp(min=1)
    total = torch.segment_reduce(wide, "sum", offsets=bounds, unsafe=True)
    if pooling == "mean_sqrt_len_tokens":
        return (total / divisor.to(total.dtype).sqrt()).to(rows.dtype)
    return (total / divisor).to(rows.dtype)


def _places(rows: Tensor, bounds: Tensor) -> Tensor:
    """The place (T,) of each row in its sequence, from 0; -1 beyond the last sequence."""
    index = torch.arange(rows.shape[0], device=rows.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return torch.where(index < bounds[-1], index - bounds[sequence], -1)


def _rows_at(rows: Tensor, places: Tensor, empty: Tensor) -> Tensor:
    """rows (T, H) at ``places`` int64 (B,), 0 where ``empty`` (B, 1), whose places may lie
    outside."""
    if not torch.compiler.is_compiling() and rows.shape[0] == 0:
        return rows.new_zeros(places.shape[0], rows.shape[1])
    return rows.index_select(0, places.clamp(0, rows.shape[0] - 1)).masked_fill(empty, 0.0)


def _check(rows: Tensor, cu_seqlens: Tensor, pooling: str, skip: int) -> None:
    if pooling not in POOLINGS:
        raise ValueError(f"pooling: got {pooling!r}, allowed: {', '.join(POOLINGS)}")
    if type(skip) is not int or skip < 0:
        raise ValueError(f"skip: got {skip!r}, allowed: an integer >= 0")
    if not rows.dtype.is_floating_point:
        raise TypeError(f"rows: got {rows.dtype}, allowed: a floating dtype")
    if rows.dim() != 2:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, allowed: (T, H)")
    check_cu_seqlens("cu_seqlens", cu_seqlens, "rows", rows.device, rows.shape[0])
