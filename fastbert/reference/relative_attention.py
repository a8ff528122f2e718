"""Attention whose logits have terms of relative positions and of segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.reference.attention import attention, attention_varlen, hide_unattended
from fastbert.reference.varlen import longest, pad_rows


def position_rows(
    index: Tensor, query_length: int, key_length: int, lengths: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the row of each distance, int64 of shape (Lq, Lk), or (B, Lq, Lk) with `lengths`.

    The position of query ``i`` is that of key ``i + Lk - Lq``; `lengths` has the lengths of the
    query and the key sequences, which replace Lq and Lk. Distances outside the table, which only
    padding has, get the nearest row.
    """
    query = torch.arange(query_length, device=index.device).unsqueeze(1)
    key = torch.arange(key_length, device=index.device)
    offset: Tensor | int = key_length - query_length
    if lengths is not None:
        offset = (lengths[1] - lengths[0]).long()[:, None, None]
    middle = index.shape[0] // 2
    distance = (query + offset - key).clamp(-middle, middle)
    return index.long()[distance + middle]


def relative_terms(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    position_bias: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    segment_scores: Tensor | None = None,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the terms that are added to ``q kᵀ``, of shape (B, H, Lq, Lk) in the dtype of `q`.

    q is (B, H, Lq, D), k is (B, H, Lk, D), the segments are (B, L), and the segment scores are (B,
    H, Lq). The other arguments are those of ``fastbert.ops.relative_attention``.
    """
    shape = (*q.shape[:3], k.shape[2])
    rows = position_rows(index, q.shape[2], k.shape[2], lengths)
    rows = rows.expand(q.shape[0], *rows.shape[-2:]).unsqueeze(1).expand(shape)
    terms = q.new_zeros(shape)
    if position_keys is not None:
        products = q @ position_keys.permute(1, 2, 0)  # (B, H, Lq, P)
        terms = terms + products.gather(-1, rows)
    if position_queries is not None:
        products = k @ position_queries.permute(1, 2, 0)  # (B, H, Lk, P)
        terms = terms + products.gather(-1, rows.transpose(-2, -1)).transpose(-2, -1)
    if position_bias is not None:
        heads = torch.arange(q.shape[1], device=q.device)[:, None, None]
        terms = terms + position_bias.t()[heads, rows]
    if segments is not None and segment_scores is not None:
        differ = segments[0].unsqueeze(2) != segments[1].unsqueeze(1)  # (B, Lq, Lk)
        terms = terms + torch.where(differ.unsqueeze(1), segment_scores.unsqueeze(-1), 0.0)
    return terms.to(q.dtype)


def padded_segments(
    segments: tuple[Tensor, Tensor],
    scores: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pad packed segments ``(T,)`` to (B, L), and their scores ``(Tq, H)`` to (B, H, Lq).

    `cu_seqlens` and `longest` are those of the queries and of the keys.
    """
    of_queries, of_keys = (
        pad_rows(rows, ends, length)[0]
        for rows, ends, length in zip(segments, cu_seqlens, longest, strict=True)
    )
    padded = pad_rows(scores, cu_seqlens[0], longest[0])[0].transpose(1, 2)
    return (of_queries, of_keys), padded


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    position_bias: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    segment_scores: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_weights: bool = False,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention with relative terms; see ``fastbert.ops.relative_attention``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tables = (index, position_keys, position_queries, position_bias)
    options: dict[str, Any] = {
        "mask": mask, "dropout_p": dropout_p, "scale": scale, "return_weights": return_weights,
        "dropout_seed": dropout_seed,
    }  # fmt: skip
    # Terms of keys to which no query attends would be masked, but NaN in such a key would reach the
    # gradient of the table.
    allowed = mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask
    if cu_seqlens_q is None:
        hidden = hide_unattended(k, allowed)
        bias = relative_terms(q, hidden, *tables, segments, segment_scores) * scale
        return attention(q, k, v, bias=bias, **options)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_seqlen_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    padded_q = pad_rows(q, cu_seqlens_q, max_seqlen_q)[0].transpose(1, 2)
    padded_k = pad_rows(k, cu_seqlens_k, max_seqlen_k)[0].transpose(1, 2)
    if segments is not None and segment_scores is not None:
        segments, segment_scores = padded_segments(
            segments, segment_scores, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        )
    lengths = (cu_seqlens_q.diff(), cu_seqlens_k.diff())
    padded_k = hide_unattended(padded_k, allowed)
    terms = relative_terms(padded_q, padded_k, *tables, segments, segment_scores, lengths)
    return attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bias=terms * scale,
        **options,
    )  # fmt: skip
