"""Attention with relative positions in its logits: public function, operators, gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    autocast,
    require,
    require_integer,
    require_same_device,
    require_shape,
    transformed,
)
from fastbert.ops.attention_arguments import dense_shape, options_of, varlen_shape
from fastbert.ops.attention_backends import out_like, padded
from fastbert.ops.product import needs_gradient
from fastbert.ops.register import differentiable, once_differentiable, operator


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
    backend: str | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``softmax((q kᵀ + terms) scale) v`` with terms of relative positions and segments.

    The distance of query i and key j is ``i + Lk - Lq - j``, and ``t = index[distance + N - 1]`` is
    the row of the distance in the tables of positions. The term of query i and key j is

        ``q_i · position_keys[t] + k_j · position_queries[t] + position_bias[t]``

    plus ``segment_scores[i]`` if the segments of query and key differ. Summands that are None are
    left out. The kernels gather the rows of the tables block by block, so that no tensor of shape
    ``(B, H, Lq, Lk)`` exists, in the forward and in the backward.

    Args:
        q: Queries of shape ``(B, H, Lq, D)``, or packed ``(Tq, H, D)`` with `cu_seqlens_q`, with
            any strides, D up to 256; fp32, fp16 or bf16, and fp64 with the backend ``"reference"``.
        k: Keys of shape ``(B, H, Lk, D)`` or ``(Tk, H, D)`` in the dtype of `q`.
        v: Values, as `k`.
        index: Row of each distance from ``1 - N`` to ``N - 1``, int32 of shape ``(2 N - 1,)``. N is
            at least Lq and Lk.
        position_keys: Table of shape ``(P, H, D)`` in the dtype of `q`.
        position_queries: Table of shape ``(P, H, D)`` in the dtype of `q`.
        position_bias: Table of shape ``(P, H)`` in the dtype of `q` or fp32.
        segments: Segment of each query and of each key, two int32 or int64 tensors of shape
            ``(B, L)``, or ``(T,)`` for packed sequences.
        segment_scores: Tensor of shape ``(B, H, Lq)`` or ``(Tq, H)``, in the dtype of `q` or fp32.
        mask: As in `attention`; as in `attention_varlen` if `cu_seqlens_q` is given.
        cu_seqlens_q: As in `attention_varlen`.
        cu_seqlens_k: As in `attention_varlen`.
        max_seqlen_q: As in `attention_varlen`.
        max_seqlen_k: As in `attention_varlen`.
        dropout_p: As in `attention`.
        scale: Factor of the logits; ``D ** -0.5`` by default.
        return_weights: Whether the softmax weights are returned too. If a gradient is wanted, plain
            PyTorch computes both, because the kernels have no gradient of the weights.
        backend: ``"reference"``, ``"triton"`` or ``"cpu"``; None lets
            ``fastbert.ops.backend.resolve`` choose.
        dropout_seed: As in `attention`.

    Returns:
        As in `attention` or `attention_varlen`.

    Raises:
        ValueError: As in `attention`, or if no table of positions is given, or if a value of
            `index` is out of range. The message names the argument.
        TypeError: As in `attention`, or if `index` is not int32 or a segment is not an integer.

    Note:
        DeBERTa: He et al. 2021, eq. 4, with both tables. Transformer-XL: Dai et al. 2019, section
        3.3, with `position_keys`, and with its bias v in `position_bias`. XLNet: Yang et al. 2019,
        section 2.5, with segments. T5: Raffel et al. 2020, with `position_bias` alone.

    Examples:
        >>> import torch
        >>> from fastbert import ops
        >>> q = k = v = torch.randn(2, 4, 16, 32)
        >>> index = torch.arange(31, dtype=torch.int32)  # One row for each distance, -15 to 15.
        >>> keys = torch.randn(31, 4, 32)
        >>> ops.relative_attention(q, k, v, index, position_keys=keys).shape
        torch.Size([2, 4, 16, 32])
    """
    q, k, v, position_keys, position_queries = autocast(q, k, v, position_keys, position_queries)
    if cu_seqlens_q is None:
        shape = dense_shape(q, k, v)
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        shape = varlen_shape(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    o = options_of(
        q, shape, mask, None, cu_seqlens_q, cu_seqlens_k, dropout_p=dropout_p,
        dropout_seed=dropout_seed, scale=scale, causal=False, window=None,
    )  # fmt: skip
    tables = (position_keys, position_queries, position_bias)
    _check_tables(q, shape, index, *tables)
    q_segments, k_segments = (None, None) if segments is None else segments
    _check_segments(q, k, q_segments, k_segments, segment_scores)
    request = backends.Request(q.device.type, q.dtype, transformed=transformed())
    served_by = backends.resolve("relative_attention", backend, request).backend
    inputs = (q, k, v, *tables, segment_scores)
    recorded = return_weights and needs_gradient(*(x for x in inputs if x is not None))
    if request.transformed or recorded:
        return reference.relative_attention(
            q, k, v, index, position_keys=position_keys, position_queries=position_queries,
            position_bias=position_bias, segments=segments, segment_scores=segment_scores,
            mask=o.mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=shape[2], max_seqlen_k=shape[3], dropout_p=dropout_p, scale=o.scale,
            return_weights=return_weights, dropout_seed=o.seed,
        )  # fmt: skip
    terms = RelativeOptions(
        index, *tables, q_segments, k_segments, segment_scores, o.mask, cu_seqlens_q, cu_seqlens_k,
        o.seed, shape[2], shape[3], o.dropout_p, o.scale,
    )  # fmt: skip
    out = _relative_attention(q, k, v, *terms, served_by)
    if not return_weights:
        return out
    return out, _relative_attention_weights(q, k, *terms, served_by)


class RelativeOptions(NamedTuple):
    """The arguments of the operators after q, k and v, in the order of their schemas."""

    index: Tensor
    position_keys: Tensor | None
    position_queries: Tensor | None
    position_bias: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    segment_scores: Tensor | None
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    scale: float


def _check_tables(
    q: Tensor,
    shape: tuple[int, ...],
    index: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    position_bias: Tensor | None,
) -> None:
    if index.dtype != torch.int32:
        raise TypeError(f"index: got {index.dtype}, allowed: int32")
    longest = max(shape[2], shape[3], 1)
    fits = index.dim() == 1 and index.shape[0] % 2 == 1 and index.shape[0] >= 2 * longest - 1
    allowed = f"(2 N - 1,) with N at least {longest}, the longest sequence"
    require(fits, "index", f"shape {tuple(index.shape)}", allowed)
    heads, size = q.shape[1], q.shape[-1]
    tables = {
        "position_keys": (position_keys, (heads, size)),
        "position_queries": (position_queries, (heads, size)),
        "position_bias": (position_bias, (heads,)),
    }
    given = {name: table for name, (table, _) in tables.items() if table is not None}
    require(bool(given), ", ".join(tables), "None", "a tensor for at least one of them")
    positions = next(iter(given.values())).shape[0]
    for name, table in given.items():
        require_shape(name, table, (positions, *tables[name][1]))
        wide = name == "position_bias" and table.dtype == torch.float32
        require(table.dtype == q.dtype or wide, name, table.dtype, f"{q.dtype}, as q")
    require_same_device("q", q.device, index=index, **given)
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in index.aminmax())
        require(low >= 0 and high < positions, "index", f"{low} to {high}", f"0 to {positions - 1}")


def _check_segments(
    q: Tensor,
    k: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    scores: Tensor | None,
) -> None:
    together = (q_segments is None) == (scores is None)
    require(together, "segment_scores", "None" if scores is None else "a tensor",
            "a tensor if and only if segments is given")  # fmt: skip
    if q_segments is None or k_segments is None or scores is None:
        return
    packed = q.dim() == 3
    for name, segments, x in (("q_segments", q_segments, q), ("k_segments", k_segments, k)):
        require_integer(name, segments)
        require_shape(name, segments, x.shape[:1] if packed else (x.shape[0], x.shape[2]))
    require_shape("segment_scores", scores, q.shape[:-1])
    fits = scores.dtype in (q.dtype, torch.float32)
    require(fits, "segment_scores", scores.dtype, f"{q.dtype}, as q, or torch.float32")
    require_same_device(
        "q", q.device, q_segments=q_segments, k_segments=k_segments, segment_scores=scores
    )


# The operators


_OPTIONS = (
    "Tensor index, Tensor? position_keys, Tensor? position_queries, Tensor? position_bias, "
    "Tensor? q_segments, Tensor? k_segments, Tensor? segment_scores, Tensor? mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float scale, str backend"
)
# The fields of RelativeOptions that can have a gradient.
DIFFERENTIABLE = ("position_keys", "position_queries", "position_bias", "segment_scores")


def _fake(a: Any) -> Tensor:
    return out_like(a.q)


def _weights_fake(a: Any) -> Tensor:
    batch = a.q.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1
    return a.q.new_empty(batch, a.q.shape[1], a.max_seqlen_q, a.max_seqlen_k)


def _backward_fake(a: Any) -> tuple[Tensor, ...]:
    others = (getattr(a, name) for name in DIFFERENTIABLE)
    return (
        out_like(a.q), out_like(a.k), out_like(a.v),
        *(a.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in others),
    )  # fmt: skip


_relative_attention = operator(
    f"relative_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor",
    _fake,
    table="relative_attention",
)
_relative_attention_backward = operator(
    f"relative_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_fake,
    table="relative_attention",
)
_relative_attention_weights = operator(
    f"relative_attention_weights(Tensor q, Tensor k, {_OPTIONS}) -> Tensor",
    _weights_fake,
    table="relative_attention_weights",
)
# The first TENSORS fields of RelativeOptions are tensors, which autograd saves separately.
TENSORS = RelativeOptions._fields.index("seed") + 1


def _setup_context(ctx: Any, a: Any, output: Tensor) -> None:
    options = [getattr(a, name) for name in RelativeOptions._fields]
    ctx.numbers, ctx.backend = options[TENSORS:], a.backend
    ctx.save_for_backward(*options[:TENSORS], a.q, a.k, a.v)


def _gradient(ctx: Any, dout: Tensor) -> dict[str, Tensor]:
    saved = ctx.saved_tensors
    dq, dk, dv, *others = _relative_attention_backward(
        dout, *saved[TENSORS:], *saved[:TENSORS], *ctx.numbers, ctx.backend
    )
    return {"q": dq, "k": dk, "v": dv, **dict(zip(DIFFERENTIABLE, others, strict=True))}


differentiable("relative_attention", _gradient, _setup_context)
once_differentiable("relative_attention_backward")
once_differentiable("relative_attention_weights")


# Backends


class _Dense(NamedTuple):
    """The arguments of a call, padded to dense sequences, and functions that pack them again."""

    q: Tensor
    k: Tensor
    terms: tuple[Any, ...]  # the arguments of reference.relative_terms after q and k
    lengths: tuple[Tensor, Tensor] | None
    pack_q: Any
    pack_k: Any


def _dense(q: Tensor, k: Tensor, o: RelativeOptions) -> _Dense:
    segments = (
        None if o.q_segments is None or o.k_segments is None else (o.q_segments, o.k_segments)
    )
    tables = (o.index, o.position_keys, o.position_queries, o.position_bias)
    if o.cu_seqlens_q is None or o.cu_seqlens_k is None:
        terms = (*tables, segments, o.segment_scores, None)
        return _Dense(q, k, terms, None, lambda x: x, lambda x: x)
    (q,), pack_q = padded([q], o.cu_seqlens_q, o.max_seqlen_q)
    (k,), pack_k = padded([k], o.cu_seqlens_k, o.max_seqlen_k)
    scores = o.segment_scores
    if segments is not None and scores is not None:
        segments, scores = reference.padded_segments(
            segments, scores, (o.cu_seqlens_q, o.cu_seqlens_k), (o.max_seqlen_q, o.max_seqlen_k)
        )
    lengths = (o.cu_seqlens_q.diff(), o.cu_seqlens_k.diff())
    return _Dense(q, k, (*tables, segments, scores, lengths), lengths, pack_q, pack_k)


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    o = RelativeOptions(*options)
    d = _dense(q, k, o)
    if d.lengths is not None:
        (v,), _ = padded([v], o.cu_seqlens_k, o.max_seqlen_k)
    bias = reference.relative_terms(d.q, d.k, *d.terms) * o.scale
    out = closed_form.attention_forward(
        d.q, d.k, v, o.mask, bias, d.lengths, o.seed, o.dropout_p, o.scale, -1, -1
    )
    return out_like(q).copy_(d.pack_q(out))


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    o = RelativeOptions(*options)
    d = _dense(q, k, o)
    if d.lengths is not None:
        (dout,), _ = padded([dout], o.cu_seqlens_q, o.max_seqlen_q)
        (v,), _ = padded([v], o.cu_seqlens_k, o.max_seqlen_k)
    bias = reference.relative_terms(d.q, d.k, *d.terms) * o.scale
    dq, dk, dv, dbias = closed_form.attention_backward(
        dout, d.q, d.k, v, o.mask, bias, d.lengths, o.seed, o.dropout_p, o.scale, -1, -1
    )
    gradients = closed_form.relative_terms_backward(dbias * o.scale, d.q, d.k, *d.terms)
    dq, dk = dq + gradients.pop("q"), dk + gradients.pop("k")
    scores = gradients.get("segment_scores")
    if scores is not None and d.lengths is not None:
        gradients["segment_scores"] = d.pack_q(scores.unsqueeze(-1)).squeeze(-1)
    return (
        out_like(q).copy_(d.pack_q(dq)),
        out_like(k).copy_(d.pack_k(dk)),
        out_like(k).copy_(d.pack_k(dv)),
        *(
            q.new_empty(0) if name not in gradients
            else gradients[name].to(getattr(o, name).dtype).contiguous()
            for name in DIFFERENTIABLE
        ),
    )  # fmt: skip


def _reference_weights(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    o = RelativeOptions(*options)
    d = _dense(q, k, o)
    bias = reference.relative_terms(d.q, d.k, *d.terms) * o.scale
    allowed = reference.visible(o.max_seqlen_q, o.max_seqlen_k, -1, -1, q.device, d.lengths)
    if o.mask is not None:
        allowed = o.mask if allowed is None else allowed & o.mask
    hidden = reference.hide_unattended(d.k, allowed)
    weights = reference.softmax_weights(d.q, hidden, allowed, bias, o.scale)
    if d.lengths is not None:
        exists = reference.existing_queries(d.lengths[0], o.max_seqlen_q)
        weights = weights.masked_fill(~exists, 0.0)
    return weights.contiguous()


def _triton_options(q: Tensor, *options: Any) -> dict[str, Any]:
    """Return the arguments of the launchers after q, k and v."""
    o = RelativeOptions(*options)
    if o.mask is None:
        return o._asdict()
    # The kernels take a view of the full shape, with stride 0 where a dimension is broadcast.
    batch = q.shape[0] if o.cu_seqlens_q is None else o.cu_seqlens_q.shape[0] - 1
    shape = (batch, q.shape[1], o.max_seqlen_q, o.max_seqlen_k)
    return {**o._asdict(), "mask": o.mask.expand(shape)}


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    from fastbert.kernels.relative_attention import relative_attention_forward

    return relative_attention_forward(q, k, v, **_triton_options(q, *options))


def _triton_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    from fastbert.kernels.relative_attention_backward import relative_attention_backward

    gradients = relative_attention_backward(dout, q, k, v, **_triton_options(q, *options))
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _triton_weights(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    from fastbert.kernels.relative_attention import relative_attention_weights

    return relative_attention_weights(q, k, **_triton_options(q, *options))


def _extension_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return torch.ops.fastbert_C.relative_attention_forward(q, k, v, *options)


def _extension_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return torch.ops.fastbert_C.relative_attention_backward(dout, q, k, v, *options)


def _extension_weights(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    return torch.ops.fastbert_C.relative_attention_weights(q, k, *options)


def _no_gradient(*arguments: Any) -> Any:
    raise RuntimeError("fastbert::relative_attention_weights has no gradient")


backends.TABLES["relative_attention"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward),
    "cpu": backends.Implementation(_extension_forward, _extension_backward),
}
backends.TABLES["relative_attention_weights"] = {
    "reference": backends.Implementation(_reference_weights, _no_gradient, backends.ALL_DTYPES),
    "triton": backends.Implementation(_triton_weights, _no_gradient),
    "cpu": backends.Implementation(_extension_weights, _no_gradient),
}
