"""Scaled dot-product attention, dense and varlen: public functions, operators, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import autocast, longest
from fastbert.ops.attention_arguments import (
    AttentionOptions,
    backend_for,
    check_dense,
    check_lse,
    check_qkv,
    check_varlen,
    chosen,
    options_of,
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
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ scale + bias) v over the keys that may be attended (Vaswani et al. 2017, eq. 1).

    q (B, H, Lq, D); k, v (B, H, Lk, D), of one floating dtype and any strides. mask bool, True =
    attend: (B, Lk) or broadcastable to (B, H, Lq, Lk). bias floating, additive, 4-D and
    broadcastable likewise. scale defaults to D ** -0.5. Query i stands at key i + Lk - Lq; causal
    hides the keys behind it, and window = (left, right) or one number for both hides those further
    away, -1 leaving a side open. dropout_p drops weights, by dropout_seed (int64, (1,)) or a seed
    drawn from torch's generator.

    Returns (B, H, Lq, D) in q's dtype, laid out as (B, Lq, H, D); with return_weights also the
    softmax weights before dropout, (B, H, Lq, Lk). A row that may attend nothing is exactly 0, and
    so are its gradients; what stands in keys and values nobody attends is never seen, NaN included.

    Raises ValueError or TypeError naming the argument; ValueError when ``backend`` cannot serve.
    """
    q, k, v = autocast(q, k, v)
    check_dense(q, k, v)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    options = options_of(
        q, shape, mask, bias, None, None,
        dropout_p=dropout_p, dropout_seed=dropout_seed, scale=scale, causal=causal, window=window,
    )  # fmt: skip
    served_by = backend_for(q, backend)
    out, lse = _attention(q, k, v, *options, served_by)
    return (out, _weights(q, k, lse, options, served_by)) if return_weights else out


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
    options = options_of(
        q, shape, mask, bias, cu_seqlens_q, cu_seqlens_k,
        dropout_p=dropout_p, dropout_seed=dropout_seed, scale=scale, causal=causal, window=window,
    )  # fmt: skip
    served_by = backend_for(q, backend)
    out, lse = _attention(q, k, v, *options, served_by)
    return (out, _weights(q, k, lse, options, served_by)) if return_weights else out


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
    options = options_of(
        qkv, (batch, heads, length, length), mask, bias, cu_seqlens, cu_seqlens,
        dropout_p=dropout_p, dropout_seed=dropout_seed, scale=scale, causal=causal, window=window,
    )  # fmt: skip
    served_by = backend_for(qkv, backend)
    out, lse = _attention_qkvpacked(qkv, *options, served_by)
    if not return_weights:
        return out
    q, k, _ = _unpacked(qkv, cu_seqlens)
    return out, _weights(q, k, lse, options, served_by)


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
    options = options_of(
        q, shape, mask, bias, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal, window=window
    )
    return _weights(q, k, lse, options, backend_for(q, backend), heads, rows)


def _weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    o: AttentionOptions,
    backend: str,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    return _attention_weights(
        q, k, lse, o.mask, o.bias, o.cu_seqlens_q, o.cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k,
        heads, rows, o.scale, o.left, o.right, backend,
    )  # fmt: skip


# The operator


def _row(backend: str) -> backends.Implementation:
    return backends.TABLES["attention"][backend]


def _of(a: Any) -> AttentionOptions:
    """The options among an operator's arguments."""
    return AttentionOptions(*(getattr(a, name) for name in AttentionOptions._fields))


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *numbers, backend = options
    return _row(backend).forward(q, k, v, AttentionOptions(*numbers))


def _lse_fake(q: Tensor, backend: str) -> Tensor:
    """The log-sum-exp, which the reference does not return, of q in the form of the operator."""
    if backend == "reference":
        return q.new_empty(0, dtype=torch.float32)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return q.new_empty(shape, dtype=torch.float32)


def _fake(a: Any) -> tuple[Tensor, Tensor]:
    return out_like(a.q), _lse_fake(a.q, a.backend)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    has_dbias: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    *numbers, backend = options
    o = AttentionOptions(*numbers)
    dq, dk, dv = out_like(q), out_like(k), out_like(v)
    dbias = _dbias_like(q, o.bias, has_dbias)
    into = [dq, dk, dv, dbias if has_dbias else None]
    _row(backend).backward(into, dout, q, k, v, out, lse, o)
    return dq, dk, dv, dbias


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    return out_like(a.q), out_like(a.k), out_like(a.v), _dbias_like(a.q, a.bias, a.has_dbias)


def _dbias_like(q: Tensor, bias: Tensor | None, has_dbias: bool) -> Tensor:
    """An empty gradient of bias, without elements where autograd wants none."""
    return bias.new_empty(bias.shape) if bias is not None and has_dbias else q.new_empty(0)


# As in AttentionOptions.
_OPTIONS = (
    "Tensor? mask, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float scale, int left, int right, "
    "str backend"
)
_attention = operator(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _fake,
    forward=_forward,
)
_attention_backward = operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"bool has_dbias, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    forward=_backward,
)


# The first options are tensors, which autograd keeps apart from numbers.
TENSORS = AttentionOptions._fields.index("seed") + 1


def _save(ctx: Any, a: Any, output: tuple[Tensor, Tensor], *inputs: Tensor) -> None:
    """Keep the options, the inputs and the results for the backward."""
    out, lse = output
    options = _of(a)
    tensors, ctx.numbers = options[:TENSORS], options[TENSORS:]
    ctx.backend = a.backend
    ctx.save_for_backward(*tensors, *inputs, out, lse)
    ctx.mark_non_differentiable(lse)


def _saved(ctx: Any) -> tuple[list[Tensor], AttentionOptions]:
    """The inputs and results that ``_save`` kept, and the options."""
    saved = ctx.saved_tensors
    return list(saved[TENSORS:]), AttentionOptions(*saved[:TENSORS], *ctx.numbers)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, a, output, a.q, a.k, a.v)


def _gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    (q, k, v, out, lse), options = _saved(ctx)
    dq, dk, dv, dbias = _attention_backward(
        dout, q, k, v, out, lse, ctx.needs.bias, *options, ctx.backend
    )
    gradients = {"q": dq, "k": dk, "v": dv}
    return {**gradients, "bias": dbias} if ctx.needs.bias else gradients


differentiable("attention", _gradient, _setup_context)
once_differentiable("attention_backward")


# The operator on one tensor


def _unpacked(qkv: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of qkv (B, L, 3, H, D) or (T, 3, H, D) as the operator above takes q, k and v."""
    q, k, v = qkv.unbind(-3)
    if cu_seqlens is None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _swapped(out: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(B, L, H, D) ↔ (B, H, L, D); packed rows as they are."""
    return out.transpose(1, 2) if cu_seqlens is None else out


def _qkvpacked_forward(qkv: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *numbers, backend = options
    o = AttentionOptions(*numbers)
    out, lse = _row(backend).forward(*_unpacked(qkv, o.cu_seqlens_q), o)
    return _swapped(out, o.cu_seqlens_q), lse


def _qkvpacked_fake(a: Any) -> tuple[Tensor, Tensor]:
    q, _, _ = _unpacked(a.qkv, a.cu_seqlens_q)
    return _swapped(out_like(q), a.cu_seqlens_q), _lse_fake(q, a.backend)


def _qkvpacked_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, has_dbias: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    *numbers, backend = options
    o = AttentionOptions(*numbers)
    dqkv, dbias = qkv.new_empty(qkv.shape), _dbias_like(qkv, o.bias, has_dbias)
    into = [*_unpacked(dqkv, o.cu_seqlens_q), dbias if has_dbias else None]
    dout, out = (_swapped(x, o.cu_seqlens_q) for x in (dout, out))
    _row(backend).backward(into, dout, *_unpacked(qkv, o.cu_seqlens_q), out, lse, o)
    return dqkv, dbias


def _qkvpacked_backward_fake(a: Any) -> tuple[Tensor, Tensor]:
    return a.qkv.new_empty(a.qkv.shape), _dbias_like(a.qkv, a.bias, a.has_dbias)


_attention_qkvpacked = operator(
    f"attention_qkvpacked(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor)",
    _qkvpacked_fake,
    forward=_qkvpacked_forward,
)
_attention_qkvpacked_backward = operator(
    "attention_qkvpacked_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, "
    f"bool has_dbias, {_OPTIONS}) -> (Tensor, Tensor)",
    _qkvpacked_backward_fake,
    forward=_qkvpacked_backward,
)


def _qkvpacked_setup_context(ctx: Any, a: Any, output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, a, output, a.qkv)


def _qkvpacked_gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    (qkv, out, lse), options = _saved(ctx)
    dqkv, dbias = _attention_qkvpacked_backward(
        dout, qkv, out, lse, ctx.needs.bias, *options, ctx.backend
    )
    return {"qkv": dqkv, "bias": dbias} if ctx.needs.bias else {"qkv": dqkv}


differentiable("attention_qkvpacked", _qkvpacked_gradient, _qkvpacked_setup_context)
once_differentiable("attention_qkvpacked_backward")


# The weights by themselves


def _weights_forward(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads: list[int] | None,
    rows: list[int] | None,
    scale: float,
    left: int,
    right: int,
    backend: str,
) -> Tensor:
    options = AttentionOptions(
        mask, bias, cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k, 0.0, scale, left,
        right,
    )  # fmt: skip
    return WEIGHTS[backend](q, k, lse, options, heads, rows)


def _weights_fake(a: Any) -> Tensor:
    return a.q.new_empty(
        a.q.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1,
        a.q.shape[1] if a.heads is None else len(a.heads),
        a.max_seqlen_q if a.rows is None else len(a.rows),
        a.max_seqlen_k,
    )


_attention_weights = operator(
    "attention_weights(Tensor q, Tensor k, Tensor? lse, Tensor? mask, Tensor? bias, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "int[]? heads, int[]? rows, float scale, int left, int right, str backend) -> Tensor",
    _weights_fake,
    forward=_weights_forward,
)


def _weights_setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    ctx.max_q, ctx.max_k, ctx.scale = a.max_seqlen_q, a.max_seqlen_k, a.scale
    ctx.heads, ctx.rows = a.heads, a.rows
    ctx.bias_shape = None if a.bias is None else a.bias.shape
    ctx.save_for_backward(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, output)


def _weights_gradient(ctx: Any, dweights: Tensor) -> dict[str, Tensor]:
    q, k, cu_q, cu_k, weights = ctx.saved_tensors
    dscores = closed_form.softmax_backward(dweights, weights)
    if ctx.heads is not None or ctx.rows is not None:
        dscores = _spread(dscores, q.shape[1], ctx.max_q, ctx.heads, ctx.rows)
    dbias = closed_form.sum_to(dscores, ctx.bias_shape) if ctx.needs.bias else None
    if cu_q is not None:
        (q,), pack_q = padded([q], cu_q, ctx.max_q)
        (k,), pack_k = padded([k], cu_k, ctx.max_k)
    # A key that no query attends, and a query that attends no key, may be NaN, and 0 · NaN is NaN.
    idle = dscores == 0.0
    q, k = (x.masked_fill(idle.all(dim).unsqueeze(-1), 0.0) for x, dim in ((q, -1), (k, -2)))
    dq, dk = dscores @ k * ctx.scale, dscores.transpose(-2, -1) @ q * ctx.scale
    if cu_q is not None:
        dq, dk = pack_q(dq), pack_k(dk)
    return {"q": dq, "k": dk} if dbias is None else {"q": dq, "k": dk, "bias": dbias}


def _spread(
    dscores: Tensor,
    heads: int,
    length: int,
    chosen_heads: list[int] | None,
    chosen_rows: list[int] | None,
) -> Tensor:
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
