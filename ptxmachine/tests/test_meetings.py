"""Synchronisation of groups of lanes, partly valid values, and order between blocks."""

import pytest
import torch
from small_kernels import HEADER, REGISTERS, apply, kernel, launch

import ptxmachine as ptx
from ptxmachine import PtxFault

STORE = """
mul.wide.u32 %d10, %r0, 4;
add.s64 %d11, %d0, %d10;
st.global.b32 [%d11], %r5;
"""


def test_groups_of_lanes_with_masks_of_their_own_meet_independently():
    # Each group of 8 lanes has its own mask. Odd groups take another branch to the same shuffle.
    body = """
and.b32 %r1, %r0, 24;
shl.b32 %r2, 255, %r1;
and.b32 %r3, %r0, 8;
setp.ne.u32 %p1, %r3, 0;
mov.u32 %r4, %r0;
@%p1 bra OTHER;
add.u32 %r4, %r4, 100;
OTHER:
shfl.sync.bfly.b32 %r5, %r4, 7, 31, %r2;
"""
    out = torch.zeros(32, dtype=torch.int32)
    launch(body + STORE, [out])
    expected = [(lane ^ 7) + (0 if lane & 8 else 100) for lane in range(32)]
    assert out.tolist() == expected


def test_one_operand_may_decide_a_predicate():
    body = "mov.u32 %r5, 3;\nsetp.lt.u32 %p1, %r0, 0;\n{}\n@%p3 mov.u32 %r5, 4;\n"
    out = torch.zeros(32, dtype=torch.int32)
    # %p2 is never written.
    for line in ("and.pred %p3, %p1, %p2;", "setp.lt.and.u32 %p3, %r9, 5, %p1;"):
        launch(body.format(line) + STORE, [out])
        assert (out == 3).all()
    with pytest.raises(PtxFault, match="uninitialised"):
        launch(body.format("or.pred %p3, %p1, %p2;") + STORE, [out])


def test_bytes_of_a_register_are_valid_each_for_itself():
    # %r9 is never written. One byte of %r6 comes from %r9, and only a use of this byte is a fault.
    body = "mov.u32 %r4, 0x04030201;\nprmt.b32 %r6, %r4, %r9, 0x3340;\n"
    out = torch.zeros(32, dtype=torch.int32)
    launch(body + "prmt.b32 %r5, %r6, %r4, 0x7650;\n" + STORE, [out])
    assert (out == 0x04030201).all()
    with pytest.raises(PtxFault, match="uninitialised"):
        launch(body + "prmt.b32 %r5, %r6, %r4, 0x7651;\n" + STORE, [out])


@pytest.mark.parametrize(
    ("mnemonic", "sources", "values", "expected"),
    [
        ("bfind.shiftamt.u32", ["u32"], [[1], [0], [1 << 31]], [31, 2**32 - 1, 0]),
        ("bmsk.clamp.b32", ["u32", "u32"], [[4, 8], [40, 3], [30, 9]], [0xFF0, 0, 3 << 30]),
        ("bmsk.wrap.b32", ["u32", "u32"], [[4, 8], [40, 3]], [0xFF0, 7 << 8]),
        ("set.nan.f16x2.f16x2", ["b32", "b32"], [[0x7E003C00, 0]], [0x3C000000]),
        ("prmt.b32.f4e", ["u32", "u32", "u32"], [[0x44332211, 0x88776655, 1]], [0x55443322]),
        ("prmt.b32.rc16", ["u32", "u32", "u32"], [[0x44332211, 0, 1]], [0x44334433]),
    ],
)
def test_instructions_of_compilers(mnemonic, sources, values, expected):
    assert apply(mnemonic, "u32", sources, values) == expected


def test_a_pair_of_halves_becomes_a_pair_of_bytes():
    # 1.0 and -2.0 in e5m2 are the upper bytes of 1.0 and -2.0 in fp16.
    assert apply("cvt.rn.satfinite.e5m2x2.f16x2", "b16", ["b32"], [[0xC0003C00]]) == [0xC03C]


def test_a_product_carries_into_the_next():
    # The product 0xffffffff · 0xffffffff is 0xfffffffe00000001.
    body = """
mov.u32 %r1, -1;
mad.lo.cc.u32 %r2, %r1, %r1, 0xffffffff;
madc.hi.u32 %r5, %r1, %r1, 5;
"""
    out = torch.zeros(32, dtype=torch.int32)
    launch(body + STORE, [out])
    # The low half of the product is 1. Its sum with 0xffffffff carries into the high half, which is
    # 0xfffffffe. The high half plus 5 plus the carry is 4 modulo 2**32.
    assert (out == 4).all()


HANDOVER = """
mov.u32 %r1, %ctaid.x;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra END;
LOCK:
ATOM
setp.ne.u32 %p2, %r2, 0;
@%p2 bra LOCK;
ld.global.u32 %r3, [%d1];
add.u32 %r3, %r3, 1;
st.global.u32 [%d1], %r3;
UNLOCK
END:
"""


@pytest.mark.parametrize("fences", [False, True])
def test_a_lock_orders_the_accesses_of_blocks(fences):
    atom, unlock = (
        "atom.global.acquire.gpu.cas.b32 %r2, [%d0], 0, 1;",
        ("atom.global.release.gpu.exch.b32 %r2, [%d0], 0;"),
    )
    if fences:
        atom = "atom.global.relaxed.gpu.cas.b32 %r2, [%d0], 0, 1;\nfence.acq_rel.gpu;"
        unlock = "fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%d0], 0;"
    body = HANDOVER.replace("UNLOCK", unlock).replace("ATOM", atom)
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ptx.load(kernel(body, 2)).launch("k", (9,), (32,), [lock, total])
    assert total.item() == 9
    weak = body.replace(".acquire", ".relaxed").replace(".release", ".relaxed")
    weak = weak.replace("fence.acq_rel.gpu;", "")
    with pytest.raises(PtxFault, match="race"):
        ptx.load(kernel(weak, 2)).launch("k", (9,), (32,), [lock * 0, total])


def test_a_fault_of_one_block_ends_the_blocks_that_wait_for_it():
    # Block 1 signals that it runs and waits for a signal of block 0. Block 0 has a fault instead.
    body = """
mov.u32 %r1, %ctaid.x;
mov.u32 %r5, 1;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra OTHER;
FIRST:
atom.global.relaxed.gpu.or.b32 %r2, [%d0], 0;
setp.eq.u32 %p2, %r2, 0;
@%p2 bra FIRST;
trap;
OTHER:
atom.global.relaxed.gpu.exch.b32 %r3, [%d0], %r5;
WAIT:
atom.global.relaxed.gpu.or.b32 %r2, [%d0+4], 0;
setp.eq.u32 %p2, %r2, 0;
@%p2 bra WAIT;
"""
    signals = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(PtxFault, match="trap") as caught:
        ptx.load(kernel(body, 1)).launch("k", (2,), (32,), [signals], threads=2)
    assert caught.value.block == 0


def test_vectors_are_added_element_by_element():
    x, text = torch.zeros(4), HEADER + f".visible .entry k(.param .u64 p0)\n{{{REGISTERS}"
    text += """
    ld.param.u64 %d0, [p0];
    mov.b32 %r1, 0f3F800000;
    mov.b32 %r2, 0f40000000;
    red.global.add.v4.f32 [%d0], {%r1, %r2, %r1, %r2};
    ret;
}
"""
    ptx.load(text).launch("k", (3,), (32,), [x])
    assert x.tolist() == [96.0, 192.0, 96.0, 192.0]


def test_a_shuffle_stays_in_its_segment():
    # Segments have 8 lanes. A lane whose source is outside its segment keeps its own value.
    out = torch.zeros(32, dtype=torch.int32)
    launch("shfl.sync.down.b32 %r5, %r0, 3, 0x181f, -1;\n" + STORE, [out])
    expected = [lane + 3 if lane % 8 < 5 else lane for lane in range(32)]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("mode", "clamp", "source"),
    [
        ("up", 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("bfly", 31, lambda lane: lane ^ 3),
        ("idx", 31, lambda lane: 3),
        ("idx", 0x181F, lambda lane: lane // 8 * 8 + 3),
    ],
)
def test_a_shuffle_takes_the_value_of_its_source(mode, clamp, source):
    out = torch.zeros(32, dtype=torch.int32)
    body = f"""
shfl.sync.{mode}.b32 %r2, %r0, 3, {clamp}, -1;
mad.wide.u32 %d5, %r0, 4, %d0;
st.global.b32 [%d5], %r2;
"""
    launch(body, [out])
    assert out.tolist() == [source(lane) for lane in range(32)]


def test_a_match_of_all_fails_if_one_lane_differs():
    out = torch.zeros(32, dtype=torch.int32)
    body = """
shr.u32 %r2, %r0, 4;
match.all.sync.b32 %r5, %r2, -1;
"""
    launch(body + STORE, [out])
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("instruction", "answers"),
    [
        ("barrier.cta.red.popc.aligned.u32 %r5, 0, %p1;", {0: 0, 40: 40, 64: 64}),
        ("bar.red.popc.u32 %r5, 0, !%p1;", {0: 64, 40: 24, 64: 0}),
        ("bar.red.and.pred %p2, 0, %p1;\nselp.u32 %r5, 1, 0, %p2;", {0: 0, 40: 0, 64: 1}),
        ("bar.red.or.pred %p2, 0, %p1;\nselp.u32 %r5, 1, 0, %p2;", {0: 0, 40: 1, 64: 1}),
    ],
)
def test_a_barrier_counts_the_votes_of_the_threads(instruction, answers):
    for yes, answer in answers.items():
        out = torch.zeros(64, dtype=torch.int32)
        launch(f"setp.lt.u32 %p1, %r0, {yes};\n{instruction}\n" + STORE, [out], threads=64)
        assert (out == answer).all(), yes
