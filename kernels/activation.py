"""Helpers of the feed-forward kernels: activations with their derivatives, addition of the bias.

The activations are GELU (Hendrycks and Gimpel 2016) by erf or by tanh, ReLU and SiLU. They are
computed in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.common import LOG2E, exponential, narrow
from fastbert.kernels.tiles import gemm_path, target_of

INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
# sqrt(2 / pi) and the cubic coefficient of the tanh form of GELU
TANH_LINEAR = tl.constexpr(0.7978845608028654)
TANH_CUBIC = tl.constexpr(0.044715)
# An epilogue works on at most this many columns of a tile at once, so that it does not spill
# registers.
LARGEST_PART = tl.constexpr(32)


@triton.jit
def _power(x, factor: tl.constexpr, dtype: tl.constexpr):
    """Return exp(factor · x), which must be at most 1, with the accuracy that `dtype` can hold."""
    if dtype == tl.float32:
        return exponential(x * factor)
    else:
        return tl.exp2(x * (factor * LOG2E))


@triton.jit
def _reciprocal(x, dtype: tl.constexpr):
    """Return 1 / x for x >= 1, with the accuracy that `dtype` can hold."""
    if dtype == tl.float32:
        # One step of Newton's method corrects the error of 2 ulp. x is limited, because the step
        # would give NaN at infinity.
        x = tl.minimum(x, 1e38)
        r = 1.0 / x
        return tl.fma(r, tl.fma(-x, r, 1.0), r)
    else:
        return 1.0 / x


@triton.jit
def _normal_tail(a, dtype: tl.constexpr):
    """Return the tail 1 - Φ(a) of the standard normal distribution, and exp(-a² / 2), for a >= 0.

    As in csrc/normal_tail.h, the tail is exp(-a² / 2) r P(1 - 8 r) with r = 1 / (a + 4) and a
    minimax polynomial P, whose relative error is 9e-9. This form needs half the instructions of erf
    and no branch, and the density of the normal distribution needs the same exponential.
    """
    bell = _power(a * a, -0.5, dtype)
    r = _reciprocal(a + 4.0, dtype)
    t = 1.0 - 8.0 * r
    p = -1.319718455e-04 * t + 1.793541397e-04
    p = p * t + 1.569923476e-03
    p = p * t - 3.512553890e-03
    p = p * t - 7.525271317e-03
    p = p * t + 6.040383107e-02
    p = p * t - 1.865234415e-01
    p = p * t + 3.871369011e-01
    p = p * t - 6.078965883e-01
    p = p * t + 7.552851354e-01
    return bell * (p * r), bell


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr, dtype: tl.constexpr):
    """Return f(x) and f'(x) in fp32, with the accuracy that `dtype` can hold.

    f is FUNCTION: "gelu", "gelu_tanh", "relu" or "silu".
    """
    if FUNCTION == "relu":
        value = tl.where(x < 0.0, 0.0, x)
        # As in torch, the slope at NaN is 1.
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif FUNCTION == "gelu":
        tail, bell = _normal_tail(tl.abs(x), dtype)
        share = tl.where(x < 0.0, tail, 1.0 - tail)
        value = x * share
        slope = share + x * (INVERSE_SQRT_2PI * bell)
    else:
        # f(x) = x s with the sigmoid s = 1 / (1 + exp(-z)), and f'(x) = s + dz s (1 - s). dz is x
        # times the derivative of z. With e = exp(-|z|), the product s (1 - s) is e / (1 + e)²,
        # which has no cancellation in the tails. x is set to 0 in dz if it is large, because dz may
        # be infinite where e is 0, and 0 * inf would be NaN.
        bounded = tl.where(tl.abs(x) < 128.0, x, 0.0)
        if FUNCTION == "gelu_tanh":
            # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
            z = 2.0 * TANH_LINEAR * x * (1.0 + TANH_CUBIC * x * x)
            dz = 2.0 * TANH_LINEAR * bounded * (1.0 + 3.0 * TANH_CUBIC * bounded * bounded)
        else:
            z = x
            dz = bounded
        e = _power(tl.abs(z), -1.0, dtype)
        inverse = _reciprocal(1.0 + e, dtype)
        share = tl.where(x < 0.0, e, 1.0) * inverse
        value = x * share
        slope = share + dz * (e * inverse * inverse)
    return value, slope


@triton.jit
def activate(x, FUNCTION: tl.constexpr, dtype: tl.constexpr):
    return value_and_slope(x, FUNCTION, dtype)[0]


@triton.jit
def biased(h, bias_ptr, cols, inside, HAS_BIAS: tl.constexpr):
    """Return h + bias; the bias is read only at columns where `inside` is true."""
    if HAS_BIAS:
        h += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    return h


@triton.jit
def store_narrow(pointer, offsets, x, inside):
    tl.store(pointer + offsets, narrow(x, pointer.dtype.element_ty), mask=inside)


def path_name(path: str | None, x: Tensor, columns: int) -> str:
    """Return `path`, or the choice of `gemm_path` for a product of x with `columns` columns."""
    if path is None:
        return gemm_path(x.shape[0], columns, x.shape[1], x.dtype, target_of(x)).name
    if path not in ("fused", "library"):
        raise ValueError(f'path: got {path!r}, allowed: None, "fused" or "library"')
    return path
