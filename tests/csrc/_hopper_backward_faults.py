"""Mistakes that tests insert into the PTX of the backward of attention for Hopper GPUs.

Each `Fault` is a mistake that the source could have. The numbers in its `which` count the matches
of its regular expression in the order of the PTX: the producer, the warp that zeroes keys, the
warps that prepare statistics, and the consumers. The consumers have the first tile, the next tiles
and the last products.
"""

from __future__ import annotations

from _broken_ptx import Fault
from _hopper_faults import ARRIVE, REGISTERS, WAIT

# Each wait is named by the event that the wait is for. The order is the order of the PTX.
WAITS = (
    "producer: keys empty", "producer: tile empty", "mask: keys landed", "statistics: tile landed",
    "consumer: keys full", "first tile: landed", "first tile: statistics", "next tile: landed",
    "next tile: ds", "next tile: statistics", "last products: ds",
)  # fmt: skip
ARRIVALS = (
    "mask: keys full", "statistics full", "first tile: ds", "next tile: ds",
    "next tile: tile empty", "last products: tile empty", "keys empty",
)  # fmt: skip
GROUPS = (
    "first tile: scores", "first tile: weights", "next tile: scores", "next tile: weights",
    "next tile: dv and dk", "next tile: dq", "last products: dv and dk", "last products: dq",
)  # fmt: skip
ENDS = (
    ("first tile: scores", 2), ("first tile: weights", 1), ("next tile: scores", 4),
    ("next tile: weights", 3), ("next tile: gradients", 1), ("last products", 1),
)  # fmt: skip

FAULTS = [
    *REGISTERS,
    *(
        Fault(f"no wait ({name})", WAIT, "setp.eq.u32 p, 0, 0;", (i,))
        for i, name in enumerate(WAITS)
    ),
    Fault(
        "the other parity of ds",
        WAIT,
        r".reg .b32 q;\nxor.b32 q, \2, 1;\n"
        r"mbarrier.try_wait.parity.shared::cta.b64 p, [\1], q;",
        (8,),
    ),
    *(Fault(f"no arrival ({name})", ARRIVE, "", (i,)) for i, name in enumerate(ARRIVALS)),
    *(
        Fault(f"no end of a group of products ({name})", r"wgmma\.commit_group\S*;", "", (i,))
        for i, name in enumerate(GROUPS)
        if name != "last products: dv and dk"
    ),
    *(
        Fault(
            f"a wait for products too early ({name})",
            r"wgmma\.wait_group\S* \d;",
            f"wgmma.wait_group.sync.aligned {pending};",
            (i,),
        )
        for i, (name, pending) in enumerate(ENDS)
    ),
    *(
        Fault(f"no wgmma.fence ({name})", r"wgmma\.fence\.sync\.aligned;", "", (i,))
        for i, name in ((0, "first tile"), (1, "next tile"), (4, "last products"))
    ),
    Fault("no barrier after the initialisation", r"bar\.sync \t0;", ""),
    *(
        Fault(f"no fence ({name})", r"fence\.proxy\.async\.shared::cta;", "", (i,))
        for i, name in enumerate(("zeroed keys", "first ds", "next ds"))
    ),
    *(
        Fault(f"no barrier of the warp ({name})", r"bar\.warp\.sync \t-1;", "", (i,))
        for i, name in ((-7, "zeroed keys"), (-6, "statistics"), (-5, "first ds"), (-4, "next ds"))
    ),
    Fault("two places for ds", r"(setp\.eq\.s32 \t%p\d+, %r\d+, )3;", r"\g<1>2;"),
    Fault("the bytes of out are expected in every block of keys", r"24576, 16384", "24576, 24576"),
    Fault("descriptors have no swizzle", "4611686293305360384", "274877972480"),
    Fault("groups of eight rows are too near", "4611686293305360384", "4611686155866406912"),
    Fault("ds is not transposed", r"(m64n32k16[^;]*p, 1, 1, )1, 1;", r"\g<1>0, 1;"),
    Fault("the keys of dq are not transposed", r"(m64n32k16[^;]*p, 1, 1, )1, 1;", r"\g<1>1, 0;"),
    Fault("dout and queries are not transposed", r"(m64n64k16[^;]*p, 1, 1, )1;", r"\g<1>0;"),
    Fault(
        "the first product of a tile adds",
        r"setp\.ne\.b32 p, %r\d+, 0;(\s+wgmma\S+m64n64k16)",
        r"setp.ne.b32 p, 1, 0;\1",
        (8,),
    ),
    Fault(
        "dq begins anew in each block of keys",
        r"setp\.ne\.b32 p, %r\d+, 0;(\s+wgmma\S+m64n32k16)",
        r"setp.ne.b32 p, 0, 0;\1",
        (0, 8),
    ),
    *(
        Fault(
            f"exchanged registers of the {name}",
            r"(m64n64k16[^;]*\}, \{)(%r\d+), (%r\d+)",
            r"\1\3, \2",
            (i,),
        )
        for i, name in ((4, "keys"), (8, "weights"), (12, "gradients"))
    ),
    Fault("a row too many of each sequence", r"\b1073741824;", "1073741825;", (1, 2)),
    Fault(
        "hidden weights stay", r"selp\.f32 \t(%f\d+), (%f\d+), 0fFF800000,", r"selp.f32 \1, \2, \2,"
    ),
    Fault("a query without a key has infinite weights", "0f7F800000", "0fFF800000"),
    Fault(
        "delta misses half of a row",
        r"(shfl\.sync\.bfly\.b32 \t%r\d+\|%p\d+, %r\d+, )%r\d+,",
        r"\g<1>0,",
        (2,),
    ),
]  # fmt: skip

# For these changes, the PTX machine reports no error, because the changed kernels are still right.
UNCAUGHT = [
    # The fence before the scores covers these registers too; only ptxas requires a second fence.
    *(
        Fault(f"no wgmma.fence ({name})", r"wgmma\.fence\.sync\.aligned;", "", (i,))
        for i, name in ((2, "next tile: dv"), (3, "next tile: dq"), (5, "last products: dq"))
    ),
    # The last wait is for all products, so the grouping of the products does not matter.
    Fault("one group of the last products", r"wgmma\.commit_group\S*;", "", (6,)),
]
