"""Checks and conversions of arguments that more than one operation shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def require(condition: bool, name: str, got: Any, allowed: str) -> None:
    """Raise ValueError unless `condition` holds; the message has `name`, `got` and `allowed`."""
    if not condition:
        raise ValueError(f"{name}: got {got}, allowed: {allowed}")


def require_eps(eps: float) -> None:
    """Raise ValueError unless `eps` is a finite number of at least 0."""
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps}, allowed: a finite number >= 0")


def require_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless `tensor` has `shape`."""
    # The message is built only on failure, because the sizes may be symbols under torch.compile.
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, allowed: {tuple(shape)}")


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the dtype of `tensor` is a floating one."""
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name}: got {tensor.dtype}, allowed: a floating dtype")


def require_integer(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the dtype of `tensor` is int64 or int32."""
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got {tensor.dtype}, allowed: int64, int32")


def require_same_device(first: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError unless `tensors` are on `device`, the device of the argument `first`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, allowed: {device}, as {first}")


def check_cu_seqlens(
    name: str, cu_seqlens: Tensor, first: str, device: torch.device, rows: int | None = None
) -> None:
    """Check the cumulative lengths of packed sequences.

    Args:
        name: Name of the caller's argument for `cu_seqlens`, for messages.
        cu_seqlens: Cumulative lengths, which must be int32 of shape ``(B + 1,)`` on `device`.
        first: Name of the caller's argument whose device is `device`, for messages.
        device: Device of the tensors of the call.
        rows: Number of rows of the packed tensor, or None. With `rows`, the values of `cu_seqlens`
            are checked too, but only on the CPU and outside torch.compile, because a read from a
            GPU would synchronise.

    Raises:
        TypeError: If the dtype is not int32.
        ValueError: If the shape, the device or a value is not allowed.
    """
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name}: got {cu_seqlens.dtype}, allowed: int32")
    shape = cu_seqlens.shape
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"{name}: got shape {tuple(shape)}, allowed: (B + 1,)")
    require_same_device(first, device, **{name: cu_seqlens})
    if rows is None or cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > rows or bool((cu_seqlens.diff() < 0).any()):
        allowed = f"from 0, never falling, at most {rows}, the number of rows"
        raise ValueError(f"{name}: got {cu_seqlens.tolist()}, allowed: {allowed}")


def as_matrix(x: Tensor) -> Tensor:
    """Return `x` of shape (..., N) as a matrix of N columns, as a view if the strides allow one.

    N may be 0, for which ``x.reshape(-1, 0)`` would fail.
    """
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def flatten_rows(x: Tensor) -> Tensor:
    """Return `x` of shape (..., N) as a matrix of N columns whose rows are contiguous.

    The stride between rows is arbitrary. `x` is copied only if its strides do not allow such a
    view.
    """
    rows = as_matrix(x)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def dropout_seed(p: float, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the seed of a dropout mask: `seed`, or a drawn seed, or None if `p` is 0.

    The seed is a tensor on `device`, so that drawing it never synchronises. Each replay of a CUDA
    graph draws a new seed. Activation checkpointing restores torch's generator before it computes a
    segment again, and therefore draws the same seed.
    """
    if p == 0.0:
        return None
    require(0.0 <= p <= 1.0, "dropout_p", p, "a number in [0, 1]")
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if seed.dtype != torch.int64:
        raise TypeError(f"dropout_seed: got {seed.dtype}, allowed: int64")
    require_shape("dropout_seed", seed, (1,))
    require_same_device("the input", device, dropout_seed=seed)
    return seed


def dropout_seeds(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw `count` seeds for ``dropout_seed`` arguments at once.

    Like `dropout_seed`, the function draws from torch's generator of `device`.
    """
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)
    # A launch of a Triton kernel is cached only if all addresses are multiples of 16
    # (kernels/launch.py). An int64 seed has 8 bytes, so each seed is stored twice, and every seed
    # then has such an address.
    return torch.stack((seeds, seeds), dim=1)[:, 0].split(1)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for matrix products of `x`, or None without autocast or for fp64."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors in the dtype that autocast gives to the operands of a matrix product.

    Without autocast, all tensors are unchanged. Under autocast, None and fp64 tensors are
    unchanged.
    """
    if not torch._C._is_any_autocast_enabled():
        return list(tensors)
    device = next(t.device.type for t in tensors if t is not None)
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype) for t in tensors]


def transformed() -> bool:
    """Tell whether torch.func or forward-mode AD transforms the call; False in torch.compile."""
    if torch.compiler.is_compiling():
        return False
    # The level of forward-mode AD has no public name. It is -1 outside forward-mode AD.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
