"""Clusters: mbarriers of other blocks, and loads into the shared memory of several blocks."""

import pytest
import torch
from cluster_kernels import FILL, MEET, READ, SEEDS, WORDS, fault, run
from small_kernels import kernel

from ptxmachine import load

# mbarriers of other blocks.

# Block 0 fills its shared memory and arrives at an mbarrier of block 1. Block 1 waits there and
# reads the memory of block 0. %r10 has the address of the mbarrier. %p1 is true in block 0, and %p2
# in thread 0.
SIGNAL = """
    add.u32 %r10, %r4, 512;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r0, 0;
    @%p2 mbarrier.init.shared::cta.b64 [%r10], 32;
    {fence}
    barrier.cluster.arrive{order}.aligned;
    barrier.cluster.wait.aligned;
    @!%p1 bra WAIT;
    mov.u32 %r11, 1;
    {fill}
    mapa.shared::cluster.u32 %r12, %r10, %r11;
    {arrive}
    bra DONE;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0;
    @!%p3 bra WAIT;
    {read}
DONE:
"""
GOOD = {
    "fence": "",
    "order": "",
    "fill": FILL.replace("\n    ", "\n    @%p1 "),
    "arrive": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];",
    "read": "mad.wide.u32 %d6, %r0, 4, %d0;\n" + READ,
}


def signal(**changes):
    return WORDS + SIGNAL.format(**GOOD | changes) + MEET


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_in_another_block_is_waited_for(seed):
    assert run(signal(), seed=seed, empty=[])[0].tolist() == list(range(32))
    relaxed = {"order": ".relaxed", "fence": "fence.mbarrier_init.release.cluster;"}
    assert run(signal(**relaxed), seed=seed, empty=[])[0].tolist() == list(range(32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"order": ".relaxed"}, "race", "while its initialisation is not ordered before"),
        (
            {"arrive": "mbarrier.arrive.release.cluster.shared::cluster.b64 %d9, [%r12];"},
            "out of bounds", "an arrival at an mbarrier of another block returns no state",
        ),
        (
            {"arrive": "mbarrier.arrive.shared::cta.b64 _, [%r12];"},
            "out of bounds", "shared memory has bytes",
        ),
        (
            {"arrive": "add.u32 %r12, %r12, 8;\n" + GOOD["arrive"]},
            "uninitialised", "an mbarrier that was never initialised",
        ),
        (
            {"fill": "", "arrive": GOOD["arrive"] + GOOD["fill"]},
            "race", "",
        ),
    ],
)  # fmt: skip
def test_wrong_arrivals_in_another_block(changes, kind, message, seed):
    found = fault(signal(**changes), seed, empty=[])
    assert (found.kind, message in str(found)) == (kind, True), found


# Loads of several blocks.

# The block {issuer} loads 128 bytes into all blocks of the mask. %r13 has the address of the
# variable `memory`, and %r10 the address of the mbarrier.
LOAD = """
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r13, memory;
    add.u32 %r10, %r13, 512;
    setp.eq.u32 %p2, %r0, 0;
    setp.eq.u32 %p1, %r1, {issuer};
    and.pred %p4, %p1, %p2;
    @%p2 mbarrier.init.shared::cta.b64 [%r10], 1;
    {meet}
    @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {bytes};
    {copy}
WAIT:
    {wait}
    mad.lo.u32 %r2, %r0, 4, %r13;
    ld.shared.u32 %r9, [%r2];
    mov.u32 %r6, %ctaid.x;
    mad.lo.u32 %r8, %r6, 32, %r0;
    mad.wide.u32 %d6, %r8, 4, %d0;
    st.global.u32 [%d6], %r9;
"""
MULTICAST = (
    "@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%r13], [%d1], 128, [%r10], {mask};"
)
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0;\n    @!%p3 bra WAIT;"


def loading(issuer=0, mask=3, size=128, meet=MEET, wait=WAIT, copy=MULTICAST, end=MEET):
    copy = copy.format(mask=mask)
    return LOAD.format(issuer=issuer, bytes=size, meet=meet, copy=copy, wait=wait) + end


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("issuer", "mask", "cluster"), [(0, 3, 2), (1, 3, 2), (2, 15, 4)])
def test_a_multicast_loads_into_all_blocks(issuer, mask, cluster, seed):
    x = torch.arange(32, dtype=torch.int32)
    out = torch.zeros(cluster, 32, dtype=torch.int32)
    module = load(kernel(loading(issuer, mask), 2, shared=1024))
    report = module.launch("k", (cluster,), (32,), [out, x], cluster=(cluster,), seed=seed)
    assert torch.equal(out, x.expand(cluster, 32))
    # The multicast reads the input only once for all blocks.
    assert report.counts["global_bytes"] == 128 * (1 + cluster)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "kinds", "message"),
    [
        ({"mask": 7}, ["out of bounds"], "the shared memory of rank 2 in a cluster of 2 blocks"),
        ({"mask": 0}, ["out of bounds"], "the mask of a multicast has no block"),
        ({"mask": 1}, ["deadlock"], ""),
        ({"size": 256}, ["deadlock"], ""),
        # The mbarrier of the other block may not be initialised yet.
        ({"meet": "bar.sync 0;"}, ["race"], "whose start is not ordered before"),
        ({"wait": ""}, ["race", "uninitialised"], ""),
        (
            {"meet": MEET.replace("arrive", "arrive.relaxed")},
            ["race"], "while its initialisation is not ordered before",
        ),
    ],
)  # fmt: skip
def test_wrong_multicasts(changes, kinds, message, seed):
    x = torch.arange(32, dtype=torch.int32)
    found = fault(loading(**changes), seed, tensors=[x], empty=[])
    assert found.kind in kinds, found
    assert message in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_must_not_end_before_its_load(seed):
    """If block 1 ends without waiting for its part of a multicast load, there must be a fault."""
    x = torch.arange(32, dtype=torch.int32)
    wait = "@!%p1 bra AWAY;\n    " + WAIT
    body = loading(wait=wait, end="AWAY:\n")
    found = fault(body, seed, tensors=[x], empty=[])
    assert found.kind in ("race", "out of bounds")
    assert "which has ended" in str(found) or "the block ends while the access of " in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_into_another_block_counts_at_its_mbarrier(seed):
    to_other = """
    mov.u32 %r14, 1;
    mapa.shared::cluster.u32 %r15, %r13, %r14;
    mapa.shared::cluster.u32 %r16, %r10, %r14;
    @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"""
    to = to_other + " [%r15], [%d1], 128, [%r16];\n    @%p1 bra DONE;"
    x = torch.arange(32, dtype=torch.int32)
    end = "DONE:\n" + MEET
    out = run(loading(copy=to, end=end), tensors=[x], seed=seed, empty=[])
    assert out.tolist() == [[0] * 32, x.tolist()]
    astray = to_other + " [%r15], [%d1], 128, [%r10];\n    @%p1 bra DONE;"
    found = fault(loading(copy=astray, end=end), seed, tensors=[x], empty=[])
    assert "a bulk copy and its mbarrier are in different blocks" in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_is_loaded_again_after_all_blocks_have_read_it(seed):
    """Block 0 may load into the buffer again after both blocks have arrived at its mbarrier."""
    body = """
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r13, memory;
    add.u32 %r10, %r13, 512;
    add.u32 %r11, %r13, 520;
    setp.eq.u32 %p2, %r0, 0;
    setp.eq.u32 %p1, %r1, 0;
    and.pred %p4, %p1, %p2;
    @%p2 mbarrier.init.shared::cta.b64 [%r10], 1;
    @%p2 mbarrier.init.shared::cta.b64 [%r11], 64;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    mad.lo.u32 %r2, %r0, 4, %r13;
    mapa.shared::cluster.u32 %r12, %r11, 0;
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    mov.u64 %d2, %d1;
ROUND:
    setp.eq.u32 %p5, %r20, 0;
    and.b32 %r22, %r20, 1;
    xor.b32 %r23, %r22, 1;
    @%p5 bra LOAD;
    @!%p4 bra LOAD;
FREE:
    {free}
LOAD:
    @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 128;
    @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r13], [%d2], 128, [%r10], 3;
FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], %r22;
    @!%p3 bra FULL;
    ld.shared.u32 %r9, [%r2];
    add.u32 %r21, %r21, %r9;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
    add.u64 %d2, %d2, 128;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p6, %r20, 5;
    @%p6 bra ROUND;
    mad.lo.u32 %r8, %r1, 32, %r0;
    mad.wide.u32 %d6, %r8, 4, %d0;
    st.global.u32 [%d6], %r21;
"""
    free = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r11], %r23;\n    @!%p3 bra FREE;"
    x = torch.arange(5 * 32, dtype=torch.int32).view(5, 32)
    out = run(body.replace("{free}", free) + MEET, tensors=[x], seed=seed)
    assert torch.equal(out, x.sum(0).to(torch.int32).expand(2, 32))
    found = fault(body.replace("{free}", "") + MEET, seed, tensors=[x], empty=[])
    assert found.kind == "race"
    assert "is not ordered before" in str(found)
