"""The backends of attention: rows of the table, and the same for the weights alone.

All take the operators' arguments. q, k, v and the gradients are (B, H, L, D), or packed (T, H, D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form


def out_like(q: Tensor) -> Tensor:
    """An empty (B, H, L, D) laid out as (B, L, H, D), so that merging heads is free; varlen as it
    is.
    """
    if q.dim() == 3:
        return q.new_empty(q.shape)
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def padded(tensors, cu_seqlens, max_seqlen):
    """(T, H, D) tensors as (B, H, L, D), and how to pack such a tensor again."""
    rows = [reference.pad_rows(x, cu_seqlens, max_seqlen) for x in tensors]
    _, slot, used = rows[0]

    def pack(x: Tensor) -> Tensor:
        return reference.unpad_rows(x.transpose(1, 2), slot, used)

    return [x.transpose(1, 2) for x, _, _ in rows], pack


def _reference_forward(q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right):
    options = (seed, p, scale, left, right)
    lse = q.new_empty(0, dtype=torch.float32)
    if cu_q is None:
        out = closed_form.attention_forward(q, k, v, mask, bias, None, *options)
        return out_like(q).copy_(out), lse
    (q,), pack = padded([q], cu_q, max_q)
    (k, v), _ = padded([k, v], cu_k, max_k)
    lengths = (cu_q.diff(), cu_k.diff())
    return pack(closed_form.attention_forward(q, k, v, mask, bias, lengths, *options)), lse


def _reference_backward(
    gradients, dout, q, k, v, out, lse, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left,
    right,
):  # fmt: skip
    lengths = None
    if cu_q is not None:
        (q, dout), pack_q = padded([q, dout], cu_q, max_q)
        (k, v), pack_k = padded([k, v], cu_k, max_k)
        lengths = (cu_q.diff(), cu_k.diff())
    dq, dk, dv, dbias = closed_form.attention_backward(
        dout, q, k, v, mask, bias, lengths, seed, p, scale, left, right
    )
    if cu_q is not None:
        dq, dk, dv = pack_q(dq), pack_k(dk), pack_k(dv)
    for place, gradient in zip(gradients, (dq, dk, dv, dbias), strict=True):
        if place is not None:
            place.copy_(gradient)


def _reference_weights(
    q, k, lse, mask, bias, cu_q, cu_k, max_q, max_k, heads, rows, scale, left, right
):
    lengths = None
    if cu_q is not None:
        (q,), _ = padded([q], cu_q, max_q)
        (k,), _ = padded([k], cu_k, max_k)
        lengths = (cu_q.diff(), cu_k.diff())
    allowed = reference.visible(max_q, max_k, left, right, q.device, lengths)
    if mask is not None:
        allowed = mask if allowed is None else allowed & mask
    k = reference.hide_unattended(k, allowed)
    weights = reference.softmax_weights(q, k, allowed, bias, scale)
    if lengths is not None:
        weights = weights.masked_fill(~reference.existing_queries(lengths[0], max_q), 0.0)
    return reference.choose(weights, heads, rows).contiguous()


def _expand(x: Tensor | None, q: Tensor, max_q: int, max_k: int, cu_q: Tensor | None):
    """A canonical mask or bias as the 4-D view with zero strides that the kernels index."""
    if x is None:
        return None
    batch, heads = (q.shape[0], q.shape[1]) if cu_q is None else (cu_q.numel() - 1, q.shape[1])
    return x.expand(batch, heads, max_q, max_k)


def _triton_options(q, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right):
    return {
        "mask": _expand(mask, q, max_q, max_k, cu_q),
        "bias": _expand(bias, q, max_q, max_k, cu_q),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "seed": seed,
        "dropout_p": p,
        "scale": scale,
        "window": (left, right),
    }


def _triton_forward(q, k, v, *options):
    from fastbert.kernels.attention import attention_forward

    return attention_forward(q, k, v, **_triton_options(q, *options))


def _triton_backward(gradients, dout, q, k, v, out, lse, *options):
    from fastbert.kernels.attention import attention_backward

    *into, dbias = gradients
    attention_backward(
        dout, q, k, v, out, lse, into=into, dbias=dbias, **_triton_options(q, *options)
    )


def _triton_weights(
    q, k, lse, mask, bias, cu_q, cu_k, max_q, max_k, heads, rows, scale, left, right
):
    from fastbert.kernels.attention_weights import attention_weights

    heads, rows = (
        None if x is None else torch.tensor(x, dtype=torch.int64, device=q.device)
        for x in (heads, rows)
    )
    options = _triton_options(
        q, mask, bias, cu_q, cu_k, None, max_q, max_k, 0.0, scale, left, right
    )
    return attention_weights(q, k, lse, heads=heads, rows=rows, **options)


def _cpu_forward(q, k, v, *options):
    return torch.ops.fastbert_C.attention_forward(q, k, v, *options)


def _cpu_backward(gradients, dout, q, k, v, out, lse, *options):
    # It finds the statistics of each row anew, which out and lse know to one rounding only.
    torch.ops.fastbert_C.attention_backward(*gradients, dout, q, k, v, *options)


def _cpu_weights(q, k, lse, *options):
    return torch.ops.fastbert_C.attention_weights(q, k, *options)


# The backward fills the tensors (dq, dk, dv, dbias or None) that it is given first.
backends.TABLES["attention"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cpu": backends.Implementation(_cpu_forward, _cpu_backward),
}
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "reference": _reference_weights,
    "triton": _triton_weights,
    "cpu": _cpu_weights,
}
