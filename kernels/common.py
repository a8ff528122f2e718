"""Constants and helper functions of the kernels.

The functions round in the same way on a GPU and in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton decides at import whether @jit runs kernels in the interpreter. The workarounds below
# depend on this flag.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 is LN2_HIGH + LN2_LOW. In fp32, LN2_HIGH times an integer below 2**9 is exact.
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.42860682030941723e-6)
INFINITY = tl.constexpr(float("inf"))


# If this number is added to an fp32 value of a magnitude below 2**22, the lowest bits of the sum
# are the integer that is nearest to the value.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def exponential(x):
    """Return exp(x) in fp32 for x <= 88, with an error of 1 ulp; the result is 0 below -87.7.

    ``tl.exp`` and ``tl.exp2`` compile to an instruction with an error of 2 ulp. In a sum over a
    row, these errors may add up, because they may have the same sign for all elements. Here, x is
    reduced by a multiple of ln 2. The polynomial of Cephes (Moshier 1989) approximates the
    exponential of the rest, which is then multiplied by a power of two. The operations are written
    as FMAs, so that every kernel gets the same bits. exp(-inf) is 0, and exp(NaN) is NaN.
    """
    # Below this bound, the exponent would overflow into the sign bit.
    x = tl.where(x < -88.0, -88.0, x)
    shifted = tl.fma(x, LOG2E, ROUNDER)
    powers = shifted - ROUNDER
    rest = tl.fma(powers, -LN2_HIGH, x)
    rest = tl.fma(powers, -LN2_LOW, rest)
    p = tl.fma(rest, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, rest, 8.3334519073e-3)
    p = tl.fma(p, rest, 4.1665795894e-2)
    p = tl.fma(p, rest, 1.6666665459e-1)
    p = tl.fma(p, rest, 5.0000001201e-1)
    p = tl.fma(p, rest * rest, rest) + 1.0
    # The exponent of the power of two is in the lowest 9 bits of `shifted`. The shift moves these
    # bits to the exponent bits of an fp32 number.
    bits = (shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000
    return p * bits.to(tl.float32, bitcast=True)


@triton.jit
def log1p(x):
    """Return log(1 + x) in fp32 for x >= 0, with an error of 2 ulp.

    ``tl.log`` compiles to an instruction whose error is absolute near 1, so that the logarithm of
    1 + x would have few correct bits for a small x. Here, u = 1 + x is rounded, and (x - (u - 1)) /
    u corrects log(u) for this rounding error. The polynomial for the logarithm of 1 + f, with f
    between sqrt(1/2) - 1 and sqrt(2) - 1, is that of logf in Cephes (Moshier 1989). The operations
    are written as FMAs, so that every kernel gets the same bits. log(1 + inf) is inf.
    """
    is_finite = x < INFINITY
    x = tl.where(is_finite, x, 0.0)
    u = x + 1.0
    bits = u.to(tl.int32, bitcast=True)
    # The shift is arithmetic, and u >= 1 keeps the difference positive.
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    powers = exponent.to(tl.float32)
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    square = f * f
    rest = tl.fma(powers, LN2_LOW, tl.div_rn(x - (u - 1.0), u))
    rest = tl.fma(square, -0.5, tl.fma(p * f, square, rest))
    logarithm = tl.fma(powers, LN2_HIGH, f + rest)
    return tl.where(is_finite, logarithm, INFINITY)


# Up to version 3.8, Triton leaves out the fence between cp.async and the wgmma that reads the
# copied tile.
LACKS_FENCE = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)


@tl.core.builtin
def proxy_fence(_semantic=None):
    """Make writes to shared memory visible to the matrix units of sm_90 and newer.

    The PTX manual requires ``fence.proxy.async`` between generic writes and asynchronous reads.
    This function emits the fence only if Triton leaves it out (LACKS_FENCE). For GPUs before sm_90,
    the function does nothing.
    """
    if LACKS_FENCE and int(_semantic.builder.options.arch.removeprefix("sm")) >= 90:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic,
        )  # fmt: skip


@tl.core.builtin
def _hidden_zero(_semantic=None):
    return tl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@triton.jit
def in_place(x):
    """Return the integer tensor `x`, which the compiler then computes where it is used.

    The compiler computes a tensor that is the same in each step of a loop before the loop, and
    keeps it in registers. If the registers do not suffice for that, they spill.
    """
    if INTERPRETED:
        return x
    else:
        return x + _hidden_zero()


@triton.jit
def dot(a, b, acc):
    """Return acc + a b in fp32; fp32 operands are multiplied in IEEE fp32, never in tf32."""
    if INTERPRETED:
        # The interpreter would multiply bf16 operands as the integers of their bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        proxy_fence()
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round x from fp32 to the nearest value of `dtype`, with ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates to bf16. After the bits are rounded here, the truncation is
        # exact.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
