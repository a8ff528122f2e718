"""Checks of the arguments of the attention functions, and the options of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import (
    check_cu_seqlens,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.arguments import dropout_seed as draw_seed
from fastbert.ops.gpu_times import length_class
from fastbert.ops.product import needs_gradient
from fastbert.reference import longest

MAX_HEAD_DIM = 256


class AttentionOptions(NamedTuple):
    """The options of one call of attention, in the form that the operators and all backends take.

    ``mask`` and ``bias`` are 4-D and broadcastable to (B, H, max_seqlen_q, max_seqlen_k), or None.
    For a dense q, ``cu_seqlens_q`` and ``cu_seqlens_k`` are None, and ``max_seqlen_q`` and
    ``max_seqlen_k`` are Lq and Lk. ``seed`` is None without dropout. ``left`` and ``right`` are the
    limits of the window; -1 leaves that side of the window open.
    """

    mask: Tensor | None
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    scale: float
    left: int
    right: int


def options_of(
    q: Tensor,
    shape: tuple[int, ...],
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | int | None,
) -> AttentionOptions:
    """Check the arguments of a public function; return the options. `shape` is (B, H, Lq, Lk)."""
    if mask is not None or bias is not None:
        mask, bias = _canonical_mask(mask, shape), _canonical_bias(bias, shape)
        require_same_device("q", q.device, mask=mask, bias=bias)
    seed = draw_seed(dropout_p, dropout_seed, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    left, right = _canonical_window(window, causal)
    return AttentionOptions(
        mask, bias, cu_seqlens_q, cu_seqlens_k, seed, shape[2], shape[3], float(dropout_p), scale,
        left, right,
    )  # fmt: skip


def backend_for(
    q: Tensor, requested: str | None, o: AttentionOptions, weights: bool = False
) -> str:
    """Return the backend for attention on `q`.

    With `weights`, the backend must be able to return the softmax weights too.
    """
    on_gpu = q.device.type == "cuda"
    request = backends.Request(
        q.device.type,
        q.dtype,
        head_dim=q.shape[-1],
        options=named_options(o.bias is not None, o.left, o.right, o.scale, weights),
        # The table of measured times (gpu_times.json) is for GPUs only.
        length=length_class(o.max_seqlen_k) if on_gpu else 0,
        trained=on_gpu and needs_gradient(q),
    )
    return backends.resolve("attention", requested, request).backend


def named_options(
    bias: bool, left: int, right: int, scale: float, weights: bool
) -> tuple[str, ...]:
    """Return the names of the options in use that some backends refuse, for a `Request`.

    The name "scale" stands for a scale of 0 or less.
    """
    given = {
        "bias": bias, "window": left >= 0 or right >= 0, "scale": scale <= 0.0, "weights": weights,
    }  # fmt: skip
    return tuple([name for name, is_given in given.items() if is_given])


def _check_head_dim(name: str, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head dim {head_dim}, allowed: 1 to {MAX_HEAD_DIM}")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, dims: int, names: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_floating(name, tensor)
        require(tensor.dim() == dims, name, f"shape {tuple(tensor.shape)}", f"{dims} dims: {names}")
        require(tensor.dtype == q.dtype, name, tensor.dtype, f"{q.dtype}, as q")
    require_same_device("q", q.device, k=k, v=v)
    _check_head_dim("q", q.shape[-1])
    require_shape("v", v, tuple(k.shape))


def dense_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Check q (B, H, Lq, D), and k and v (B, H, Lk, D); return (B, H, Lq, Lk)."""
    _check_inputs(q, k, v, 4, "(B, H, L, D)")
    require_shape("k", k, (q.shape[0], q.shape[1], k.shape[2], q.shape[3]))
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2]


def varlen_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, ...]:
    """Check packed q (Tq, H, D), k and v (Tk, H, D); return (B, H, max_seqlen_q, max_seqlen_k)."""
    _check_inputs(q, k, v, 3, "(T, H, D)")
    require_shape("k", k, (k.shape[0], q.shape[1], q.shape[2]))
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q.device)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "q", q.device)
    require_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    return cu_seqlens_q.shape[0] - 1, q.shape[1], max_q, max_k


def check_qkv(qkv: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check qkv of shape (B, L, 3, H, D), or (T, 3, H, D) with `cu_seqlens`."""
    require_floating("qkv", qkv)
    dims, names = (5, "(B, L, 3, H, D)") if cu_seqlens is None else (4, "(T, 3, H, D)")
    if qkv.dim() != dims or qkv.shape[-3] != 3:
        raise ValueError(f"qkv: got shape {tuple(qkv.shape)}, allowed: {names}")
    _check_head_dim("qkv", qkv.shape[-1])
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens, "qkv", qkv.device)


def _require_broadcastable(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    fits = tensor.dim() <= 4 and all(
        got == 1 or got == want
        for got, want in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    got = f"shape {tuple(tensor.shape)}"
    require(fits, name, got, f"(B, Lk) = {(shape[0], shape[3])} or broadcastable to {shape}")


def _canonical_mask(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: got {mask.dtype}, allowed: bool, True = attend (bias takes an additive mask)"
        )
    mask = mask[:, None, None, :] if mask.dim() == 2 else mask
    _require_broadcastable("mask", mask, shape)
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _canonical_bias(bias: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if bias is None:
        return None
    require_floating("bias", bias)
    _require_broadcastable("bias", bias, shape)
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def _canonical_window(window: tuple[int, int] | int | None, causal: bool) -> tuple[int, int]:
    left, right = (window, window) if isinstance(window, int) else window or (-1, -1)
    require(left >= -1 and right >= -1, "window", window, "numbers >= -1, where -1 is unlimited")
    return left, 0 if causal else right


def check_lse(lse: Tensor | None, q: Tensor) -> None:
    """Check lse, fp32 of shape (B, H, Lq) for a dense q, or (H, Tq) for a packed q."""
    if lse is None:
        return
    if lse.dtype != torch.float32:
        raise TypeError(f"lse: got {lse.dtype}, allowed: float32")
    require_shape("lse", lse, tuple(q.shape[:3]) if q.dim() == 4 else (q.shape[1], q.shape[0]))
    require_same_device("q", q.device, lse=lse)


def chosen(name: str, indices: Sequence[int] | None, size: int) -> list[int] | None:
    """Return `indices` as a list, or None for None; each index must be from 0 to `size` - 1."""
    if indices is None:
        return None
    indices = [int(i) for i in indices]
    require(all(0 <= i < size for i in indices), name, indices, f"numbers from 0 to {size - 1}")
    return indices
