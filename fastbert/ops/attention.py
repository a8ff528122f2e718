"""Scaled dot-product attention, dense and varlen: public functions, operator, gradient,
backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert import reference
from fastbert.ops import backend as backends
from fastbert.ops import closed_form
from fastbert.ops.arguments import (
    autocast,
    require,
    require_floating,
    require_same_device,
    require_shape,
)
from fastbert.ops.arguments import (
    dropout_seed as draw_seed,
)
from fastbert.ops.register import differentiable, once_differentiable, operator

MAX_HEAD_DIM = 256

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
    _check_dense(q, k, v)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    options = _Options(
        q, mask, bias, shape, dropout_p, scale, causal, window, dropout_seed, backend
    )
    out, _ = _attention(q, k, v, *options.tensors(), *options.numbers(shape[2], shape[3]))
    return (out, options.weights(q, k)) if return_weights else out


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
    max_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = _longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_q, max_k)
    options = _Options(
        q, mask, bias, shape, dropout_p, scale, causal, window, dropout_seed, backend
    )
    out, _ = _attention(
        q, k, v, *options.tensors(cu_seqlens_q, cu_seqlens_k), *options.numbers(max_q, max_k)
    )
    if not return_weights:
        return out
    return out, options.weights(q, k, cu_seqlens_q, cu_seqlens_k)


class _Options:
    """The options of one call, checked, in the order of the operator's schema."""

    def __init__(self, q, mask, bias, shape, dropout_p, scale, causal, window, seed, backend):
        self.mask, self.bias = _canonical_mask(mask, shape), _canonical_bias(bias, shape)
        require_same_device("q", q.device, mask=self.mask, bias=self.bias)
        self.seed = draw_seed(dropout_p, seed, q.device)
        self.dropout_p = float(dropout_p)
        self.scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        self.left, self.right = _canonical_window(window, causal)
        self.shape = shape
        self.request = backends.Request(
            q.device.type,
            q.dtype,
            head_dim=q.shape[-1],
            bias_gradient=bias is not None and bias.requires_grad,
        )
        self.backend = backends.resolve("attention", backend, self.request).backend

    def tensors(self, cu_seqlens_q=None, cu_seqlens_k=None):
        return self.mask, self.bias, cu_seqlens_q, cu_seqlens_k, self.seed

    def numbers(self, max_q, max_k):
        return max_q, max_k, self.dropout_p, self.scale, self.left, self.right, self.backend

    def weights(self, q, k, cu_seqlens_q=None, cu_seqlens_k=None):
        """The softmax weights, computed again by themselves, so that nobody else pays for them."""
        mask, left, right = self.mask, self.left, self.right
        if cu_seqlens_q is not None:
            lengths = (cu_seqlens_q.diff(), cu_seqlens_k.diff())
            max_q, max_k = self.shape[2:]
            # The window depends on each sequence's lengths here, so it becomes part of the mask.
            inside = reference.visible(max_q, max_k, left, right, q.device, lengths)
            inside = inside & reference.existing_queries(lengths[0], max_q)
            mask, left, right = inside if mask is None else inside & mask, -1, -1
            q = reference.pad_rows(q, cu_seqlens_q, max_q)[0].transpose(1, 2)
            k = reference.pad_rows(k, cu_seqlens_k, max_k)[0].transpose(1, 2)
        return _attention_weights(q, k, mask, self.bias, self.scale, left, right, self.backend)


def _longest(cu_seqlens: Tensor) -> int:
    lengths = cu_seqlens.diff()
    return int(lengths.max()) if lengths.numel() else 0


# Checks


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, dims: int, names: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_floating(name, tensor)
        require(tensor.dim() == dims, name, f"shape {tuple(tensor.shape)}", f"{dims} dims: {names}")
        require(tensor.dtype == q.dtype, name, tensor.dtype, f"{q.dtype}, as q")
    require_same_device("q", q.device, k=k, v=v)
    head_dim = q.shape[-1]
    require(1 <= head_dim <= MAX_HEAD_DIM, "q", f"head dim {head_dim}", f"1 to {MAX_HEAD_DIM}")
    require_shape("v", v, tuple(k.shape))


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_inputs(q, k, v, 4, "(B, H, L, D)")
    require_shape("k", k, (q.shape[0], q.shape[1], k.shape[2], q.shape[3]))


def _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k):
    _check_inputs(q, k, v, 3, "(T, H, D)")
    require_shape("k", k, (k.shape[0], q.shape[1], q.shape[2]))
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name}: got {cu_seqlens.dtype}, allowed: int32")
        shape = f"shape {tuple(cu_seqlens.shape)}"
        require(cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1, name, shape, "shape (B+1,)")
    require_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
    require_same_device("q", q.device, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


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
            f"mask: got {mask.dtype}, allowed: bool, True = attend (additive goes in bias)"
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


# The operator


def _out_like(q: Tensor) -> Tensor:
    """An empty (B, H, L, D) laid out as (B, L, H, D), so that merging heads is free; varlen as it
    is.
    """
    if q.dim() == 3:
        return q.new_empty(q.shape)
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _table(backend: str) -> backends.Implementation:
    return backends.TABLES["attention"][backend]


def _forward(q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right, backend):
    return _table(backend).forward(
        q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right
    )


def _fake(q, k, v, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right, backend):
    if backend == "reference":
        return _out_like(q), q.new_empty(0, dtype=torch.float32)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return _out_like(q), q.new_empty(shape, dtype=torch.float32)


def _backward(dout, q, k, v, out, lse, mask, bias, cu_q, cu_k, seed, *numbers_and_backend):
    *numbers, backend = numbers_and_backend
    return _table(backend).backward(dout, q, k, v, out, lse, mask, bias, cu_q, cu_k, seed, *numbers)


def _backward_fake(dout, q, k, v, out, lse, mask, bias, *rest):
    # Only the reference has a gradient of bias; the others refuse a bias that needs one.
    has_dbias = bias is not None and rest[-1] == "reference"
    dbias = bias.new_empty(bias.shape) if has_dbias else q.new_empty(0)
    return _out_like(q), _out_like(k), _out_like(v), dbias


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
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.numbers = inputs[8:]
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dbias = _attention_backward(dout, *ctx.saved_tensors, *ctx.numbers)
    return dq, dk, dv, None, dbias if ctx.needs_input_grad[4] else None, *[None] * 10


differentiable("attention", _gradient, _setup_context)
once_differentiable("attention_backward")


# The weights by themselves


def _weights_forward(q, k, mask, bias, scale, left, right, backend):
    if backend == "triton":
        from fastbert.kernels.attention import attention_weights

        mask, bias = (_expand(x, q, q.shape[2], k.shape[2], None) for x in (mask, bias))
        return attention_weights(
            q, k, mask=mask, bias=bias, scale=scale, causal=False, window=(left, right)
        )
    allowed = reference.visible(q.shape[-2], k.shape[-2], left, right, q.device)
    if mask is not None:
        allowed = mask if allowed is None else allowed & mask
    k = reference.hide_unattended(k, allowed)
    return reference.attention_weights(q, k, allowed, bias, scale).contiguous()


def _weights_fake(q, k, mask, bias, scale, left, right, backend):
    return q.new_empty(*q.shape[:3], k.shape[2])


_attention_weights = operator(
    "attention_weights(Tensor q, Tensor k, Tensor? mask, Tensor? bias, float scale, int left, "
    "int right, str backend) -> Tensor",
    _weights_forward,
    _weights_fake,
)


def _weights_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, _, bias, ctx.scale = inputs[:5]
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(q, k, output)


def _weights_gradient(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
    q, k, weights = ctx.saved_tensors
    dscores = closed_form.softmax_backward(dweights, weights)
    dbias = closed_form.sum_to(dscores, ctx.bias_shape) if ctx.needs_input_grad[3] else None
    dq, dk = dscores @ k * ctx.scale, dscores.transpose(-2, -1) @ q * ctx.scale
    return dq, dk, None, dbias, None, None, None, None


differentiable("attention_weights", _weights_gradient, _weights_setup_context)


# Backends


def _as_laid_out(x: Tensor) -> Tensor:
    return x.contiguous() if x.dim() == 3 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _padded(tensors, cu_seqlens, max_seqlen):
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
        return _as_laid_out(out), lse
    (q,), pack = _padded([q], cu_q, max_q)
    (k, v), _ = _padded([k, v], cu_k, max_k)
    lengths = (cu_q.diff(), cu_k.diff())
    return pack(closed_form.attention_forward(q, k, v, mask, bias, lengths, *options)), lse


def _reference_backward(
    dout, q, k, v, out, lse, mask, bias, cu_q, cu_k, seed, max_q, max_k, p, scale, left, right
):
    lengths = None
    if cu_q is not None:
        (q, dout), pack_q = _padded([q, dout], cu_q, max_q)
        (k, v), pack_k = _padded([k, v], cu_k, max_k)
        lengths = (cu_q.diff(), cu_k.diff())
    dq, dk, dv, dbias = closed_form.attention_backward(
        dout, q, k, v, mask, bias, lengths, seed, p, scale, left, right
    )
    if cu_q is not None:
        dq, dk, dv = pack_q(dq), pack_k(dk), pack_k(dv)
    dbias = dq.new_empty(0) if dbias is None else dbias.to(bias.dtype).contiguous()
    return _as_laid_out(dq), _as_laid_out(dk), _as_laid_out(dv), dbias


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


def _triton_backward(dout, q, k, v, out, lse, *options):
    from fastbert.kernels.attention import attention_backward

    gradients = attention_backward(dout, q, k, v, out, lse, **_triton_options(q, *options))
    return *gradients, q.new_empty(0)


def _triton_refuses(request: backends.Request) -> str | None:
    if request.bias_gradient:
        return "its kernels do not produce the gradient of bias yet"
    return None


backends.TABLES["attention"] = {
    "reference": backends.Implementation(
        _reference_forward, _reference_backward, backends.ALL_DTYPES
    ),
    "triton": backends.Implementation(_triton_forward, _triton_backward, refuses=_triton_refuses),
}
