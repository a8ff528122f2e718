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
    AttentionOptions,
    backend_for,
    check_lse,
    check_qkv,
    chosen,
    dense_shape,
    options_of,
    varlen_shape,
)
from fastbert.ops.attention_backends import WEIGHTS, out_like, padded
from fastbert.ops.register import differentiable, once_differentiable, operator
from fastbert.reference import longest

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
    """Compute scaled dot-product attention, ``softmax(q kᵀ scale + bias) v``.

    A query that attends to no key has an output of exactly 0 and gradients of exactly 0. Keys and
    values that no query attends to do not change a result, even if they are NaN.

    Args:
        q: Queries of shape ``(B, H, Lq, D)`` with any strides, D up to 256; fp32, fp16 or bf16, and
            fp64 with the backend ``"reference"``.
        k: Keys of shape ``(B, H, Lk, D)`` in the dtype of `q`.
        v: Values of shape ``(B, H, Lk, D)`` in the dtype of `q`.
        mask: Bool mask, True where a query attends to a key; of shape ``(B, Lk)``, or broadcastable
            to ``(B, H, Lq, Lk)``.
        bias: Floating tensor that is added to ``q kᵀ scale``; broadcastable to ``(B, H, Lq, Lk)``.
        dropout_p: Probability with which an attention weight is dropped.
        scale: Factor of the products ``q kᵀ``; ``D ** -0.5`` by default.
        causal: Whether a query attends only to keys at its own position or earlier. Query ``i`` has
            the position of key ``i + Lk - Lq``.
        window: How many keys before and after its position a query attends to: ``(left, right)``,
            or one number for both sides; -1 leaves a side open. None leaves both sides open. With
            `causal`, ``right`` is 0.
        return_weights: Whether the softmax weights are returned too.
        backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.
        dropout_seed: Seed of the dropout mask, int64 of shape ``(1,)``; None draws a seed from
            torch's generator of the device. The same seed gives the same mask on every backend.

    Returns:
        Tensor of shape ``(B, H, Lq, D)``, stored in memory in the order of ``(B, Lq, H, D)``. Its
        dtype is the dtype of `q`, or autocast's dtype under autocast. With `return_weights`, also
        the softmax weights before dropout, of shape ``(B, H, Lq, Lk)``.

    Raises:
        ValueError: If a shape, a device or a value is not allowed, if the dtype of `k` or `v`
            differs from that of `q`, or if `backend` cannot serve the call. The message names the
            argument, its value and what is allowed.
        TypeError: If `mask` is not bool, `dropout_seed` is not int64, or `q`, `k`, `v` or `bias` is
            not floating.

    Note:
        Vaswani et al. 2017, eq. 1. The softmax is computed in fp32.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> q = k = v = torch.randn(2, 4, 16, 32)
        >>> mask = torch.arange(16) < torch.tensor([[16], [9]])  # The lengths are 16 and 9.
        >>> ops.attention(q, k, v, mask=mask).shape
        torch.Size([2, 4, 16, 32])
    """
    q, k, v = autocast(q, k, v)
    shape = dense_shape(q, k, v)
    options = options_of(
        q, shape, mask, bias, None, None,
        dropout_p=dropout_p, dropout_seed=dropout_seed, scale=scale, causal=causal, window=window,
    )  # fmt: skip
    served_by = backend_for(q, backend, options, return_weights)
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
    """Compute attention inside each sequence of a packed batch, like ``flash_attn_varlen_func``.

    Args:
        q: Queries of shape ``(Tq, H, D)``, with the sequences one after another.
        k: Keys of shape ``(Tk, H, D)``.
        v: Values of shape ``(Tk, H, D)``.
        cu_seqlens_q: Cumulative lengths of the query sequences, starting with 0, int32 of shape
            ``(B + 1,)``.
        cu_seqlens_k: Cumulative lengths of the key sequences; `cu_seqlens_q` by default.
        max_seqlen_q: Upper bound of the lengths of the query sequences. None reads the largest
            length from `cu_seqlens_q`, which synchronises with a GPU.
        max_seqlen_k: As `max_seqlen_q`, for the key sequences.
        mask: Bool mask as in `attention`, of shape ``(B, max_seqlen_k)`` or broadcastable to
            ``(B, H, max_seqlen_q, max_seqlen_k)``. Index 0 is the first token of each sequence.
        bias: Floating tensor that is added to ``q kᵀ scale``; shape and indices as for `mask`.
        dropout_p: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`, within each sequence.
        window: As in `attention`, within each sequence.
        return_weights: As in `attention`.
        backend: As in `attention`.
        dropout_seed: As in `attention`.

    Returns:
        Tensor of shape ``(Tq, H, D)``. Rows from ``cu_seqlens_q[-1]`` on belong to no sequence: the
        inputs are not read there, and the result is 0. With `return_weights`, also the softmax
        weights of shape ``(B, H, max_seqlen_q, max_seqlen_k)``, which are 0 at padding.

    Raises:
        ValueError: As in `attention`.
        TypeError: As in `attention`, or if `cu_seqlens_q` or `cu_seqlens_k` is not int32.
    """
    q, k, v = autocast(q, k, v)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    shape = varlen_shape(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = options_of(
        q, shape, mask, bias, cu_seqlens_q, cu_seqlens_k,
        dropout_p=dropout_p, dropout_seed=dropout_seed, scale=scale, causal=causal, window=window,
    )  # fmt: skip
    served_by = backend_for(q, backend, options, return_weights)
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
    """Compute self-attention on the output of one fused projection of q, k and v.

    The queries, keys and values are read in place, and the backward writes their gradients into one
    tensor of the shape of `qkv`, so that no tensor is split or concatenated.

    Args:
        qkv: Tensor of shape ``(B, L, 3, H, D)``, or packed ``(T, 3, H, D)`` with `cu_seqlens`.
        cu_seqlens: Cumulative lengths of the packed sequences, int32 of shape ``(B + 1,)``.
        max_seqlen: Upper bound of the lengths of the packed sequences, or None, as `max_seqlen_q`
            in `attention_varlen`.
        mask: As in `attention`; as in `attention_varlen` if `cu_seqlens` is given.
        bias: Floating tensor that is added to ``q kᵀ scale``; shape and indices as for `mask`.
        dropout_p: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`.
        window: As in `attention`.
        return_weights: As in `attention`.
        backend: As in `attention`.
        dropout_seed: As in `attention`.

    Returns:
        Contiguous tensor of shape ``(B, L, H, D)`` or ``(T, H, D)``. With `return_weights`, also
        the softmax weights of shape ``(B, H, L, L)``, where L is `max_seqlen` for packed sequences.

    Raises:
        ValueError: As in `attention`.
        TypeError: As in `attention`, or if `cu_seqlens` is not int32.
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
    served_by = backend_for(qkv, backend, options, return_weights)
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
    """Compute the softmax weights of `attention` alone, for chosen heads and query rows.

    The weights are before dropout. They are differentiable in `q`, `k` and `bias`.

    Args:
        q: Queries of shape ``(B, H, Lq, D)``, or packed ``(Tq, H, D)`` with `cu_seqlens_q`.
        k: Keys of shape ``(B, H, Lk, D)``, or packed ``(Tk, H, D)`` with `cu_seqlens_q`.
        lse: Natural log-sum-exp of each query's logits, fp32 of shape ``(B, H, Lq)``, or of shape
            ``(H, Tq)`` for packed queries. With `lse`, some kernels read the keys once instead of
            twice; other kernels ignore it. None is always allowed.
        cu_seqlens_q: As in `attention_varlen`.
        cu_seqlens_k: As in `attention_varlen`.
        max_seqlen_q: As in `attention_varlen`.
        max_seqlen_k: As in `attention_varlen`.
        mask: As in `attention`; as in `attention_varlen` if `cu_seqlens_q` is given.
        bias: As in `attention`; as in `attention_varlen` if `cu_seqlens_q` is given.
        scale: As in `attention`.
        causal: As in `attention`.
        window: As in `attention`.
        heads: Indices of the heads whose weights are returned; None means all heads in order.
        rows: Positions, inside the sequences, of the queries whose weights are returned; None means
            all queries in order.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.

    Returns:
        Tensor of shape ``(B, len(heads), len(rows), Lk)`` in the dtype of `q`, or in autocast's
        dtype under autocast. For packed sequences, Lk is `max_seqlen_k`, and the weights are 0 for
        queries and keys beyond the end of a sequence.

    Raises:
        ValueError: As in `attention`, or if an index is out of range.
        TypeError: As in `attention`, or if `lse` is not fp32, or if `cu_seqlens_q` or
            `cu_seqlens_k` is not int32.
    """
    q, k = autocast(q, k)
    if cu_seqlens_q is None:
        shape = dense_shape(q, k, k)
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        shape = varlen_shape(q, k, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_lse(lse, q)
    heads, rows = chosen("heads", heads, shape[1]), chosen("rows", rows, shape[2])
    options = options_of(
        q, shape, mask, bias, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal, window=window
    )
    return _weights(q, k, lse, options, backend_for(q, backend, options, True), heads, rows)


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
    """Return the `AttentionOptions` from the arguments `a` of an operator."""
    return AttentionOptions(*(getattr(a, name) for name in AttentionOptions._fields))


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *numbers, backend = options
    return _row(backend).forward(q, k, v, AttentionOptions(*numbers))


def _lse_fake(q: Tensor, backend: str) -> Tensor:
    """Return an uninitialised log-sum-exp for `q`, without elements for the backend "reference"."""
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
    """Return an uninitialised gradient of `bias`, without elements if `has_dbias` is False."""
    return bias.new_empty(bias.shape) if bias is not None and has_dbias else q.new_empty(0)


# The schema of the options of an operator: the fields of AttentionOptions in order, and the
# backend.
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


# The first TENSORS fields of AttentionOptions are tensors, which autograd saves separately from the
# numbers.
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
    """Return the inputs and results that `_save` has kept, and the options."""
    saved = ctx.saved_tensors
    return list(saved[TENSORS:]), AttentionOptions(*saved[:TENSORS], *ctx.numbers)


def _setup_context(ctx: Any, a: Any, output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, a, output, a.q, a.k, a.v)


def _gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    (q, k, v, out, lse), options = _saved(ctx)
    dq, dk, dv, dbias = _attention_backward(
        dout, q, k, v, out, lse, ctx.needs.bias, *options, ctx.backend
    )
    return {"q": dq, "k": dk, "v": dv, "bias": dbias}


differentiable("attention", _gradient, _setup_context)
once_differentiable("attention_backward")


# The operator on one tensor `qkv` that contains q, k and v


def _unpacked(qkv: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as views of `qkv`: (B, H, L, D), or (T, H, D) with `cu_seqlens`."""
    q, k, v = qkv.unbind(-3)
    if cu_seqlens is None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _swapped(out: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return a dense `out` with the dimensions L and H swapped, or a packed `out` unchanged."""
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
    return {"qkv": dqkv, "bias": dbias}


differentiable("attention_qkvpacked", _qkvpacked_gradient, _qkvpacked_setup_context)
once_differentiable("attention_qkvpacked_backward")


# The operator that returns the softmax weights alone


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
    # A key that no query attends to may be NaN, and so may a query that attends to no key. Both are
    # replaced by 0, because they are multiplied by gradients of 0, and 0 * NaN is NaN.
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
    """Return the gradient of the scores of all heads and rows from that of the chosen scores.

    The gradient is 0 for heads and rows that were not chosen.
    """
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
