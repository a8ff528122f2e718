"""Mistakes in copies, barriers and wgmma that tests insert into the PTX of attention for Hopper.

Each `Fault` is a mistake that the source could have. The numbers in its `which` count the matches
of its regular expression in the order of the PTX: the producer, the warp that zeroes values, and
the consumers. The consumers have the first tile, the other tiles, the last product and the store.
"""

from __future__ import annotations

from _broken_ptx import Fault

WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[(%r\d+)\], (%r\d+);"
# Each wait is named by the event that the wait is for. The order is the order of the PTX.
WAITS = (
    "producer: queries empty", "producer: keys empty", "producer: values empty",
    "mask: keys empty", "mask: values landed", "consumer: queries full",
    "first tile: keys full", "next tile: keys full", "next tile: values full",
    "last product: values full",
)  # fmt: skip
ARRIVE = r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
ARRIVALS = (
    "mask: keys full", "mask: values full", "queries of the last item",
    "queries of the last item, no keys", "first tile: keys", "next tile: keys",
    "next tile: values", "last product: values",
)  # fmt: skip
PARTS = ("first tile", "next tile: scores", "next tile: sums", "last product")

# The first group of four warps releases registers, and the two other groups take them. A block of
# 384 threads owns 168 registers per thread, and the groups use all of them.
REGISTERS = [
    Fault(
        "groups take more registers than the block owns",
        r"setmaxnreg\.inc\.sync\.aligned\.u32 224;",
        "setmaxnreg.inc.sync.aligned.u32 232;",
    ),
    Fault("the first group gives no registers", r"setmaxnreg\.dec\.sync\.aligned\.u32 56;", ""),
]

FAULTS = [
    *REGISTERS,
    *(
        Fault(f"no wait ({name})", WAIT, "setp.eq.u32 p, 0, 0;", (i,))
        for i, name in enumerate(WAITS)
    ),
    *(
        Fault(
            f"the other parity ({name})",
            WAIT,
            r".reg .b32 q;\nxor.b32 q, \2, 1;\n"
            r"mbarrier.try_wait.parity.shared::cta.b64 p, [\1], q;",
            (i,),
        )
        for i, name in enumerate(WAITS)
    ),
    *(Fault(f"no arrival ({name})", ARRIVE, "", (i,)) for i, name in enumerate(ARRIVALS)),
    *(
        Fault(f"no wgmma.fence ({name})", r"wgmma\.fence\.sync\.aligned;", "", (i,))
        for i, name in enumerate(PARTS)
        if name != "next tile: sums"
    ),
    *(
        Fault(f"no end of a group of products ({name})", r"wgmma\.commit_group\S*;", "", (i,))
        for i, name in enumerate(PARTS)
    ),
    *(
        Fault(f"a wait for products too early ({name})", r"wgmma\.wait_group\S* (\d);", new, (i,))
        for i, (name, new) in enumerate(
            (
                ("first tile", "wgmma.wait_group.sync.aligned 1;"),
                ("next tile: scores", "wgmma.wait_group.sync.aligned 2;"),
                ("next tile: sums, grown", "wgmma.wait_group.sync.aligned 1;"),
                ("next tile: sums", "wgmma.wait_group.sync.aligned 1;"),
                ("last product", "wgmma.wait_group.sync.aligned 1;"),
            )
        )
    ),
    Fault("no barrier after the initialisation", r"bar\.sync \t0;", ""),
    Fault("no fence after zeroed values", r"fence\.proxy\.async\.shared::cta;", "", (0,)),
    Fault("no fence before the store", r"fence\.proxy\.async\.shared::cta;", "", (1,)),
    Fault("no barrier of the warp before the store", r"bar\.warp\.sync \t-1;", "", (-1,)),
    Fault("no barrier of the warp after zeroed values", r"bar\.warp\.sync \t-1;", "", (0,)),
    Fault("no group of stores", r"cp\.async\.bulk\.commit_group;", ""),
    Fault(
        "no wait for the store before its memory is given back",
        r"cp\.async\.bulk\.wait_group\.read 0;",
        "",
        (0, 1),
    ),
    Fault("no wait for the store at the end", r"cp\.async\.bulk\.wait_group\.read 0;", "", (-1,)),
    Fault("no turn of the other group", r"bar\.arrive %r\d+, %r\d+;", "", (0,)),
    Fault(
        "a group does not wait for its turn",
        r"bar\.sync (%r\d+), (%r\d+);",
        r"bar.arrive \1, \2;",
        (1,),
    ),
    Fault("a turn is never given", r"bar\.arrive %r\d+, %r\d+;", "", (2,)),
    Fault("the descriptor of the scores has no swizzle", "4611686293305360384", "274877972480"),
    Fault("the descriptor of the values has no swizzle", "4611686293372403712", "274945015808"),
    Fault("groups of eight rows are too near", "4611686293305360384", "4611686155866406912"),
    Fault("the values are not transposed", r"(m64n64k16[^;]*p, 1, 1, )1;", r"\g<1>0;"),
    Fault(
        "the keys are transposed",
        r"(m64n128k16[^;]*p, 1, 1, 0, )0;",
        r"\g<1>1;",
    ),
    Fault(
        "the first product of a tile adds",
        r"(setp\.ne\.b32 p, )%r\d+, 0;",
        r"\g<1>1, 0;",
        (0, 4),
    ),
    Fault(
        "exchanged registers of the weights",
        r"(m64n64k16[^;]*\}, \{)(%r\d+), (%r\d+)",
        r"\1\3, \2",
        (0,),
    ),
    Fault("a row too many of each sequence", r"\b1073741824;", "1073741825;", (0, 2)),
    Fault("the store of a row too many", r"\b1073741824;", "1073741823;", (-1,)),
    Fault(
        "hidden scores stay", r"selp\.f32 \t(%f\d+), 0fFF800000, (%f\d+),", r"selp.f32 \1, \2, \2,"
    ),
    Fault("no lower bound of an exponent", "0fC2FE0000", "0fC4FE0000"),
    Fault("another constant of the rounding", "0f4B400000", "0f4B000000"),
]

# For these changes, the PTX machine reports no error.
UNCAUGHT = [
    # In the PTX machine, each warp of a wgmma reads only its own 16 rows of the left operand, so no
    # warp can overwrite the queries of another warp. NVIDIA does not document this for a GPU.
    Fault(
        "no barrier before out is written over the queries", r"bar\.sync %r\d+, %r\d+;", "", (2,)
    ),
]
