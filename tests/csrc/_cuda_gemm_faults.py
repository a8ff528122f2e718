"""Mistakes that tests insert into the PTX of products with GELU, for sm_80 and sm_90a.

Each `Fault` is a mistake that the source could have. The numbers in its `which` count the matches
of its regular expression in the order of the PTX of one kernel. On sm_90a, the PTX has first the
consumers, and then the epilogue with the copies. On sm_80, it has the first copies, the loop over
slices, and the epilogue.
"""

from __future__ import annotations

from _broken_ptx import Fault
from _hopper_faults import ARRIVE, WAIT

FORWARD, BACKWARD = "StoreGelu", "StoreGradient"
HOPPER_WAITS = (
    "consumer: first stage full", "consumer: next stage full", "consumer: result empty",
    "epilogue: result full",
)  # fmt: skip
# The first warp tests barriers without waiting: three times for copies, and once for a result.
QUESTION = WAIT.replace("try_wait", "test_wait")
QUESTIONS = {"copies: stage empty": (0, 2, 3), "first warp: result full": (1,)}
HOPPER_ARRIVALS = (
    "consumer: stage empty", "consumer: last stage empty", "consumer: result full",
    "epilogue: result empty",
)  # fmt: skip
OTHER_PARITY = (
    r".reg .b32 q;\nxor.b32 q, \2, 1;\nmbarrier.try_wait.parity.shared::cta.b64 p, [\1], q;"
)
FENCE, COMMIT = r"wgmma\.fence\.sync\.aligned;", r"wgmma\.commit_group\S*;"
PRODUCTS_WAIT = r"wgmma\.wait_group\S* \d;"

HOPPER = [
    *((FORWARD, Fault(f"no wait ({name})", WAIT, "setp.eq.u32 p, 0, 0;", (i,)))
      for i, name in enumerate(HOPPER_WAITS)),
    *((FORWARD, Fault(f"the other parity ({name})", WAIT, OTHER_PARITY, (i,)))
      for i, name in enumerate(HOPPER_WAITS)),
    *((FORWARD, Fault(f"no wait ({name})", QUESTION, "setp.eq.u32 p, 0, 0;", which))
      for name, which in QUESTIONS.items()),
    *((FORWARD, Fault(f"the other parity ({name})", QUESTION, OTHER_PARITY, which))
      for name, which in QUESTIONS.items()),
    *((FORWARD, Fault(f"no arrival ({name})", ARRIVE, "", (i,)))
      for i, name in enumerate(HOPPER_ARRIVALS)),
    (FORWARD, Fault("no wgmma.fence (first slice)", FENCE, "", (0,))),
    (FORWARD, Fault("no end of a group of products (first slice)", COMMIT, "", (0,))),
    (FORWARD, Fault("no end of a group of products (next slice)", COMMIT, "", (1,))),
    (FORWARD, Fault("a stage is given back too early", PRODUCTS_WAIT,
                    "wgmma.wait_group.sync.aligned 2;", (0,))),
    (FORWARD, Fault("sums are read too early", PRODUCTS_WAIT,
                    "wgmma.wait_group.sync.aligned 1;", (1,))),
    (FORWARD, Fault("no barrier after the initialisation", r"bar\.sync \t0;", "")),
    (FORWARD, Fault("no barrier of the warp before a result is full", r"bar\.warp\.sync \t-1;", "",
                    (2,))),
    (FORWARD, Fault("no barrier of the warp before a result is empty", r"bar\.warp\.sync \t-1;", "",
                    (-1,))),
    (FORWARD, Fault("a descriptor has no swizzle", "4611686293305360384", "274877972480")),
    (FORWARD, Fault("the weight is transposed", r"(m64n256k16[^;]*p, 1, 1, 0, )0;", r"\g<1>1;")),
    (FORWARD, Fault("a slice begins the sums anew", r"setp\.ne\.b32 p, 1, 0;",
                    "setp.ne.b32 p, 0, 0;", (4,))),
    (FORWARD, Fault("weights round toward zero", r"cvt\.rn\.bf16x2", "cvt.rz.bf16x2")),
    (BACKWARD, Fault("the weight is not transposed", r"(m64n256k16[^;]*p, 1, 1, 0, )1;",
                     r"\g<1>0;")),
    (BACKWARD, Fault("the halves of the weight are too near", "4611686293338849280",
                     "4611686293305360384")),
    (BACKWARD, Fault("no barrier before the sums of columns", r"bar\.sync %r\d+, %r\d+;", "")),
    (BACKWARD, Fault("lanes of the same columns are not added",
                     r"shfl\.sync\.bfly\.b32 \t(%r\d+)\|%p\d+, (%r\d+), [^;]*;", r"mov.u32 \1, 0;",
                     (0,))),
]  # fmt: skip

COPIES_WAIT, BARRIER = r"cp\.async\.wait_group (\d);", r"bar\.sync \t0;"
COPIES_END = r"cp\.async\.commit_group;"
COPY = r"(cp\.async\.cg\S+ \[%r\d+\], \[%rd\d+\], 16), %r\d+;"
LEFT = r"(mma\S* \{[^}]*\}, \{)(%r\d+), (%r\d+)"
SUMS = r"(mma\S* \{)(%f\d+), (%f\d+)"

AMPERE = [
    (FORWARD, Fault("no wait for the copies", COPIES_WAIT, "", (0,))),
    (FORWARD, Fault("a wait that leaves one slice more", COPIES_WAIT, "cp.async.wait_group 2;",
                    (0,))),
    (FORWARD, Fault("no barrier before a slice", BARRIER, "", (0,))),
    (FORWARD, Fault("no barrier before the result", BARRIER, "", (1,))),
    (FORWARD, Fault("no barrier after the result", BARRIER, "", (2,))),
    (FORWARD, Fault("no end of the group of the first slice", COPIES_END, "", (0,))),
    (FORWARD, Fault("no end of the groups in the loop", COPIES_END, "", (2,))),
    (FORWARD, Fault("rows that do not exist are copied", COPY, r"\1, 16;")),
    (FORWARD, Fault("x is loaded transposed", r"(ldmatrix\S*\.x4)(\.shared)", r"\1.trans\2", (0,))),
    (FORWARD, Fault("the weight is loaded transposed", r"(ldmatrix\S*\.x4)(\.shared)",
                    r"\1.trans\2", (4,))),
    (FORWARD, Fault("exchanged registers of x", LEFT, r"\1\3, \2", (0,))),
    (FORWARD, Fault("exchanged sums", SUMS, r"\1\3, \2", (0,))),
    (FORWARD, Fault("a chunk of a slice without its permutation",
                    r"xor\.b32(\s+%r\d+, %r\d+, 32;)", r"add.s32\1", (0,))),
    (BACKWARD, Fault("the weight is not loaded transposed", r"(ldmatrix\S*\.x4)\.trans", r"\1",
                     (0,))),
    (BACKWARD, Fault("a chunk of the weight without its permutation",
                     r"xor\.b32(\s+%r\d+, %r\d+, 96;)", r"add.s32\1", (0,))),
    (BACKWARD, Fault("no barrier before the sums of columns", BARRIER, "", (3,))),
    (BACKWARD, Fault("lanes of the same columns are not added",
                     r"shfl\.sync\.bfly\.b32 \t(%r\d+)\|%p\d+, (%r\d+), [^;]*;", r"mov.u32 \1, 0;",
                     (0,))),
]  # fmt: skip
FAULTS = {80: AMPERE, 90: HOPPER}
