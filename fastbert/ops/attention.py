"""Scaled dot-product attention, dense and varlen: public functions, operators, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import autocast
from fastbert.ops.attention_arguments import (
    Options,
    check_dense,
    check_lse,
    check_qkv,
    check_varlen,
    chosen,
    longest,
)
from fastbert.ops.attention_backends import WEIGHTS, out_like, padded
from fastbert.ops.register import differentiable, once_differentiable, operator

# Public functions


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
    deterministic: bool | None = None,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ scale + bias) v over the keys that may be attended (Vaswani et al. 2017, eq. 1).

    q (B, H, Lq, D); k, v (B, H, Lk, D), of one floating dtype and any strides. mask bool, True =
    attend: (B, Lk) or broadcastable to (B, H, Lq, Lk). bias floating, additive, 4-D and
    broadcastable likewise. scale defaults to D ** -0.5. Query i stands at key i + Lk - Lq; causal
    hides the keys behind it, and window = (left, right) or one number for both hides those further
    away, -1 leaving a side open. dropout_p drops weights, by dropout_seed (int64, (1,)) or a seed
    drawn from torch's generator. deterministic: every backend is, so True, False and None are the
    same today.

    Returns (B, H, Lq, D) in q's dtype, laid out as (B, Lq, H, D); with return_weights also the
    softmax weights before dropout, (B, H, Lq, Lk). A row that may attend nothing is exactly 0, and
    so are its gradients; what stands in keys and values nobody attends is never seen, NaN included.

    Raises ValueError or TypeError naming the argument; ValueError when ``backend`` cannot serve.
    """
    q, k, v = autocast(q, k, v)
    check_dense(q, k, v)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    options = Options(q, mask, bias, shape, dropout_p, scale, causal, window, dropout_seed, backend)
    out, lse = _attention(q, k, v, *options.tensors(None, None), *options.numbers(*shape[2:]))
    return (out, _weights(options, q, k, lse)) if return_weights else out


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
    deterministic: bool | None = None,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` inside each sequence of a packed batch, as ``flash_attn_varlen_func``.

    q (Tq, H, D); k, v (Tk, H, D); cu_seqlens int32 (B+1,), cumulative lengths from 0; those of k
    default to those of q. max_seqlen: the longest length or more; found by a synchronisation when
    None. mask and bias are indexed by positions inside the sequences, broadcastable to (B, H,
    max_seqlen_q, max_seqlen_k). Rows beyond cu_seqlens[-1] are not read; their output is 0.

    Returns (Tq, H, D), with return_weights also (B, H, max_seqlen_q, max_seqlen_k), 0 at padding.
    Other arguments and errors as in ``attention``.
    """
    q, k, v = autocast(q, k, v)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_q, max_k)
    options = Options(q, mask, bias, shape, dropout_p, scale, causal, window, dropout_seed, backend)
    out, lse = _attention(
        q, k, v, *options.tensors(cu_seqlens_q, cu_seqlens_k), *options.numbers(max_q, max_k)
    )
    if not return_weights:
        return out
    return out, _weights(options, q, k, lse, cu_seqlens_q, cu_seqlens_k)


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
    deterministic: bool | None = None,
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention on the output of one fused projection, as ``flash_attn_qkvpacked_func``.

    qkv (B, L, 3, H, D); or (T, 3, H, D), packed sequences, with cu_seqlens int32 (B+1,) and
    max_seqlen as in ``attention_varlen``. q, k and v are read where they lie, and the backward
    writes their three gradients into one tensor like qkv, so that nothing is split or joined.

    Returns (B, L, H, D) or (T, H, D), contiguous; with return_weights also (B, H, L, L). Other
    arguments and errors as in ``attention``.
    """
    (qkv,) = autocast(qkv)
    check_qkv(qkv, cu_seqlens)
    heads = qkv.shape[-2]
    if cu_seqlens is None:
        batch, length = qkv.shape[:2]
    else:
        batch = cu_seqlens.shape[0] - 1
        length = longest(cu_seqlens) if max_seqlen is None else max_seqlen
    options = Options(
        qkv, mask, bias, (batch, heads, length, length), dropout_p, scale, causal, window,
        dropout_seed, backend,
    )  # fmt: skip
    out, lse = _attention_qkvpacked(qkv, *options.tensors(cu_seqlens), *options.numbers(length))
    if not return_weights:
        return out
    q, k, _ = _unpacked(qkv, cu_seqlens)
    return out, _weights(options, q, k, lse, cu_seqlens, cu_seqlens)


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
    backend: str | None = None,
) -> Tensor:
    """The softmax weights of ``attention`` by themselves, for chosen heads and query rows.

    q (B, H, Lq, D), k (B, H, Lk, D); or packed (Tq, H, D), (Tk, H, D) with cu_seqlens, max_seqlen
    as in ``attention_varlen``. heads and rows: numbers of heads, and positions of queries in their
    sequences; None: all, in order. lse fp32 (B, H, Lq) or (H, Tq), the natural log-sum-exp of the
    logits, spares a 16-bit kernel without a bias the pass that finds it; without one it is found.

    Returns (B, heads, rows, Lk) in q's dtype, before dropout; 0 in rows and keys beyond a packed
    sequence. Differentiable in q, k and bias. Other arguments and errors as in ``attention``.
    """
    q, k = autocast(q, k)
    if cu_seqlens_q is None:
        check_dense(q, k, k)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
        max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
        check_varlen(q, k, k, cu_seqlens_q, cu_seqlens_k)
        shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_q, max_k)
    check_lse(lse, q)
    heads, rows = chosen("heads", heads, shape[1]), chosen("rows", rows, shape[2])
    options = Options(q, mask, bias, shape, 0.0, scale, causal, window, None, backend)
    return _weights(options, q, k, lse, cu_seqlens_q, cu_seqlens_k, heads, rows)


def _weights(options, q, k, lse, cu_seqlens_q=None, cu_seqlens_k=None, heads=None, rows=None):
    return _attention_weights(
        q, k, lse, options.mask, options.bias, cu_seqlens_q, cu_seqlens_k, *options.shape[2:],
        heads, rows, options.scale, options.left, options.right, options.backend,
    )  # fmt: skip


# The operator


def _table(backend: str) -> backends.Implementation:
    return backends.TABLES["attention"][backend]


def _forward(q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right, backend):
    return _table(backend).forward(
        q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right
    )


def _fake(q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right, backend):
    if backend == "reference":
        return out_like(q), q.new_empty(0, dtype=torch.float32)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return out_like(q), q.new_empty(shape, dtype=torch.float32)


def _backward(dout, q, k, v, out, lse, has_dbias, mask, bias, *rest):
    *options, backend = rest
    gradients = _backward_fake(dout, q, k, v, out, lse, has_dbias, mask, bias)
    *into, dbias = gradients
    into.append(dbias if has_dbias else None)
    _table(backend).backward(into, dout, q, k, v, out, lse, mask, bias, *options)
    return gradients


def _backward_fake(dout, q, k, v, out, lse, has_dbias, mask, bias, *rest):
    return out_like(q), out_like(k), out_like(v), _dbias_like(q, bias, has_dbias)


def _dbias_like(q: Tensor, bias: Tensor | None, has_dbias: bool) -> Tensor:
    """An empty gradient of bias; without elements where nobody asked for one."""
    return bias.new_empty(bias.shape) if bias is not None and has_dbias else q.new_empty(0)


_OPTIONS = (
    "Tensor? mask, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float scale, int left, int right, "
    "str backend"
)
_attention = operator(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake
)
_attention_backward = operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"bool has_dbias, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.numbers = inputs[8:]
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, has_dbias = ctx.saved_tensors, ctx.needs_input_grad[4]
    dq, dk, dv, dbias = _attention_backward(dout, *saved[:5], has_dbias, *saved[5:], *ctx.numbers)
    return dq, dk, dv, None, dbias if has_dbias else None, *[None] * 10


differentiable("attention", _gradient, _setup_context)
once_differentiable("attention_backward")


# The operator on one tensor


def _unpacked(qkv: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of qkv (B, L, 3, H, D) or (T, 3, H, D) as the operator above takes q, k and v."""
    q, k, v = qkv.unbind(-3)
    if cu_seqlens is None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _qkvpacked_forward(qkv, mask, bias, cu_seqlens, seed, longest, *numbers_and_backend):
    *numbers, backend = numbers_and_backend
    out, lse = _table(backend).forward(
        *_unpacked(qkv, cu_seqlens), mask, bias, cu_seqlens, cu_seqlens, seed, longest, longest,
        *numbers,
    )  # fmt: skip
    return (out.transpose(1, 2) if cu_seqlens is None else out), lse


def _qkvpacked_fake(qkv, mask, bias, cu_seqlens, seed, longest, *numbers_and_backend):
    q, k, v = _unpacked(qkv, cu_seqlens)
    out, lse = _fake(
        q, k, v, mask, bias, cu_seqlens, cu_seqlens, seed, longest, longest, *numbers_and_backend
    )
    return (out.transpose(1, 2) if cu_seqlens is None else out), lse


def _qkvpacked_backward(
    dout, qkv, out, lse, has_dbias, mask, bias, cu_seqlens, seed, longest, *numbers_and_backend
):
    *numbers, backend = numbers_and_backend
    dqkv, dbias = _qkvpacked_backward_fake(dout, qkv, out, lse, has_dbias, mask, bias)
    if cu_seqlens is None:
        dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    _table(backend).backward(
        [*_unpacked(dqkv, cu_seqlens), dbias if has_dbias else None],
        dout, *_unpacked(qkv, cu_seqlens), out, lse, mask, bias, cu_seqlens, cu_seqlens, seed,
        longest, longest, *numbers,
    )  # fmt: skip
    return dqkv, dbias


def _qkvpacked_backward_fake(dout, qkv, out, lse, has_dbias, mask, bias, *rest):
    return qkv.new_empty(qkv.shape), _dbias_like(qkv, bias, has_dbias)


_QKVPACKED_OPTIONS = (
    "Tensor? mask, Tensor? bias, Tensor? cu_seqlens, Tensor? seed, SymInt max_seqlen, "
    "float dropout_p, float scale, int left, int right, str backend"
)
_attention_qkvpacked = operator(
    f"attention_qkvpacked(Tensor qkv, {_QKVPACKED_OPTIONS}) -> (Tensor, Tensor)",
    _qkvpacked_forward,
    _qkvpacked_fake,
)
_attention_qkvpacked_backward = operator(
    "attention_qkvpacked_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, "
    f"bool has_dbias, {_QKVPACKED_OPTIONS}) -> (Tensor, Tensor)",
    _qkvpacked_backward,
    _qkvpacked_backward_fake,
)


def _qkvpacked_setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(inputs[0], *output, *inputs[1:5])
    ctx.numbers = inputs[5:]
    ctx.mark_non_differentiable(output[1])


def _qkvpacked_gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, has_dbias = ctx.saved_tensors, ctx.needs_input_grad[2]
    dqkv, dbias = _attention_qkvpacked_backward(
        dout, *saved[:3], has_dbias, *saved[3:], *ctx.numbers
    )
    return dqkv, None, dbias if has_dbias else None, *[None] * 8


differentiable("attention_qkvpacked", _qkvpacked_gradient, _qkvpacked_setup_context)
once_differentiable("attention_qkvpacked_backward")


# The weights by themselves


def _weights_forward(*arguments_and_backend):
    *arguments, backend = arguments_and_backend
    return WEIGHTS[backend](*arguments)


def _weights_fake(q, k, lse, mask, bias, cu_q, cu_k, max_q, max_k, heads, rows, *rest):
    batch, all_heads = (q.shape[0] if cu_q is None else cu_q.shape[0] - 1), q.shape[1]
    return q.new_empty(
        batch,
        all_heads if heads is None else len(heads),
        max_q if rows is None else len(rows),
        max_k,
    )


_attention_weights = operator(
    "attention_weights(Tensor q, Tensor k, Tensor? lse, Tensor? mask, Tensor? bias, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "int[]? heads, int[]? rows, float scale, int left, int right, str backend) -> Tensor",
    _weights_forward,
    _weights_fake,
)


def _weights_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, _, _, bias, cu_q, cu_k, ctx.max_q, ctx.max_k, ctx.heads, ctx.rows, ctx.scale = inputs[:12]
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(q, k, cu_q, cu_k, output)


def _weights_gradient(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
    q, k, cu_q, cu_k, weights = ctx.saved_tensors
    dscores = closed_form.softmax_backward(dweights, weights)
    if ctx.heads is not None or ctx.rows is not None:
        dscores = _spread(dscores, q.shape[1], ctx.max_q, ctx.heads, ctx.rows)
    dbias = closed_form.sum_to(dscores, ctx.bias_shape) if ctx.needs_input_grad[4] else None
    if cu_q is not None:
        (q,), pack_q = padded([q], cu_q, ctx.max_q)
        (k,), pack_k = padded([k], cu_k, ctx.max_k)
    # What nobody attends, and what attends nothing, may be NaN, and 0 · NaN would be NaN.
    idle = dscores == 0.0
    q, k = (x.masked_fill(idle.all(dim).unsqueeze(-1), 0.0) for x, dim in ((q, -1), (k, -2)))
    dq, dk = dscores @ k * ctx.scale, dscores.transpose(-2, -1) @ q * ctx.scale
    if cu_q is not None:
        dq, dk = pack_q(dq), pack_k(dk)
    return dq, dk, None, None, dbias, *[None] * 10


def _spread(dscores: Tensor, heads: int, length: int, chosen_heads, chosen_rows) -> Tensor:
    """The gradient of chosen heads and rows in its place among all, 0 elsewhere."""
    device, (batch, *_, keys) = dscores.device, dscores.shape
    places = (
        torch.arange(batch, device=device)[:, None, None],
        torch.arange(heads, device=device)[:, None]
        if chosen_heads is None
        else torch.tensor(chosen_heads, device=device)[:, None],
        torch.arange(length, device=device)
        if chosen_rows is None
        else torch.tensor(chosen_rows, device=device),
    )
    full = dscores.new_zeros(batch, heads, length, keys)
    return full.index_put_(places, dscores, accumulate=True)


differentiable("attention_weights", _weights_gradient, _weights_setup_context)
