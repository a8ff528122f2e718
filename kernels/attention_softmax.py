"""From products of queries and keys to logits, weights and the log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from fastbert.kernels.common import INFINITY, INTERPRETED, LN2, LN2_HIGH, LN2_LOW, LOG2E, dot


@triton.jit
def logits(
    products, rows, cols, allowed, bias_ptr, scale, q_len, k_len, stride_bias_row, stride_bias_key,
    HAS_BIAS: tl.constexpr, SCALING: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Products q kᵀ as logits: raw (SCALING 0), or scaled and biased."""
    if SCALING:
        products = products * scale
    if HAS_BIAS:
        offsets = rows.to(tl.int64) * stride_bias_row + cols.to(tl.int64) * stride_bias_key
        inside = (rows < q_len) & (cols < k_len)
        products += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if IS_MASKED:
        products = tl.where(allowed, products, -INFINITY)
    return products


@triton.jit
def transposed_product(a, b):
    """(a bᵀ)ᵀ [rows of b, rows of a], rounded as a bᵀ is.

    In fp32 the weights must be those whose statistics were taken. A GPU adds along the rows in
    order, whichever operand comes first; the library that multiplies in the interpreter does not.
    """
    if INTERPRETED:
        return tl.trans(dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32)))
    else:
        return dot(b, tl.trans(a), tl.zeros([b.shape[0], a.shape[0]], tl.float32))


@triton.jit
def exponentials(scores, maximum, scale, SCALING: tl.constexpr):
    """exp of logits less their maximum (or log-sum-exp), which broadcasts.

    Raw scores take the scale and log2(e) as one factor, and then maximum is in units of log2.
    Scaled scores are subtracted first: a bias of finfo.min times log2(e) would overflow.
    """
    if SCALING == 0:
        return tl.exp2(scores * (scale * LOG2E) - maximum)
    elif SCALING == 1:
        return tl.exp2((scores - maximum) * LOG2E)
    else:
        # The product with log2(e) rounds by up to |x| 2**-24, which fp32 notices: take off whole
        # powers of two first. Where exp is 0 anyway, -inf - -inf must not arise.
        x = scores - maximum
        x = tl.where(x < -150.0, -150.0, x)
        powers = tl.floor(x * LOG2E + 0.5)
        rest = (x - powers * LN2_HIGH) - powers * LN2_LOW
        return tl.exp2(powers) * tl.exp2(rest * LOG2E)


@triton.jit
def online_softmax(scores, maximum, scale, SCALING: tl.constexpr, IS_GUARDED: tl.constexpr):
    """One step of the running softmax: weights [M, N], new maximum [M], factor of the past [M].

    A row without any allowed key so far has maximum -inf; IS_GUARDED keeps -inf - -inf out of it.
    """
    tile_maximum = tl.max(scores, axis=1)
    if SCALING == 0:
        tile_maximum = tile_maximum * (scale * LOG2E)
    new_maximum = tl.maximum(maximum, tile_maximum)
    reference = new_maximum
    if IS_GUARDED:
        reference = tl.where(new_maximum == -INFINITY, 0.0, new_maximum)
    weights = exponentials(scores, reference[:, None], scale, SCALING)
    if SCALING == 0:
        rescale = tl.exp2(maximum - reference)
    else:
        rescale = exponentials(maximum, reference, scale, SCALING)
    return weights, new_maximum, rescale


@triton.jit
def log_sum_exp(maximum, total, SCALING: tl.constexpr):
    """Natural logarithm of the sum; -inf where there was nothing to sum."""
    empty = total == 0.0
    logarithm = tl.log2(tl.where(empty, 1.0, total))
    if SCALING:
        result = maximum + logarithm * LN2
    else:
        result = (maximum + logarithm) * LN2
    return tl.where(empty, -INFINITY, result)
