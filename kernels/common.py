"""Constants, and products and rounding that agree between a GPU and Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton decides at import whether @jit interprets. The workarounds below depend on this flag.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 = LN2_HIGH + LN2_LOW. In fp32, LN2_HIGH times an integer below 2**9 is exact.
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.42860682030941723e-6)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def dot(a, b, acc):
    """Return acc + a b in fp32; fp32 operands are multiplied in IEEE fp32, never in tf32."""
    if INTERPRETED:
        # The interpreter would multiply the bit patterns of bf16 operands.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round x from fp32 to dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates to bf16. Its cast is exact after the bits are rounded here.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
