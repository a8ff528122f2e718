"""Mistakes that tests insert into nvcc's PTX of the attention kernels for sm_80 and later.

Each `Fault` is a mistake that the source could have. The numbers in its `which` count the matches
of its regular expression in the order of the PTX, which is the order of the source.
"""

from __future__ import annotations

from _broken_ptx import Fault

BARRIER = r"bar\.sync \t0;"
COMMIT = r"cp\.async\.commit_group;"
WAIT = r"cp\.async\.wait_group (\d);"
COPY = r"(cp\.async\.cg\S+ \[%r\d+\], \[%rd\d+\], 16), %r\d+;"
LOAD = r"(ldmatrix\S*\.x4)(\.shared)"
LOAD_TRANSPOSED = r"(ldmatrix\S*\.x4)\.trans"
LEFT = r"(mma\S* \{[^}]*\}, \{)(%r\d+), (%r\d+)"
SUMS = r"(mma\S* \{)(%f\d+), (%f\d+)"
STEP = r"xor\.b32(\s+%r\d+, %r\d+, (?:16|32|64|96|112);)"
BALLOT = r"vote\.sync\.ballot\.b32 (\t%r\d+), [^;]*;"
ROUNDING = r"cvt\.rn\.bf16x2"
# The suffix " pairs" names the kernel with dropout and a mask of (query, key) pairs.
FORWARD, FORWARD_PAIRS = "forward", "forward pairs"
BACKWARD, BACKWARD_PAIRS = "backward", "backward pairs"


# Each kernel has its own list of mistakes.
FAULTS = {
    FORWARD: [
        Fault("no barrier before a tile", BARRIER, ""),
        Fault("no wait for the copies", WAIT, ""),
        Fault("a wait that leaves one tile more", WAIT, "cp.async.wait_group 2;"),
        Fault("no end of the group of the first tile", COMMIT, "", (0,)),
        Fault("no end of the groups in the loop", COMMIT, "", (2,)),
        Fault("rows that do not exist are copied", COPY, r"\1, 16;"),
        Fault("queries are loaded transposed", LOAD, r"\1.trans\2", (0,)),
        Fault("keys are loaded transposed", LOAD, r"\1.trans\2", (2,)),
        Fault("values are not loaded transposed", LOAD_TRANSPOSED, r"\1", (0,)),
        Fault("exchanged registers of the queries", LEFT, r"\1\3, \2", (0,)),
        Fault("exchanged registers of the weights", LEFT, r"\1\3, \2", (-1,)),
        Fault("exchanged scores", SUMS, r"\1\3, \2", (0,)),
        Fault("exchanged sums", SUMS, r"\1\3, \2", (-1,)),
        Fault("a chunk of the queries without its permutation", STEP, r"add.s32\1", (0,)),
        Fault("a chunk of the keys without its permutation", STEP, r"add.s32\1", (3,)),
        Fault("a chunk of the values without its permutation", STEP, r"add.s32\1", (-1,)),
        Fault(
            "the maximum of two lanes instead of four",
            r"max\.f32(\s+%f\d+, %f\d+, %f\d+;)(?=\s+.loc[^\n]*\n\s+mul\.f32|\s+mul\.f32)",
            r"min.f32\1",
            (0,),
        ),
        Fault(
            "the maxima start at 0",
            r"(mov\.f32 \t%f\d+, )0fFF800000;",
            r"\g<1>0f00000000;",
        ),
        Fault(
            "sums are not rescaled",
            r"vote\.sync\.any\.pred \t(%p\d+), [^;]*;",
            r"setp.ne.u32 \1, 0, 0;",
            (0,),
        ),
        Fault(
            "hidden scores stay",
            r"selp\.f32 \t(%f\d+), 0fFF800000, (%f\d+),",
            r"selp.f32 \1, \2, \2,",
        ),
        Fault("copies ignore the mask", BALLOT, r"mov.u32 \1, -1;", (0, 1, 2)),
        Fault("scores ignore the mask", BALLOT, r"mov.u32 \1, -1;", (3,)),
        Fault("weights round toward zero", ROUNDING, "cvt.rz.bf16x2"),
        Fault(
            "no exchange before the store",
            r"shfl\.sync\.bfly\.b32 \t(%r\d+)\|%p\d+, (%r\d+), [^;]*;",
            r"mov.u32 \1, \2;",
            (-1,),
        ),
    ],
    FORWARD_PAIRS: [
        Fault("no barrier before values become 0", BARRIER, "", (1,)),
        Fault("no barrier after values became 0", BARRIER, "", (2,)),
        Fault(
            "the pairs of one lane decide",
            r"redux\.sync\.or\.b32 (%r\d+), (%r\d+), %r\d+;",
            r"mov.u32 \1, \2;",
        ),
        Fault(
            "decisions of dropout are not exchanged",
            r"shfl\.sync\.bfly\.b32 \t(%r\d+)\|%p\d+, (%r\d+), [^;]*;",
            r"mov.u32 \1, \2;",
            (4,),
        ),
    ],
    BACKWARD: [
        Fault("no barrier after the pointers", BARRIER, "", (0,)),
        Fault("no barrier after the attended keys", BARRIER, "", (1,)),
        Fault("no barrier before a tile", BARRIER, "", (2,)),
        Fault("no barrier after delta", BARRIER, "", (3,)),
        Fault("no barrier after ds", BARRIER, "", (4,)),
        Fault("no barrier before the next keys", BARRIER, "", (5,)),
        Fault("no wait for the copies", WAIT, "", (0,)),
        Fault("a wait that leaves one tile", WAIT, "cp.async.wait_group 1;", (0,)),
        Fault("no end of the group of the first tile", COMMIT, "", (0,)),
        Fault("no end of the groups in the loop", COMMIT, "", (1,)),
        Fault("rows that do not exist are copied", COPY, r"\1, 16;"),
        Fault("the keys ignore the mask", BALLOT, r"mov.u32 \1, -1;"),
        Fault("keys are loaded transposed", LOAD, r"\1.trans\2", (0,)),
        Fault("dout is loaded transposed", LOAD, r"\1.trans\2", (-1,)),
        Fault("dout is not loaded transposed", LOAD_TRANSPOSED, r"\1", (0,)),
        Fault("ds is not loaded transposed", LOAD_TRANSPOSED, r"\1", (16,)),
        Fault("exchanged registers of the keys", LEFT, r"\1\3, \2", (0,)),
        Fault("exchanged registers of ds", LEFT, r"\1\3, \2", (-1,)),
        Fault("exchanged sums of dq", SUMS, r"\1\3, \2", (-1,)),
        Fault("a chunk of the keys without its permutation", STEP, r"add.s32\1", (0,)),
        Fault("a chunk of ds without its permutation", STEP, r"add.s32\1", (-4,)),
        Fault(
            "the sums of dq start anew",
            r"add\.f32 \t(%f\d+), (%f\d+), (%f\d+);"
            r"(?=\s+(?:.loc[^\n]*\s+)?(?:mov\.f32|add\.f32|\$L))",
            r"mov.f32 \1, \2;",
            (-1,),
        ),
        Fault("ds rounds toward zero", ROUNDING, "cvt.rz.bf16x2"),
        Fault(
            "the gradient of a single key is rounded",
            r"selp\.f32 \t(%f\d+), 0f00000000, (%f\d+),",
            r"selp.f32 \1, \2, \2,",
        ),
    ],
    BACKWARD_PAIRS: [
        Fault(
            "decisions of dropout of another lane",
            r"(shfl\.sync\.idx\.b32 \t%r\d+\|%p\d+, %r\d+, )%r\d+, ",
            r"\g<1>0, ",
            (1,),
        ),
        Fault(
            "dropped weights stay",
            r"selp\.f32 \t(%f\d+), (%f\d+), 0f00000000,",
            r"selp.f32 \1, \2, \2,",
            (-1,),
        ),
    ],
}
