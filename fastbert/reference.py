"""Plain PyTorch for every operation: the specification that each kernel is checked against.

Everything here is differentiable by autograd, twice if need be, runs on any device and in any
floating dtype up to float64, and is written to be read, not to be fast. The functions take the
arguments of the functions of the same name in ``fastbert.ops``, except ``backend`` and
``deterministic``. The whole model in the same spirit is ``fastbert.reference_model``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 0xFFFFFFFF
PHILOX_ROUNDS = 7
# The activation of a feed-forward → its function, ``approximate`` of ``gelu``.
ACTIVATIONS = {
    "gelu": "none",
    "gelu_tanh": "tanh",
    "relu": "relu",
    "geglu": "none",
    "swiglu": "silu",
}
# Those of only one half of the columns, which multiplies the other half (Shazeer 2020).
GATED = ("geglu", "swiglu")


class Packed(NamedTuple):
    """Sequences without padding: ``values`` (T, ...), and where they came from.

    ``indices`` int64 (T,): row of each token in the flattened padded batch; ``cu_seqlens`` int32
    (B+1,): cumulative lengths as in ``flash_attn_varlen_func``; ``max_seqlen``: the longest length;
    ``batch`` and ``length``: B and L of the padded batch.
    """

    values: Tensor
    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    batch: int
    length: int


# Dropout


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """The four 32-bit words of Philox4x32-7 (Salmon et al. 2011) as int64 tensors.

    ``seed`` int64 (1,) is the key, low word first; the counters are int64 and broadcast.
    """
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(PHILOX_ROUNDS):
        # The product wraps to its low 64 bits; the mask after >> undoes the sign extension.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32 & WORD) ^ c1 ^ key0, (product0 >> 32 & WORD) ^ c3 ^ key1
        c1, c3 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def dropout_keep(seed: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """The bool mask of kept elements for ``shape`` = (rows, columns) or (B, H, Lq, Lk).

    Element (c3, c2, c1, j) takes word j % 4 of the counter (j // 4, c1, c2, c3), so the mask of an
    element depends on its coordinates alone, not on the layout, the tile or the batch around it.
    """
    full = (1,) * (4 - len(shape)) + tuple(shape)
    sizes = (*full[:3], -(-full[3] // 4))
    c3, c2, c1, c0 = (
        torch.arange(size, device=seed.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    )
    words = torch.stack(philox(seed, c0, c1, c2, c3), dim=-1).flatten(-2)[..., : full[3]]
    return (words >> 8 >= int(p * 2**24 + 0.5)).view(shape)


def dropout(x: Tensor, p: float, seed: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """``x`` with the elements that ``dropout_keep`` drops at 0 and the others scaled by 1 / (1 -
    p).
    """
    if p == 0.0:
        return x
    if seed is None:
        raise ValueError(
            f"dropout_seed: got None with dropout_p={p}, allowed: an int64 tensor (1,)"
        )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return (x * scale).masked_fill(~dropout_keep(seed, p, shape).view(x.shape), 0.0)


# Attention


def visible(
    query_length: int,
    key_length: int,
    left: int,
    right: int,
    device: torch.device,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Keys inside the window and the lengths, bool and broadcastable to (B, H, Lq, Lk); None: all.

    Query i stands at key i + Lk - Lq (bottom-right alignment, per sequence where lengths are
    given); -1 leaves that side of the window open. Queries beyond their length may see keys: nobody
    reads those rows.
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


def existing_queries(lengths: Tensor, max_seqlen: int) -> Tensor:
    """Which rows of (B, H, Lq, Lk) belong to a token: bool (B, 1, Lq, 1)."""
    query = torch.arange(max_seqlen, device=lengths.device)
    return (query < lengths[:, None])[:, None, :, None]


def softmax_weights(
    q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """Softmax of q kᵀ scale + bias over the allowed keys; rows that may attend nothing are exactly
    0.
    """
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if allowed is None and bias is None:
        return torch.softmax(scores, dim=-1)
    # Zeroing before the softmax, not only after it, keeps NaN out of the gradient as well.
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def hide_unattended(x: Tensor, allowed: Tensor | None) -> Tensor:
    """Keys or values that no query may attend, set to 0: 0 · NaN would leak out of padding."""
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
    """softmax(q kᵀ scale + bias) v over the keys that may be attended (Vaswani et al. 2017,
    eq. 1).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window, causal)
    out, weights = _attend(q, k, v, mask, bias, dropout_p, dropout_seed, scale, left, right)
    return (out, weights) if return_weights else out


def sequence_positions(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """For each of ``rows`` packed rows its sequence and its position inside, int64 (T,).

    Rows beyond ``cu_seqlens[-1]`` belong to sequence B, at position 0.
    """
    row = torch.arange(rows, device=cu_seqlens.device)
    boundaries = cu_seqlens.long()
    sequence = torch.searchsorted(boundaries[1:].contiguous(), row, right=True)
    position = row - boundaries.index_select(0, sequence)
    return sequence, position.masked_fill(sequence == cu_seqlens.shape[0] - 1, 0)


def pad_rows(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed rows (T, ...) → padded (B, L, ...), with each row's slot in B·L and whether it has
    one.

    Rows beyond ``cu_seqlens[-1]`` go to a spare slot that is cut off again: they are never seen.
    """
    batch = cu_seqlens.numel() - 1
    sequence, position = sequence_positions(cu_seqlens, x.shape[0])
    used = sequence < batch
    # A row without a sequence has position 0 of sequence B: the spare slot.
    slot = sequence * max_seqlen + position
    padded = x.new_zeros(batch * max_seqlen + 1, *x.shape[1:]).index_copy(0, slot, x)[:-1]
    return padded.view(batch, max_seqlen, *x.shape[1:]), slot, used


def unpad_rows(padded: Tensor, slot: Tensor, used: Tensor) -> Tensor:
    """The inverse of ``pad_rows``: (B, L, ...) → (T, ...); rows without a slot are 0."""
    flat = torch.cat([padded.flatten(0, 1), padded.new_zeros(1, *padded.shape[2:])])
    return flat.index_select(0, torch.where(used, slot, flat.shape[0] - 1))


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
    """``attention`` of each sequence with itself alone: padded, attended, packed again."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = _window(window, causal)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    lengths = (cu_seqlens_q.diff(), cu_seqlens_k.diff())
    if max_seqlen_q is None:
        max_seqlen_q = int(lengths[0].max()) if lengths[0].numel() else 0
    if max_seqlen_k is None:
        max_seqlen_k = int(lengths[1].max()) if lengths[1].numel() else 0
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
    return_weights: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` of q, k, v in one tensor: (B, L, 3, H, D) → (B, L, H, D), or packed,
    (T, 3, H, D) → (T, H, D).
    """
    q, k, v = qkv.unbind(-3)
    if cu_seqlens is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, weights = attention(q, k, v, return_weights=True, **options)
        out = out.transpose(1, 2)
    else:
        out, weights = attention_varlen(
            q, k, v, cu_seqlens, None, max_seqlen, max_seqlen, return_weights=True, **options
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
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """The softmax weights of ``attention`` or ``attention_varlen``, for chosen heads and rows; the
    log-sum-exp is found again, so that ``lse`` is not looked at.
    """
    options["return_weights"] = True
    if cu_seqlens_q is None:
        _, weights = attention(q, k, k, **options)
    else:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        _, weights = attention_varlen(q, k, k, *lengths, **options)
    return choose(weights, heads, rows)


def choose(weights: Tensor, heads: Sequence[int] | None, rows: Sequence[int] | None) -> Tensor:
    """Some heads and rows of (B, H, Lq, Lk)."""
    weights = weights if heads is None else weights[:, list(heads)]
    return weights if rows is None else weights[:, :, list(rows)]


# Norms, feed-forward, embedding


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """LN(residual + dropout(x + x_bias)) over the last dimension (Ba et al. 2016)."""
    columns = x.shape[-1]
    if x_bias is not None:
        x = x + x_bias
    x = dropout(x, dropout_p, dropout_seed, (x.numel() // max(columns, 1), columns))
    if residual is not None:
        x = residual + x
    # Two passes in at least fp32, as every kernel: torch's one-pass form is NaN for rows of 1e30.
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = total - total.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (centred * rstd * weight + bias).to(x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """weight · s / sqrt(mean(s²) + eps), s = x + residual, over the last dimension (Zhang and
    Sennrich 2019, eq. 4).
    """
    if residual is not None:
        x = x + residual
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * rstd * weight).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """x (T, N, D) with the first ``heads`` heads turned: element i of the first half of a head and
    of the second are a pair, cos and sin (T, D / 2) those of its angle (Su et al. 2021, eq. 34).
    """
    dtype = torch.promote_types(x.dtype, cos.dtype)
    cos, sin = (part.to(dtype).unsqueeze(1) for part in (cos, sin))
    first, second = x[:, :heads].to(dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), x[:, heads:]], 1)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x) (Hendrycks and Gimpel 2016), its tanh form, or for ``approximate="relu"`` or
    ``"silu"`` ReLU or SiLU.
    """
    others = {"relu": F.relu, "silu": F.silu}
    return others[approximate](x) if approximate in others else F.gelu(x, approximate=approximate)


def activate(h: Tensor, activation: str) -> Tensor:
    """What a feed-forward does between its products; gated, it halves the columns (..., 2N)."""
    if activation not in GATED:
        return gelu(h, ACTIVATIONS[activation])
    gate, linear = h.chunk(2, dim=-1)
    return gelu(gate, ACTIVATIONS[activation]) * linear


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, return_residual: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x Wᵀ + b, and on request x again."""
    y = F.linear(x, weight, bias)
    return (y, x) if return_residual else y


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K) as integers of 8 bits: q (M, K) in [0, 255], scale and zero (M, 1), all fp32, with
    x ≈ (q − zero) · scale.

    [low, high] spans a row and 0; scale = (high − low) / 255, zero = rint(−low / scale), q =
    clip(rint(x / scale) + zero). Rows whose scale is below 2⁻¹²⁰ count as 0; rows that are not
    finite have q = 0 and the scale NaN.
    """
    x = x.float()
    low, high = x.amin(1, keepdim=True).clamp(max=0.0), x.amax(1, keepdim=True).clamp(min=0.0)
    scale = high / 255.0 - low / 255.0
    finite = x.isfinite().all(1, keepdim=True)
    counts = finite & (scale >= 2.0**-120)
    inverse = torch.where(counts, 1.0 / scale, 0.0)
    zero = torch.where(counts, (-low * inverse).round(), 0.0)
    q = torch.where(counts, ((x * inverse).round() + zero).clamp(0.0, 255.0), 0.0)
    return q, torch.where(counts, scale, torch.where(finite, 0.0, torch.nan)), zero


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (N, K) ≈ values · scale: values int8 (N, K) in [-127, 127], symmetric, and fp32 scale
    (N,), one for each row."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / 127.0
    inverse = torch.where(scale >= 2.0**-120, 1.0 / scale, 0.0)
    values = (weight * inverse.unsqueeze(1)).round().clamp(-127.0, 127.0)
    return values.to(torch.int8), torch.where(scale >= 2.0**-120, scale, 0.0)


def int8_linear(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """activation((q − zero) valuesᵀ · scales + b) + residual, x (M, K), values int8 (N, K), scale
    (N,); in fp32 but for the integers, whose sums are exact."""
    q, row_scale, zero = int8_rows(x)
    y = ((q - zero).double() @ values.double().t()).float() * (row_scale * scale)
    y = y if bias is None else y + bias.float()
    y = y if activation == "none" else activate(y, activation)
    return y if residual is None else y + residual.float()


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none"
) -> Tensor:
    """gelu(x Wᵀ + b)."""
    return gelu(F.linear(x, weight, bias), approximate)


def feed_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    recompute: bool = False,
    return_residual: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """gelu(x W1ᵀ + b1) W2ᵀ + b2 (Vaswani et al. 2017, eq. 2, with GELU for ReLU).

    "geglu" and "swiglu" take w1 (2N, K), the gate first (Shazeer 2020). ``recompute``, which is
    about memory alone, changes nothing here.
    """
    y = F.linear(activate(F.linear(x, w1, b1), activation), w2, b2)
    return (y, x) if return_residual else y


def embedding(
    ids: Tensor,
    token_types: Tensor,
    positions: Tensor,
    word_table: Tensor,
    type_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """dropout(LN(word + type + position)) (Devlin et al. 2019, figure 2)."""
    total = (
        F.embedding(ids, word_table, padding_idx)
        + F.embedding(token_types, type_table)
        + F.embedding(positions, position_table)
    )
    y = layer_norm(total, weight, bias, eps=eps)
    return dropout(y, dropout_p, dropout_seed, (ids.numel(), y.shape[-1]))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of hidden Wᵀ + b against labels; the mean over no label at all is 0,
    not NaN.
    """
    rows = (labels != ignore_index).nonzero().flatten()
    logits = F.linear(hidden[rows], weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, labels[rows].long(), reduction="none")
    if reduction == "none":
        return losses.new_zeros(labels.shape).index_copy(0, rows, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / max(rows.numel(), 1)


# The layers of a BERT encoder


def encoder(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    *,
    batch: int,
    heads: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-12,
    activation: str = "gelu",
    dtype: torch.dtype | None = None,
    all_states: bool = False,
) -> list[Tensor]:
    """hidden (T, H) through one layer for every twelve parameters (Devlin et al. 2019)."""
    dtype = hidden.dtype if dtype is None else dtype
    rows = (-1,) if cu_seqlens is not None else (batch, max_seqlen)
    states = []
    for first in range(0, len(parameters), 12):
        wqkv, bqkv, wo, bo, *norm1, w1, b1, w2, b2 = parameters[first : first + 10]
        norm2 = parameters[first + 10 : first + 12]
        qkv = F.linear(hidden.to(dtype), wqkv.to(dtype), bqkv.to(dtype))
        qkv = qkv.view(*rows, 3, heads, hidden.shape[1] // heads)
        x: Any = attention_qkvpacked(qkv, cu_seqlens, max_seqlen, mask=mask, bias=bias)
        x = F.linear(x.reshape(hidden.shape), wo.to(dtype), bo.to(dtype))
        hidden = layer_norm(x.to(hidden.dtype), *norm1, residual=hidden, eps=eps)
        inner = (p.to(dtype) for p in (w1, b1, w2, b2))
        x = feed_forward(hidden.to(dtype), *inner, activation=activation)
        hidden = layer_norm(x.to(hidden.dtype), *norm2, residual=hidden, eps=eps)
        states.append(hidden)
    return states if all_states else states[-1:]


# Padding


def unpad(x: Tensor, mask: Tensor) -> Packed:
    """(B, L, ...) and mask (B, L), True or nonzero = keep → ``Packed`` rows in batch order."""
    keep = mask.bool()
    lengths = keep.sum(dim=1, dtype=torch.int32)
    indices = keep.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    values = x.flatten(0, 1).index_select(0, indices)
    return Packed(values, indices, cu_seqlens, longest, mask.shape[0], mask.shape[1])


def pad(packed: Packed) -> Tensor:
    """``Packed`` → (B, L, ...), 0 at the positions that were dropped."""
    rows = packed.batch * packed.length
    flat = packed.values.new_zeros(rows, *packed.values.shape[1:])
    flat = flat.index_copy(0, packed.indices, packed.values)
    return flat.view(packed.batch, packed.length, *packed.values.shape[1:])
