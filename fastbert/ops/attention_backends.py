"""The implementations of attention and of its softmax weights, in tables by backend.

q, k, v and their gradients have the shape (B, H, L, D), or (T, H, D) for packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.attention_arguments import AttentionOptions


def out_like(q: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape of `q`, in which merging heads needs no copy.

    A dense result (B, H, L, D) is stored in memory in the order of (B, L, H, D). A packed result
    (T, H, D) is contiguous.
    """
    if q.dim() == 3:
        return q.new_empty(q.shape)
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def padded(
    tensors: Sequence[Tensor], cu_seqlens: Tensor | None, max_seqlen: int
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Return packed tensors (T, H, D) as padded tensors (B, H, L, D).

    Also return a function that packs a tensor (B, H, L, D) again, with the number of rows of the
    first of the `tensors`.
    """
    assert cu_seqlens is not None
    rows = [reference.pad_rows(x, cu_seqlens, max_seqlen) for x in tensors]
    _, slot, used = rows[0]

    def pack(x: Tensor) -> Tensor:
        return reference.unpad_rows(x.transpose(1, 2), slot, used)

    return [x.transpose(1, 2) for x, _, _ in rows], pack


def _lengths(o: AttentionOptions) -> tuple[Tensor, Tensor] | None:
    """Return the lengths of the packed query and key sequences, or None for dense tensors."""
    if o.cu_seqlens_q is None or o.cu_seqlens_k is None:
        return None
    return o.cu_seqlens_q.diff(), o.cu_seqlens_k.diff()


def _reference_forward(
    q: Tensor, k: Tensor, v: Tensor, o: AttentionOptions
) -> tuple[Tensor, Tensor]:
    lengths, lse = _lengths(o), q.new_empty(0, dtype=torch.float32)
    numbers = (o.seed, o.dropout_p, o.scale, o.left, o.right)
    if lengths is None:
        out = closed_form.attention_forward(q, k, v, o.mask, o.bias, None, *numbers)
        return out_like(q).copy_(out), lse
    (q,), pack = padded([q], o.cu_seqlens_q, o.max_seqlen_q)
    (k, v), _ = padded([k, v], o.cu_seqlens_k, o.max_seqlen_k)
    return pack(closed_form.attention_forward(q, k, v, o.mask, o.bias, lengths, *numbers)), lse


def _reference_backward(
    into: Sequence[Tensor | None],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: AttentionOptions,
) -> None:
    lengths = _lengths(o)
    if lengths is not None:
        (q, dout), pack_q = padded([q, dout], o.cu_seqlens_q, o.max_seqlen_q)
        (k, v), pack_k = padded([k, v], o.cu_seqlens_k, o.max_seqlen_k)
    dq, dk, dv, dbias = closed_form.attention_backward(
        dout, q, k, v, o.mask, o.bias, lengths, o.seed, o.dropout_p, o.scale, o.left, o.right
    )
    if lengths is not None:
        dq, dk, dv = pack_q(dq), pack_k(dk), pack_k(dv)
    for place, gradient in zip(into, (dq, dk, dv, dbias), strict=True):
        if place is not None:
            place.copy_(gradient)


def _reference_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    o: AttentionOptions,
    heads: list[int] | None,
    rows: list[int] | None,
) -> Tensor:
    lengths = _lengths(o)
    if lengths is not None:
        (q,), _ = padded([q], o.cu_seqlens_q, o.max_seqlen_q)
        (k,), _ = padded([k], o.cu_seqlens_k, o.max_seqlen_k)
    allowed = reference.visible(o.max_seqlen_q, o.max_seqlen_k, o.left, o.right, q.device, lengths)
    if o.mask is not None:
        allowed = o.mask if allowed is None else allowed & o.mask
    k = reference.hide_unattended(k, allowed)
    weights = reference.softmax_weights(q, k, allowed, o.bias, o.scale)
    if lengths is not None:
        exists = reference.existing_queries(lengths[0], o.max_seqlen_q)
        weights = weights.masked_fill(~exists, 0.0)
    return reference.choose(weights, heads, rows).contiguous()


def _triton_options(q: Tensor, o: AttentionOptions) -> dict[str, Any]:
    batch = q.shape[0] if o.cu_seqlens_q is None else o.cu_seqlens_q.numel() - 1
    shape = (batch, q.shape[1], o.max_seqlen_q, o.max_seqlen_k)
    return {
        # The kernels take views of the full shape, with stride 0 where a dimension is broadcast.
        "mask": None if o.mask is None else o.mask.expand(shape),
        "bias": None if o.bias is None else o.bias.expand(shape),
        "cu_seqlens_q": o.cu_seqlens_q,
        "cu_seqlens_k": o.cu_seqlens_k,
        "max_seqlen_q": o.max_seqlen_q,
        "max_seqlen_k": o.max_seqlen_k,
        "seed": o.seed,
        "dropout_p": o.dropout_p,
        "scale": o.scale,
        "window": (o.left, o.right),
    }


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, o: AttentionOptions) -> tuple[Tensor, Tensor]:
    from fastbert.kernels.attention import attention_forward

    return attention_forward(q, k, v, **_triton_options(q, o))


def _triton_backward(
    into: Sequence[Tensor | None],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: AttentionOptions,
) -> None:
    from fastbert.kernels.attention import attention_backward

    *into_qkv, dbias = into
    options = _triton_options(q, o)
    attention_backward(dout, q, k, v, out, lse, into=into_qkv, dbias=dbias, **options)


def _triton_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    o: AttentionOptions,
    heads: list[int] | None,
    rows: list[int] | None,
) -> Tensor:
    from fastbert.kernels.attention_weights import attention_weights

    chosen_heads, chosen_rows = (
        None if x is None else torch.tensor(x, dtype=torch.int64, device=q.device)
        for x in (heads, rows)
    )
    options = _triton_options(q, o)
    return attention_weights(q, k, lse, heads=chosen_heads, rows=chosen_rows, **options)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, o: AttentionOptions) -> tuple[Tensor, Tensor]:
    return torch.ops.fastbert_C.attention_forward(q, k, v, *o)


def _cpu_backward(
    into: Sequence[Tensor | None],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: AttentionOptions,
) -> None:
    # The kernel computes the softmax statistics of each row again, because the out and lse of the
    # forward are rounded.
    torch.ops.fastbert_C.attention_backward(*into, dout, q, k, v, *o)


def _cpu_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    o: AttentionOptions,
    heads: list[int] | None,
    rows: list[int] | None,
) -> Tensor:
    return torch.ops.fastbert_C.attention_weights(
        q, k, o.mask, o.bias, o.cu_seqlens_q, o.cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k,
        heads, rows, o.scale, o.left, o.right,
    )  # fmt: skip


CUDA_HEAD_DIMS = (32, 64, 128)


def _cuda_options(o: AttentionOptions) -> tuple[Any, ...]:
    return (
        o.mask, o.cu_seqlens_q, o.cu_seqlens_k, o.seed, o.max_seqlen_q, o.max_seqlen_k,
        o.dropout_p, o.scale,
    )  # fmt: skip


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, o: AttentionOptions) -> tuple[Tensor, Tensor]:
    return torch.ops.fastbert_C.flash_attention_forward(q, k, v, *_cuda_options(o))


def _cuda_backward(
    into: Sequence[Tensor | None],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    o: AttentionOptions,
) -> None:
    dq, dk, dv, _ = into
    torch.ops.fastbert_C.flash_attention_backward(
        dq, dk, dv, dout, q, k, v, out, lse, *_cuda_options(o)
    )


def _cuda_refuses(request: backends.Request) -> str | None:
    if request.options:
        return f"the CUDA kernels do not serve {', '.join(request.options)}"
    if request.head_dim not in CUDA_HEAD_DIMS:
        return f"the head dim is {request.head_dim}, allowed: {', '.join(map(str, CUDA_HEAD_DIMS))}"
    return None


# The first argument of a backward is a list of the tensors that the backward fills: dq, dk, dv and
# dbias. dbias is None if the gradient of the bias is not wanted.
backends.TABLES["attention"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cuda": backends.Implementation(
        _cuda_forward, _cuda_backward, (torch.float16, torch.bfloat16), _cuda_refuses, True
    ),
    "cpu": backends.Implementation(_cpu_forward, _cpu_backward),
}
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "reference": _reference_weights,
    "triton": _triton_weights,
    "cpu": _cpu_weights,
}
