"""Pooling of packed sequences to one vector per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.arguments import check_cu_seqlens

POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len_tokens", "weightedmean")


def pool(rows: Tensor, cu_seqlens: Tensor, pooling: str = "mean", *, skip: int = 0) -> Tensor:
    """Pool the rows of packed sequences to one vector per sequence.

    The result is differentiable in `rows`. The vector of a sequence does not depend on the other
    sequences of the batch.

    Args:
        rows: Floating tensor of shape ``(T, H)``, such as the ``last_hidden_state`` of packed
            input. The packed output of transformers has the shape ``(1, T, H)``; pass
            ``last_hidden_state[0]``.
        cu_seqlens: Cumulative lengths from 0, int32 of shape ``(B + 1,)``. Sequence ``b`` has the
            rows from ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``, exclusive. Rows after the last
            sequence are not read.
        pooling: Name of the pooling. ``"cls"`` takes the first row, and ``"last"`` takes the last
            row. ``"mean"`` is the mean of the rows; the sum of 16-bit rows is computed in fp32.
            ``"max"`` is the maximum of each column; if several rows have the maximum, they share
            the gradient.
            ``"mean_sqrt_len_tokens"`` divides the sum by the square root of the length.
            ``"weightedmean"`` weights row ``i`` of a sequence by ``i + 1``.
        skip: Number of rows at the start of each sequence, such as a prompt, that are left out.
            ``"weightedmean"`` still counts these rows in ``i``.

    Returns:
        Tensor of shape ``(B, H)`` in the dtype of `rows`. A sequence without rows gives 0.

    Raises:
        ValueError: If a shape, a device or a value is not allowed. The message names the argument,
            its value and what is allowed. The values of `cu_seqlens` are checked on the CPU only.
        TypeError: If a dtype is not allowed.

    Examples:
        >>> import torch
        >>> from fastbert.modules import pool
        >>> rows = torch.tensor([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
        >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)  # The lengths are 2 and 1.
        >>> pool(rows, cu_seqlens)
        tensor([[2., 3.],
                [5., 6.]])
        >>> pool(rows, cu_seqlens, "max")
        tensor([[3., 4.],
                [5., 6.]])
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
    # With `unsafe=True`, torch does not check that the offsets cover all rows. The check would make
    # the CPU wait for a GPU.
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
    """Return the index ``(T,)`` of each row in its sequence, from 0; -1 after the last sequence."""
    index = torch.arange(rows.shape[0], device=rows.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return torch.where(index < bounds[-1], index - bounds[sequence], -1)


def _rows_at(rows: Tensor, places: Tensor, empty: Tensor) -> Tensor:
    """Return the row at each index, or 0 for an empty sequence.

    Args:
        rows: Tensor of shape ``(T, H)``.
        places: Index of a row for each sequence, int64 of shape ``(B,)``. The index of an empty
            sequence may be out of range.
        empty: Whether each sequence is empty, bool of shape ``(B, 1)``.
    """
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
