"""Forward and gradient of the ``reference`` backend where the operator needs both written out.

An operator's implementation runs below autograd, so it cannot differentiate ``fastbert.reference``;
these are the same formulas with their derivatives in closed form. The tests compare them with
autograd through ``fastbert.reference`` in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert import reference


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """``x`` summed over the dimensions that were broadcast from ``shape`` (same number of dims)."""
    axes = [i for i, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want]
    return x.sum(dim=axes, keepdim=True) if axes else x


def _allowed(q, k, mask, left, right, lengths):
    allowed = reference.visible(q.shape[-2], k.shape[-2], left, right, q.device, lengths)
    if mask is None:
        return allowed
    return mask if allowed is None else allowed & mask


def _weights(q, k, allowed, bias, scale):
    """``reference.attention_weights`` in place: the scores are the largest tensor of the operation,
    and below autograd nothing else looks at them."""
    if bias is not None:
        return reference.attention_weights(q, k, allowed, bias, scale)
    scores = (q @ k.transpose(-2, -1)).mul_(scale)
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    empty = ~allowed.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill_(~allowed & ~empty, -math.inf), dim=-1)
    # Where looking is cheap, the pass over rows that may attend nothing is left out with them.
    return weights.masked_fill_(empty, 0.0) if empty.is_cuda or empty.any() else weights


def attention_forward(q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Output (B, H, Lq, D) of padded inputs."""
    allowed = _allowed(q, k, mask, left, right, lengths)
    k, v = (reference.hide_unattended(x, allowed) for x in (k, v))
    weights = _weights(q, k, allowed, bias, scale)
    return reference.dropout(weights, dropout_p, seed, tuple(weights.shape)) @ v


def attention_backward(dout, q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Gradients of q, k, v and bias (None without one); the weights are computed again, not
    kept.
    """
    allowed = _allowed(q, k, mask, left, right, lengths)
    k, v = (reference.hide_unattended(x, allowed) for x in (k, v))
    weights = _weights(q, k, allowed, bias, scale)
    dropped = reference.dropout(weights, dropout_p, seed, tuple(weights.shape))
    dv = dropped.transpose(-2, -1) @ dout
    dweights = reference.dropout(dout @ v.transpose(-2, -1), dropout_p, seed, tuple(weights.shape))
    dscores = softmax_backward(dweights, weights)
    dbias = None if bias is None else sum_to(dscores, bias.shape)
    return dscores @ k * scale, dscores.transpose(-2, -1) @ q * scale, dv, dbias


def softmax_backward(dweights: Tensor, weights: Tensor) -> Tensor:
    return weights * (dweights - (dweights * weights).sum(dim=-1, keepdim=True))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def normalised_sum(x, residual, x_bias, seed, dropout_p):
    """residual + dropout(x + x_bias) in at least fp32, the dtype of the statistics."""
    total = x.to(_statistics_dtype(x))
    if x_bias is not None:
        total = total + x_bias
    total = reference.dropout(total, dropout_p, seed, tuple(total.shape))
    return total if residual is None else total + residual


def layer_norm_forward(x, weight, bias, residual, x_bias, seed, dropout_p, eps):
    total = normalised_sum(x, residual, x_bias, seed, dropout_p)
    mean = total.mean(dim=-1, keepdim=True)
    centred = total - mean
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * weight + bias
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(dy, x, weight, mean, rstd, residual, x_bias, seed, dropout_p):
    """Gradients of the sum, of x (empty without dropout), weight, bias, x_bias (empty without)."""
    total = normalised_sum(x, residual, x_bias, seed, dropout_p)
    dy, rstd = dy.to(total.dtype), rstd[:, None]
    normalised = (total - mean[:, None]) * rstd
    dnormalised = dy * weight
    along = (dnormalised * normalised).mean(dim=-1, keepdim=True)
    dsum = rstd * (dnormalised - dnormalised.mean(dim=-1, keepdim=True) - normalised * along)
    dweight, dbias = (dy * normalised).sum(dim=0), dy.sum(dim=0)
    dx = reference.dropout(dsum, dropout_p, seed, tuple(dsum.shape))
    dx_bias = dsum.new_empty(0) if x_bias is None else dx.sum(dim=0).to(x_bias.dtype)
    dropped = dx.to(x.dtype) if dropout_p > 0 else x.new_empty(0)
    return dsum.to(x.dtype), dropped, dweight.to(weight.dtype), dbias.to(weight.dtype), dx_bias


def linear_gelu_forward(x, weight, bias, approximate, save):
    """(y, h): gelu(h + bias) and h = x Wᵀ, or an empty h when nothing is to be saved."""
    y = reference.linear_gelu(x, weight, bias, approximate=approximate)
    return y, x @ weight.t() if save else x.new_empty(0)


def gelu_backward(dy, h, bias, approximate):
    """Gradients of h and bias of gelu(h + bias), the sum formed in at least fp32: h is rounded once
    already."""
    total = h.to(_statistics_dtype(h))
    if bias is not None:
        total = total + bias
    dy = dy.to(total.dtype)
    if approximate == "relu":
        dh = torch.ops.aten.threshold_backward(dy, total, 0)
    else:
        dh = torch.ops.aten.gelu_backward(dy, total, approximate=approximate)
    dbias = h.new_empty(0) if bias is None else dh.sum(dim=0).to(bias.dtype)
    return dh.to(h.dtype), dbias
