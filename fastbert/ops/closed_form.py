"""Forward and backward of the ``reference`` backend, with the derivatives in closed form.

An operator's implementation runs below autograd, where ``fastbert.reference`` cannot be
differentiated. The functions here compute the same formulas and their derivatives. Tests compare
them with autograd through ``fastbert.reference`` in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert import reference
from fastbert.activations import ACTIVATIONS


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum `x` over the dimensions in which `shape`, of the same rank, has another size than `x`."""
    axes = [i for i, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want]
    return x.sum(dim=axes, keepdim=True) if axes else x


def _allowed(q, k, mask, left, right, lengths):
    allowed = reference.visible(q.shape[-2], k.shape[-2], left, right, q.device, lengths)
    if mask is None:
        return allowed
    return mask if allowed is None else allowed & mask


def _weights(q, k, allowed, bias, scale):
    """Compute ``reference.softmax_weights``; without a bias, overwrite the scores to save memory.

    The scores are the largest tensor of the operation. They can be overwritten, because below
    autograd no other function reads them.
    """
    if bias is not None:
        return reference.softmax_weights(q, k, allowed, bias, scale)
    scores = (q @ k.transpose(-2, -1)).mul_(scale)
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    empty = ~allowed.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill_(~allowed & ~empty, -math.inf), dim=-1)
    # On the CPU, `masked_fill_` is skipped if every query has an allowed key. On a GPU, this check
    # would synchronise, so `masked_fill_` always runs.
    return weights.masked_fill_(empty, 0.0) if empty.is_cuda or empty.any() else weights


def attention_forward(q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Compute the attention output (B, H, Lq, D) of dense or padded inputs.

    For padded inputs, `lengths` has the lengths of the query and of the key sequences.
    """
    allowed = _allowed(q, k, mask, left, right, lengths)
    k, v = (reference.hide_unattended(x, allowed) for x in (k, v))
    weights = _weights(q, k, allowed, bias, scale)
    return reference.dropout(weights, dropout_p, seed, tuple(weights.shape)) @ v


def attention_backward(dout, q, k, v, mask, bias, lengths, seed, dropout_p, scale, left, right):
    """Compute the gradients of q, k, v and bias; the gradient of bias is None without a bias.

    The softmax weights are computed again, so that the forward need not save them.
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


def relative_terms_backward(
    dterms, q, k, index, position_keys, position_queries, position_bias, segments, segment_scores,
    lengths,
):  # fmt: skip
    """Compute the gradients of the arguments of ``reference.relative_terms``, by name.

    `dterms` is the gradient of the terms. Arguments that are None have no gradient.
    """
    rows = reference.position_rows(index, q.shape[2], k.shape[2], lengths)
    rows = rows.expand(q.shape[0], *rows.shape[-2:]).unsqueeze(1).expand(dterms.shape)

    def by_row(gradients, table):
        """Sum gradients (B, H, L, L') over the elements with the same row: (B, H, L, P)."""
        # Sums have up to L' terms, which 16 bits would not hold.
        wide = torch.promote_types(gradients.dtype, torch.float32)
        sums = gradients.new_zeros(*gradients.shape[:3], table.shape[0], dtype=wide)
        where = rows if gradients is dterms else rows.transpose(-2, -1)
        return sums.scatter_add_(-1, where, gradients.to(wide))

    gradients = {"q": torch.zeros_like(q), "k": torch.zeros_like(k)}
    # A row of q or k that is padding or masked may be NaN, and its gradients are 0.
    for name, table, side, other in (
        ("position_keys", position_keys, "q", dterms),
        ("position_queries", position_queries, "k", dterms.transpose(-2, -1)),
    ):
        if table is None:
            continue
        sums = by_row(other, table).to(q.dtype)
        x = (q if side == "q" else k).masked_fill((sums == 0.0).all(-1, keepdim=True), 0.0)
        gradients[side] = sums @ table.transpose(0, 1)
        gradients[name] = torch.einsum("bhlp,bhld->phd", sums, x)
    if position_bias is not None:
        gradients["position_bias"] = by_row(dterms, position_bias).sum((0, 2)).t()
    if segment_scores is not None:
        differ = (segments[0].unsqueeze(2) != segments[1].unsqueeze(1)).unsqueeze(1)
        gradients["segment_scores"] = dterms.masked_fill(~differ, 0.0).sum(-1)
    return gradients


def softmax_backward(dweights: Tensor, weights: Tensor) -> Tensor:
    """Compute the gradient of the scores from the gradient of the softmax weights."""
    # Autograd calls the same function of torch, which computes in fp32 inside. In 16 bits, the
    # products dweights * weights would be rounded before they are summed and subtracted.
    return torch._softmax_backward_data(dweights, weights, -1, weights.dtype)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def normalised_sum(x, residual, x_bias, seed, dropout_p):
    """Compute the sum that a norm normalizes, residual + dropout(x + x_bias), in at least fp32."""
    total = x.to(_statistics_dtype(x))
    if x_bias is not None:
        total = total + x_bias
    total = reference.dropout(total, dropout_p, seed, tuple(total.shape))
    return total if residual is None else total + residual


def layer_norm_forward(x, weight, bias, residual, x_bias, seed, dropout_p, eps):
    """Compute the layer norm of residual + dropout(x + x_bias).

    Also return the mean and the reciprocal standard deviation of each row.
    """
    total = normalised_sum(x, residual, x_bias, seed, dropout_p)
    mean = total.mean(dim=-1, keepdim=True)
    centred = total - mean
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(dy, x, weight, mean, rstd, residual, x_bias, seed, has_bias, dropout_p):
    """Compute the gradients of the sum residual + dropout(x + x_bias), of x and of the parameters.

    The results are the gradients of the sum, of x, weight, bias and x_bias, in this order. Without
    dropout, the gradient of x equals the gradient of the sum, and the result for x is empty. The
    gradients of an absent bias and an absent x_bias are empty too.
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
    """Compute the RMS norm of x + residual, and the reciprocal root mean square of each row."""
    total = normalised_sum(x, residual, None, None, 0.0)
    rstd = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (total * rstd * weight).to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward(dy, x, weight, rstd, residual):
    """Compute the gradients of the sum x + residual and of weight."""
    total = normalised_sum(x, residual, None, None, 0.0)
    dy, rstd = dy.to(total.dtype), rstd[:, None]
    normalised = total * rstd
    dnormalised = dy * weight
    along = (dnormalised * normalised).mean(dim=-1, keepdim=True)
    dsum = rstd * (dnormalised - normalised * along)
    return dsum.to(x.dtype), (dy * normalised).sum(dim=0).to(weight.dtype)


def rotary_forward(x, cos, sin, heads):
    """Rotate the first `heads` heads by the angles whose cosines and sines are `cos` and `sin`."""
    return reference.rotary(x, cos, sin, heads=heads)


def rotary_backward(dy, cos, sin, heads):
    """Rotate the first `heads` heads of the gradient `dy` back by the angles of the forward."""
    return reference.rotary(dy, cos, -sin, heads=heads)


def linear_gelu_forward(x, weight, bias, activation, save):
    """Return activation(h) and h = x Wᵀ + bias; h is empty unless `save` is True."""
    h = torch.nn.functional.linear(x, weight, bias)
    return reference.activate(h, activation), h if save else x.new_empty(0)


def activation_backward(da, h, sum_rows, activation):
    """Return the gradient of h, its sum over the rows (or None), and activation(h).

    The sum is None if `sum_rows` is False. All results are computed in at least fp32 and returned
    in the dtype of h.
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
