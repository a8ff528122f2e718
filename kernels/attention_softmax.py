"""Logits, softmax weights and the log-sum-exp from products of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl

from fastbert.kernels.common import INFINITY, INTERPRETED, LN2, LOG2E, dot, exponential


@triton.jit
def logits(
    products, rows, cols, allowed, bias_ptr, scale, q_len, k_len, stride_bias_row, stride_bias_key,
    HAS_BIAS: tl.constexpr, SCALING: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Return the logits from `products` q kᵀ, which are -inf where `allowed` is false.

    If SCALING is 0, the logits are not scaled. Otherwise they are scaled, and a bias is added if
    there is one.
    """
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
    """Return (a bᵀ)ᵀ, of shape [rows of b, rows of a], with the same rounding as a bᵀ.

    In fp32, the softmax weights must equal the weights from which the row statistics were computed.
    A GPU sums in the same order for a bᵀ and b aᵀ. The matrix product of Triton's interpreter does
    not, so a bᵀ is computed and transposed there.
    """
    if INTERPRETED:
        return tl.trans(dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32)))
    else:
        return dot(b, tl.trans(a), tl.zeros([b.shape[0], a.shape[0]], tl.float32))


@triton.jit
def exponentials(scores, maximum, scale, SCALING: tl.constexpr):
    """Return exp(scores - maximum); `maximum` broadcasts and may be the log-sum-exp of a row.

    For unscaled scores (SCALING 0), the function applies the scale. `maximum` then belongs to the
    scaled scores and is already multiplied by log2(e). For scaled scores, `maximum` is subtracted
    before the product with log2(e), because a bias of finfo.min times log2(e) would overflow.
    """
    if SCALING == 0:
        return tl.exp2(scores * (scale * LOG2E) - maximum)
    elif SCALING == 1:
        return tl.exp2((scores - maximum) * LOG2E)
    else:
        # The product of x = scores - maximum with log2(e) has an error of up to |x| 2**-24, which
        # is too large for fp32.
        return exponential(scores - maximum)


@triton.jit
def online_softmax(scores, maximum, scale, SCALING: tl.constexpr, IS_GUARDED: tl.constexpr):
    """Take one step of the running softmax over a tile of scores [M, N].

    A row without an allowed key in this tile and all earlier tiles has the maximum -inf. For such
    rows, IS_GUARDED avoids -inf - -inf, which is NaN.

    Returns:
        The weights [M, N], the new maximum [M], and the factor [M] by which sums over earlier tiles
        are multiplied.
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
def divided(x, total, SCALING: tl.constexpr):
    """Return x / total, correctly rounded if SCALING is 2 (fp32), and x where `total` is 0."""
    total = tl.where(total == 0.0, 1.0, total)
    if SCALING == 2:
        return tl.div_rn(tl.zeros_like(total) + x, total)
    else:
        return x / total


@triton.jit
def log_sum_exp(maximum, total, SCALING: tl.constexpr):
    """Return the natural log-sum-exp of each row; -inf for a row without an allowed key."""
    empty = total == 0.0
    logarithm = tl.log2(tl.where(empty, 1.0, total))
    if SCALING:
        result = maximum + logarithm * LN2
    else:
        result = (maximum + logarithm) * LN2
    return tl.where(empty, -INFINITY, result)
