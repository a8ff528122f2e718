"""Checks of the arguments of the alignment modules."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.arguments import require, require_floating, require_same_device


def require_size(name: str, size: int, least: int = 1) -> None:
    """Raise ValueError unless `size` is an integer of at least `least`."""
    require(type(size) is int and size >= least, name, repr(size), f"an integer >= {least}")


def require_inputs(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_size: int | None,
    key_size: int | None,
    same_size: bool,
) -> None:
    """Raise an error that names the argument unless queries, keys and values fit together.

    Args:
        query: Queries, which must have the shape ``(B, Lq, Dq)``.
        keys: Keys, which must have the shape ``(B, Lk, Dk)``.
        values: Values, which must have the shape ``(B, Lk, Dv)``.
        query_size: The size Dq, or None for any size.
        key_size: The size Dk, or None for any size.
        same_size: Whether Dk must be Dq.

    Raises:
        ValueError: If a shape or a device is not allowed, or if the dtypes differ.
        TypeError: If a dtype is not floating.
    """
    given = {"query": (query, "(B, Lq, Dq)"), "keys": (keys, "(B, Lk, Dk)")}
    for name, (x, names) in {**given, "values": (values, "(B, Lk, Dv)")}.items():
        require_floating(name, x)
        require(x.dim() == 3, name, f"shape {tuple(x.shape)}", names)
        require(x.dtype == query.dtype, name, x.dtype, f"{query.dtype}, as query")
    require_same_device("query", query.device, keys=keys, values=values)
    batch, size = query.shape[0], query.shape[2]
    if query_size not in (None, size):
        require(False, "query", f"shape {tuple(query.shape)}", f"(B, Lq, {query_size})")
    expected = size if same_size else key_size
    if keys.shape[0] != batch or expected not in (None, keys.shape[2]):
        last = "Dk" if expected is None else expected
        require(False, "keys", f"shape {tuple(keys.shape)}", f"({batch}, Lk, {last})")
    if values.shape[:2] != keys.shape[:2]:
        allowed = f"({batch}, {keys.shape[1]}, Dv), with a value for each key"
        require(False, "values", f"shape {tuple(values.shape)}", allowed)


def checked_mask(mask: Tensor | None, query: Tensor, keys: Tensor) -> Tensor | None:
    """Return `mask` with three dimensions, broadcastable to ``(B, Lq, Lk)``; None stays None.

    Raises:
        ValueError: If the shape or the device of `mask` is not allowed.
        TypeError: If `mask` is not bool.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: got {mask.dtype}, allowed: bool, True = attend")
    require_same_device("query", query.device, mask=mask)
    full = (query.shape[0], query.shape[1], keys.shape[1])
    shape = tuple(mask.shape)
    wanted = (full[0], 1, full[2]) if len(shape) == 2 else full
    aligned = (shape[0], 1, shape[1]) if len(shape) == 2 else (1,) * (3 - len(shape)) + shape
    fits = len(aligned) == 3 and all(
        got in (1, want) for got, want in zip(aligned, wanted, strict=True)
    )
    if not fits:
        allowed = f"(B, Lk) = {(full[0], full[2])} or broadcastable to {full}"
        require(False, "mask", f"shape {shape}", allowed)
    return mask.reshape(aligned)
