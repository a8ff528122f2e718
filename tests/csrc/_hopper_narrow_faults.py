"""Mistakes for the parts of attention for Hopper that differ between head dim 32 and 64.

At head dim 32, rows of 64 bytes have a different layout. In the backward, the values are a left
operand in registers, and the two groups of warps compute the products of dq in turns.
"""

from __future__ import annotations

from _broken_ptx import Fault
from _hopper_faults import WAIT

# With this branch, a group of warps skips the product dq of a tile if the other group computes it.
# The branch occurs before the products, before the store, and before the last products.
TURN = r"setp\.ne\.s32 (\t%p\d+, %r\d+, %r\d+;(?:\s+\.loc[^\n]*)*\s+@%p\d+ bra)"

LAYOUT = [
    Fault(
        "descriptors have the swizzle of rows of 128 bytes",
        r"-9223371899415756800",
        "4611686155866406912",
    ),
    Fault(
        "groups of eight rows are too far apart", r"-9223371899415756800", "-9223371761976803328"
    ),
]
FORWARD_FAULTS = [
    *LAYOUT,
    Fault("the values are not transposed", r"(m64n32k16[^;]*p, 1, 1, )1;", r"\g<1>0;"),
]
BACKWARD_FAULTS = [
    *LAYOUT,
    Fault("dout and queries are not transposed", r"(m64n32k16[^;]*p, 1, 1, )1;", r"\g<1>0;"),
    Fault("ds is not transposed", r"(m64n32k16[^;]*p, 1, 1, )1, 1;", r"\g<1>0, 1;"),
    Fault("the keys of dq are not transposed", r"(m64n32k16[^;]*p, 1, 1, )1, 1;", r"\g<1>1, 0;"),
    Fault(
        "exchanged registers of the values",
        r"(m64n64k16[^;]*\}, \{)(%r\d+), (%r\d+)",
        r"\1\3, \2",
        (2,),
    ),
    *(
        Fault(f"a group takes the other's turn ({name})", TURN, r"setp.eq.s32 \1", (i,))
        for i, name in enumerate(("products", "store", "last products"))
    ),
    Fault("no wait for ds of the other group", WAIT, "setp.eq.u32 p, 0, 0;", (8,)),
    Fault("no end of the products of dq", r"wgmma\.commit_group\S*;", "", (5,)),
    Fault("two places for ds", r"(setp\.eq\.s32 \t%p\d+, %r\d+, )3;", r"\g<1>2;"),
]
