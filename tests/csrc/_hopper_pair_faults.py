"""Mistakes in the handling of (query, key) masks, which tests insert into attention for Hopper.

Each `Fault` is a mistake that the source could have. The numbers in its `which` count the matches
of its regular expression in the order of the PTX: the producer, the warp that publishes the mask or
zeroes keys, the warps that prepare statistics, and the consumers.
"""

from __future__ import annotations

from _broken_ptx import Fault
from _hopper_faults import ARRIVE, WAIT

NEVER = "setp.eq.u32 p, 0, 0;"
SKIP = r"vote\.sync\.all\.pred (\t%p\d+), ([^;]*);"
LINES = r"(?:\s+\.loc[^\n]*)*\s+"

# These mistakes are inserted into the consumers of the forward and of the backward.
HIDING = [
    Fault("all pairs are attended", SKIP, r"setp.eq.u32 \1, 0, 0;"),
    Fault("a warp skips a tile that one lane attends whole", SKIP, r"vote.sync.any.pred \1, \2;"),
    Fault("the next key of a pair", r"(and\.b32 +\t%r\d+, %r\d+, )16777216;", r"\g<1>33554432;"),
    Fault(
        "hidden scores stay", r"selp\.f32 \t(%f\d+), 0fFF800000, (%f\d+),", r"selp.f32 \1, \2, \2,"
    ),
]
FORWARD = [
    *HIDING,
    Fault("no wait for a free place of the pairs", WAIT, NEVER, (3,)),
    Fault("no wait for the values", WAIT, NEVER, (4,)),
    Fault("no arrival of the pairs", ARRIVE, "", (0,)),
    Fault(
        "no barrier of the warp after the pairs",
        rf"(redux\.sync\.or\.b32 [^;]*;{LINES})bar\.warp\.sync \t-1;",
        r"\1",
    ),
    Fault(
        "a lane's own union of the pairs",
        r"redux\.sync\.or\.b32 (%r\d+), (%r\d+), %r\d+;",
        r"mov.b32 \1, \2;",
        (0,),
    ),
    Fault(
        "the pairs of 32 queries are missing", r"st\.shared\.v4\.u32 \t\[%r\d+\+185376\][^;]*;", ""
    ),
    Fault("both rows of a lane have the pairs of one", r"\+184992\]", "+184864]"),
    Fault(
        "the pairs of the other warps",
        r"(ld\.shared\.v4\.u32 [^;]*\+)(184864|184992)",
        r"\g<1>185376",
    ),
]
BACKWARD = [
    *HIDING,
    Fault("no wait for a free place of the pairs", WAIT, NEVER, (3,)),
    Fault("no wait for the copy of the pairs", r"cp\.async\.wait_group 0;", ""),
    Fault("the pairs are not copied", r"cp\.async\.cg[^;]*;", ""),
    Fault(
        "keys that no query attends are not zeroed",
        r"vote\.sync\.ballot\.b32 (\t%r\d+), [^;]*;",
        r"mov.b32 \1, -1;",
    ),
    Fault(
        "keys of the first 32 queries alone",
        r"ld\.global\.v2\.u32 \t\{(%r\d+), (%r\d+)\}, ([^;]*);",
        r"ld.global.u32 \1, \3;\nmov.b32 \2, 0;",
    ),
    Fault("both rows of a lane have the pairs of one", r"\+219664\]", "+219600]"),
    Fault(
        "both words of a lane are the first",
        r"ld\.shared\.v2\.u32 \t\{(%r\d+), (%r\d+)\}, \[(%r\d+\+219(?:600|664))\];",
        r"ld.shared.u32 \1, [\3];\nmov.b32 \2, \1;",
    ),
]
# These mistakes are inserted into the kernel that packs a mask into bits.
PACKING = [
    Fault(
        "keys beyond the end are read", r"min\.s32 (\t%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;"
    ),
    Fault(
        "queries beyond the end are read",
        r"selp\.b64 (\t%rd\d+), (%rd\d+), %rd\d+, %p\d+;",
        r"mov.b64 \1, \2;",
    ),
    Fault(
        "columns beyond the end stay", r"selp\.b32 (\t%r\d+), -1, %r\d+, %p\d+;", r"mov.b32 \1, -1;"
    ),
    Fault("a pair is the next query's", r"(setp\.eq\.s32 \t%p\d+, %r\d+, )17;", r"\g<1>18;"),
    Fault(
        "all sequences have the first mask",
        r"mul\.lo\.s64 (\t%rd\d+), [^;]*;",
        r"mov.b64 \1, 0;",
        (0,),
    ),
]
