"""Scaled dot-product attention, dense and packed, and its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.reference.dropout import dropout
from fastbert.reference.varlen import existing_queries, longest, pad_rows, unpad_rows


def visible(
    query_length: int,
    key_length: int,
    left: int,
    right: int,
    device: torch.device,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Return the mask of keys inside the window and the sequence, or None if every key is allowed.

    The mask is bool and broadcastable to (B, H, Lq, Lk). Query ``i`` has the position of key
    ``i + Lk - Lq`` (bottom-right alignment). `lengths` has the lengths of the query and the key
    sequences, which replace Lq and Lk for each sequence. A `left` or `right` of -1 leaves that side
    of the window open. Rows of queries beyond the length of their sequence may allow keys; the
    callers discard the results of these rows.
    """
    query = torch.arange(query_length, device=device).view(1, 1, -1, 1)
    key = torch.arange(key_length, device=device).view(1, 1, 1, -1)
    offset: Tensor | int = key_length - query_length
    allowed = None
    if lengths is not None:
        query_lengths, key_lengths = (n.long().view(-1, 1, 1, 1) for n in lengths)
        offset = key_lengths - query_lengths
        allowed = key < key_lengths
    for limit, inside in (
        (left, key >= query + offset - left),
        (right, key <= query + offset + right),
    ):
        if limit >= 0:
            allowed = inside if allowed is None else allowed & inside
    return allowed


def softmax_weights(
    q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """Compute the softmax of ``q kᵀ scale + bias`` over the allowed keys.

    The row of a query that may attend to no key is exactly 0.
    """
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if allowed is None and bias is None:
        return torch.softmax(scores, dim=-1)
    # A row without an allowed key has only scores of -inf, and its softmax would be NaN. Its scores
    # are set to 0 before the softmax, so that no NaN enters the gradient, and its weights are set
    # to 0 afterwards.
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def hide_unattended(x: Tensor, allowed: Tensor | None) -> Tensor:
    """Set keys or values to 0 if no query may attend to them: they may be NaN, and 0 · NaN is NaN.

    x is (B, H, Lk, D), and `allowed` is broadcastable to (B, H, Lq, Lk).
    """
    if allowed is None:
        return x
    return x.masked_fill(~allowed.any(dim=-2).unsqueeze(-1), 0.0)


def _window(window: tuple[int, int] | int | None, causal: bool) -> tuple[int, int]:
    left, right = (
        (-1, -1) if window is None else (window, window) if isinstance(window, int) else window
    )
    return left, 0 if causal else right


def _attend(q, k, v, mask, bias, dropout_p, dropout_seed, scale, left, right, lengths=None):
    allowed = visible(q.shape[-2], k.shape[-2], left, right, q.device, lengths)
    if mask is not None:
        mask = mask[:, None, None, :] if mask.dim() == 2 else mask
        allowed = mask if allowed is None else allowed & mask
    k, v = hide_unattended(k, allowed), hide_unattended(v, allowed)
    weights = softmax_weights(q, k, allowed, bias, scale)
    dropped = dropout(weights, dropout_p, dropout_seed, tuple(weights.shape))
    return dropped @ v, weights


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | int | None = None,
    return_weights: bool = False,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention (Vaswani et al. 2017, eq. 1); see ``fastbert.ops.attention``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window, causal)
    out, weights = _attend(q, k, v, mask, bias, dropout_p, dropout_seed, scale, left, right)
    return (out, weights) if return_weights else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | int | None = None,
    return_weights: bool = False,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention inside each sequence: pad the rows, attend, and pack the result again.

    See ``fastbert.ops.attention_varlen``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window, causal)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    lengths = (cu_seqlens_q.diff(), cu_seqlens_k.diff())
    if max_seqlen_q is None:
        max_seqlen_q = longest(cu_seqlens_q)
    if max_seqlen_k is None:
        max_seqlen_k = longest(cu_seqlens_k)
    padded_q, slot, used = pad_rows(q, cu_seqlens_q, max_seqlen_q)
    padded_k, padded_v = (pad_rows(x, cu_seqlens_k, max_seqlen_k)[0] for x in (k, v))
    padded_q, padded_k, padded_v = (x.transpose(1, 2) for x in (padded_q, padded_k, padded_v))
    out, weights = _attend(
        padded_q,
        padded_k,
        padded_v,
        mask,
        bias,
        dropout_p,
        dropout_seed,
        scale,
        left,
        right,
        lengths,
    )
    out = unpad_rows(out.transpose(1, 2), slot, used)
    if not return_weights:
        return out
    return out, weights.masked_fill(~existing_queries(lengths[0], max_seqlen_q), 0.0)


def attention_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | int | None = None,
    return_weights: bool = False,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention on one tensor of q, k and v; see ``fastbert.ops.attention_qkvpacked``."""
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "dropout_p": dropout_p, "scale": scale, "causal": causal,
        "window": window, "dropout_seed": dropout_seed, "return_weights": True,
    }  # fmt: skip
    q, k, v = qkv.unbind(-3)
    if cu_seqlens is None:
        out, weights = attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        out = out.transpose(1, 2)
    else:
        out, weights = attention_varlen(
            q, k, v, cu_seqlens, None, max_seqlen, max_seqlen, **options
        )
    return (out, weights) if return_weights else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | int | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Compute the softmax weights of `attention` or `attention_varlen` for chosen heads and rows.

    The softmax is computed from q and k, and `lse` is ignored. See
    ``fastbert.ops.attention_weights``.
    """
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scale, "causal": causal, "window": window,
        "return_weights": True,
    }  # fmt: skip
    if cu_seqlens_q is None:
        _, weights = attention(q, k, k, **options)
    else:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _, weights = attention_varlen(q, k, k, *lengths, **options)
    return choose(weights, heads, rows)


def choose(weights: Tensor, heads: Sequence[int] | None, rows: Sequence[int] | None) -> Tensor:
    """Select heads and query rows of weights (B, H, Lq, Lk); None selects all."""
    weights = weights if heads is None else weights[:, list(heads)]
    return weights if rows is None else weights[:, :, list(rows)]
