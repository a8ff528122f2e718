"""Forward and backward of the ``reference`` backend, with the derivatives in closed form.

An operator's implementation runs below autograd, so it cannot differentiate ``fastbert.reference``.
The functions here compute the same formulas and their derivatives. Tests compare them with autograd
through ``fastbert.reference`` in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert import reference
from fastbert.activations import ACTIVATIONS


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum `x` over the dimensions that were broadcast from `shape`, which is as long as x.shape."""
    axes = [i for i, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want]
    return x.sum(dim=axes, keepdim=True) if axes else x


def _allowed(q, k, mask, left, right, lengths):
    allowed = reference.visible(q.shape[-2], k.shape[-2], left, right, q.device, lengths)
    if mask is None:
        return allowed
    return mask if allowed is None else allowed & mask


def _weights(q, k, allowed, bias, scale):
    """Compute ``reference.softmax_weights`` in place.

    The scores are the largest tensor of the operation, and no other function reads the scores below
    autograd.
    """
    if bias is not None:
        return reference.softmax_weights(q, k, allowed, bias, scale)
    scores = (q @ k.transpose(-2, -1)).mul_(scale)
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    empty = ~allowed.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill_(~allowed & ~empty, -math.inf), dim=-1)
    # The last pass is left out if no row is empty. A GPU would have to synchronise to find that
    # out.
    return weights.masked_fill_(empty, 0.0) if empty.is_cuda or empty.any() else weights


def attention_forward(q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Compute the output (B, H, Lq, D) of padded inputs."""
    allowed = _allowed(q, k, mask, left, right, lengths)
    k, v = (reference.hide_unattended(x, allowed) for x in (k, v))
    weights = _weights(q, k, allowed, bias, scale)
    return reference.dropout(weights, dropout_p, seed, tuple(weights.shape)) @ v


def attention_backward(dout, q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Compute the gradients of q, k, v and bias (None without one).

    The weights are computed again instead of being kept.
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
    """Compute the gradient of the scores from the gradient of the softmax weights."""
    # Autograd calls the same function of torch, which computes in fp32 inside. In 16 bit, the
    # products dweights * weights would be rounded before they are summed and subtracted.
    return torch._softmax_backward_data(dweights, weights, -1, weights.dtype)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def normalised_sum(x, residual, x_bias, seed, dropout_p):
    """Compute residual + dropout(x + x_bias) in at least fp32, the dtype of the statistics."""
    total = x.to(_statistics_dtype(x))
    if x_bias is not None:
        total = total + x_bias
    total = reference.dropout(total, dropout_p, seed, tuple(total.shape))
    return total if residual is None else total + residual


def layer_norm_forward(x, weight, bias, residual, x_bias, seed, dropout_p, eps):
    """Compute the layer norm of the sum, its mean and its reciprocal standard deviation."""
    total = normalised_sum(x, residual, x_bias, seed, dropout_p)
    mean = total.mean(dim=-1, keepdim=True)
    centred = total - mean
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(dy, x, weight, mean, rstd, residual, x_bias, seed, has_bias, dropout_p):
    """Compute the gradients of the sum, x, weight, bias and x_bias.

    The gradient of x is empty without dropout. The gradient of an absent bias is empty.
    """
    total = normalised_sum(x, residual, x_bias, seed, dropout_p)
    dy, rstd = dy.to(total.dtype), rstd[:, None]
    normalised = (total - mean[:, None]) * rstd
    dnormalised = dy * weight
    along = (dnormalised * normalised).mean(dim=-1, keepdim=True)
    dsum = rstd * (dnormalised - dnormalised.mean(dim=-1, keepdim=True) - normalised * along)
    dweight = (dy * normalised).sum(dim=0).to(weight.dtype)
    dbias = dy.sum(dim=0).to(weight.dtype) if has_bias else weight.new_empty(0)
    dx = reference.dropout(dsum, dropout_p, seed, tuple(dsum.shape))
    dx_bias = dsum.new_empty(0) if x_bias is None else dx.sum(dim=0).to(x_bias.dtype)
    dropped = dx.to(x.dtype) if dropout_p > 0 else x.new_empty(0)
    return dsum.to(x.dtype), dropped, dweight, dbias, dx_bias


def rms_norm_forward(x, weight, residual, eps):
    """Compute the RMS norm of the sum and its reciprocal root mean square."""
    total = normalised_sum(x, residual, None, None, 0.0)
    rstd = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * rstd * weight).to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward(dy, x, weight, rstd, residual):
    """Compute the gradients of the sum and of weight."""
    total = normalised_sum(x, residual, None, None, 0.0)
    dy, rstd = dy.to(total.dtype), rstd[:, None]
    normalised = total * rstd
    dnormalised = dy * weight
    along = (dnormalised * normalised).mean(dim=-1, keepdim=True)
    dsum = rstd * (dnormalised - normalised * along)
    return dsum.to(x.dtype), (dy * normalised).sum(dim=0).to(weight.dtype)


def rotary_forward(x, cos, sin, heads):
    """Rotate the first heads by the angles."""
    return reference.rotary(x, cos, sin, heads=heads)


def rotary_backward(dy, cos, sin, heads):
    """Rotate the gradient back by the same angles."""
    return reference.rotary(dy, cos, -sin, heads=heads)


def linear_gelu_forward(x, weight, bias, activation, save):
    """Return the activation of h, and h = x Wᵀ + bias, which is empty unless it is to be saved."""
    h = torch.nn.functional.linear(x, weight, bias)
    return reference.activate(h, activation), h if save else x.new_empty(0)


def activation_backward(da, h, sum_rows, activation):
    """Compute the gradient of h, its sum over the rows if wanted, and a = activation(h).

    All three are computed in at least fp32.
    """
    total = h.to(_statistics_dtype(h))
    da, act = da.to(total.dtype), ACTIVATIONS[activation]
    if act.gated:
        gate, linear = total.chunk(2, dim=-1)
        activated = act.function(gate)
        a = activated * linear
        dh = torch.cat([da * linear * act.slope(gate), da * activated], dim=-1)
    else:
        a, dh = act.function(total), da * act.slope(total)
    dbias = dh.sum(dim=0).to(h.dtype) if sum_rows else None
    return dh.to(h.dtype), dbias, a.to(h.dtype)
