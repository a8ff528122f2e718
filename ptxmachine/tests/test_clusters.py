"""Clusters: launches, barriers, and accesses to the shared memory of other blocks."""

import re

import pytest
import torch
from cluster_kernels import EXCHANGE, FILL, MEET, READ, SEEDS, WORDS, fault, of_neighbours, run
from small_kernels import kernel

from ptxmachine import PtxSyntaxError, load

# The limits of a launch.


def test_a_kernel_may_require_its_cluster():
    bounds = ".explicitcluster\n.reqnctapercluster 2, 1, 1"
    assert torch.equal(run(EXCHANGE, cluster=None, bounds=bounds), of_neighbours(2))
    assert torch.equal(run(EXCHANGE, cluster=(2, 1, 1), bounds=bounds), of_neighbours(2))
    with pytest.raises(ValueError, match=re.escape("got (1, 1, 1), the kernel requires (2, 1, 1)")):
        run(EXCHANGE, cluster=(1,), bounds=bounds)


@pytest.mark.parametrize(
    ("blocks", "cluster", "bounds", "message"),
    [
        (8, (8,), "", None),
        (16, (16,), "", "cluster: got (16,), allowed: at most (8, 8, 8)"),
        (3, (2,), "", "grid: got (3, 1, 1), allowed: multiples of the cluster (2, 1, 1)"),
        (2, (1, 2), "", "grid: got (2, 1, 1), allowed: multiples of the cluster (1, 2, 1)"),
        (4, (4,), ".maxclusterrank 4", None),
        (4, (4,), ".maxclusterrank 2", "cluster: got (4,), allowed: at most (2, 2, 2)"),
        (2, None, ".explicitcluster", "cluster: got None, and k has .explicitcluster"),
        (2, (0,), "", "cluster: got (0,), allowed: 1 to 3 sizes of at least 1"),
    ],
)
def test_limits_of_a_launch(blocks, cluster, bounds, message):
    if message is None:
        run(WORDS + FILL + MEET, blocks=blocks, cluster=cluster, bounds=bounds, empty=[])
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        run(EXCHANGE, blocks=blocks, cluster=cluster, bounds=bounds)


def test_a_cluster_has_at_most_eight_blocks_in_all_dimensions():
    module = load(kernel(MEET))
    out = torch.zeros(1, dtype=torch.int32)
    module.launch("k", (2, 2, 2), (32,), [out], cluster=(2, 2, 2))
    with pytest.raises(ValueError, match=re.escape("got (4, 2, 2), allowed: at most 8 blocks")):
        module.launch("k", (4, 2, 2), (32,), [out], cluster=(4, 2, 2))


def test_only_hopper_and_later_have_clusters():
    text = kernel("    st.global.u32 [%d0], 1;").replace("sm_90a", "sm_80")
    out = torch.zeros(1, dtype=torch.int32)
    load(text).launch("k", (1,), (1,), [out], cluster=(1,))
    with pytest.raises(ValueError, match=re.escape("allowed for sm_80: 1 block")):
        load(text).launch("k", (2,), (1,), [out], cluster=(2,))


def test_a_text_requires_at_least_one_block():
    with pytest.raises(PtxSyntaxError, match=r"line 4: \.reqnctapercluster: got "):
        run(EXCHANGE, bounds=".reqnctapercluster 0, 1, 1")


# Numbers of blocks and clusters.

NUMBERS = (
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_ctarank",
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y",
    "%nclusterid.z", "%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z",
    "%cluster_nctarank",
)  # fmt: skip


def test_numbers_of_blocks_and_clusters():
    """The special registers have the right numbers for a 3-D grid with 2-D clusters."""
    loads = "".join(
        f"    mov.u32 %r9, {name};\n    st.global.u32 [%d6+{4 * n}], %r9;\n"
        for n, name in enumerate(NUMBERS)
    )
    body = f"""
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %ctaid.z;
    mad.lo.u32 %r4, %r3, 6, %r2;
    mad.lo.u32 %r4, %r4, 4, %r1;
    mad.wide.u32 %d6, %r4, {4 * len(NUMBERS)}, %d0;
{loads}"""
    out = torch.zeros(2, 6, 4, len(NUMBERS), dtype=torch.int32)
    load(kernel(body)).launch("k", (4, 6, 2), (1,), [out], cluster=(2, 3, 1), empty=[out])
    for z in range(2):
        for y in range(6):
            for x in range(4):
                place = [x % 2, y % 3, 0, x % 2 + 2 * (y % 3)]
                expected = [*place, x // 2, y // 3, z, 2, 2, 2, 2, 3, 1, 6]
                assert out[z, y, x].tolist() == expected


def test_the_blocks_of_a_cluster_run_together():
    """The clusters of the blocks that `blocks` names must run completely, and no other cluster."""
    out = torch.zeros(8, 32, dtype=torch.int32)
    module = load(kernel(EXCHANGE, shared=1024))
    report = module.launch("k", (8,), (32,), [out], cluster=(2,), blocks=[5, 4, 0])
    expected = of_neighbours(8)
    expected[[2, 3, 6, 7]] = 0
    assert torch.equal(out, expected)
    assert report.counts["global_bytes"] == 4 * 32 * 4


# The shared memory of other blocks.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("blocks", "cluster"), [(2, 2), (8, 2), (8, 8)])
def test_blocks_read_each_other(blocks, cluster, seed):
    found = run(EXCHANGE, blocks=blocks, cluster=(cluster,), seed=seed)
    assert torch.equal(found, of_neighbours(blocks))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_of_another_block_needs_a_barrier_before(seed):
    found = fault(WORDS + FILL + READ + MEET, seed)
    assert found.kind == "race"
    assert "whose start is not ordered before" in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_of_another_block_needs_a_barrier_after_the_write(seed):
    cleared = WORDS + "    st.shared.u32 [%r2], 0;\n"
    found = fault(cleared + MEET + FILL + READ + MEET, seed)
    assert found.kind == "race"
    assert "is not ordered before" in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_must_not_end_before_it_is_read(seed):
    found = fault(WORDS + FILL + MEET + READ, seed)
    assert found.kind in ("race", "out of bounds")
    assert "which has ended" in str(found) or "the block ends while the access of " in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_to_another_block_is_ordered_by_the_barrier(seed):
    write = "    mad.lo.u32 %r7, %r1, 100, %r0;\n    st.shared::cluster.u32 [%r3], %r7;\n"
    read = "    ld.shared.u32 %r9, [%r2];\n    st.global.u32 [%d6], %r9;\n"
    at = "    mad.lo.u32 %r8, %r1, 32, %r0;\n    mad.wide.u32 %d6, %r8, 4, %d0;\n"
    good = run(WORDS + at + MEET + write + MEET + read, seed=seed)
    assert torch.equal(good, of_neighbours(2))
    late = fault(WORDS + at + MEET + write + "    bar.sync 0;\n" + read + MEET, seed)
    assert late.kind in ("race", "uninitialised")


def test_generic_addresses_reach_other_blocks():
    generic = """
    cvt.u64.u32 %d7, %r2;
    cvta.shared.u64 %d7, %d7;
    mapa.u64 %d8, %d7, %r5;
    getctarank.u64 %r10, %d8;
    getctarank.shared::cluster.u32 %r11, %r2;
    isspacep.shared::cta %p1, %d8;
    isspacep.shared::cluster %p2, %d8;
    isspacep.shared::cta %p3, %d7;
    selp.u32 %r12, 1, 0, %p1;
    selp.u32 %r13, 2, 0, %p2;
    selp.u32 %r14, 4, 0, %p3;
    ld.u32 %r9, [%d8];
    mad.lo.u32 %r9, %r10, 1000, %r9;
    mad.lo.u32 %r9, %r11, 10000, %r9;
    add.u32 %r12, %r12, %r13;
    add.u32 %r12, %r12, %r14;
    mad.lo.u32 %r9, %r12, 100000, %r9;
    st.global.u32 [%d6], %r9;
"""
    out = run(WORDS + FILL + MEET + generic + MEET)
    ranks = torch.tensor([[1], [0]]) * 1000 + torch.tensor([[0], [1]]) * 10_000
    assert torch.equal(out, (of_neighbours(2) + ranks + 600_000).to(torch.int32))


def test_the_address_of_the_own_rank_is_an_address_of_the_block():
    body = WORDS + FILL + "    mapa.shared::cluster.u32 %r3, %r2, %r1;\n"
    own = body + "    ld.shared::cta.u32 %r9, [%r3];\n    st.global.u32 [%d6], %r9;\n"
    assert run(own)[1].tolist() == list(range(100, 132))


def test_an_instruction_for_the_block_reaches_no_other_block():
    found = fault(WORDS + FILL + MEET + READ.replace("::cluster", "::cta") + MEET)
    assert found.kind == "out of bounds"


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_is_below_the_size_of_the_cluster(rank):
    body = f"    mov.u32 %r1, memory;\n    mapa.shared::cluster.u32 %r2, %r1, {rank};\n"
    if rank < 2:
        run(body, empty=[])
        return
    assert "mapa: rank 2 in a cluster of 2 blocks" in str(fault(body, empty=[]))
    one = fault(body, blocks=1, cluster=(1,), empty=[])
    assert "mapa: rank 2 in a cluster of 1 block" in str(one)
    beyond = "    mov.u64 %d7, 0x0100000100000400;\n    ld.u32 %r1, [%d7];\n"
    assert "shared memory has bytes 1024 to 2048" in str(fault(beyond, empty=[]))
    far = "    mov.u32 %r2, 0x05000400;\n    ld.shared::cluster.u32 %r1, [%r2];\n"
    assert "the shared memory of rank 4 in a cluster of 2 blocks" in str(fault(far, empty=[]))


# barrier.cluster.


@pytest.mark.parametrize("seed", SEEDS)
def test_other_work_between_arrival_and_wait(seed):
    split = MEET.replace("    barrier.cluster.wait", "    bar.sync 1;\n    barrier.cluster.wait")
    body = WORDS + FILL + split + READ + split
    assert torch.equal(run(body, seed=seed), of_neighbours(2))


def test_threads_that_have_ended_are_not_waited_for():
    body = WORDS + FILL + MEET + READ + "    setp.gt.u32 %p1, %r1, 3;\n    @%p1 exit;\n" + MEET
    run(body)
    alone = "    setp.gt.u32 %p1, %r1, 0;\n    @%p1 exit;\n" + MEET
    run(WORDS + FILL + alone, empty=[])


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            "    mov.u32 %r9, memory;\n    setp.gt.u32 %p1, %r1, 0;\n    @!%p1 bra MEET;\n"
            "    setp.eq.u32 %p3, %r0, 0;\n    @%p3 mbarrier.init.shared.b64 [%r9], 64;\n"
            "    bar.warp.sync 0xffffffff;\nLOOP:\n"
            "    mbarrier.try_wait.parity.shared.b64 %p2, [%r9], 0;\n    @!%p2 bra LOOP;\n"
            "MEET:\n" + MEET,
            "deadlock", "waits at barrier.cluster, where other threads of the cluster do not",
        ),
        (
            "    barrier.cluster.arrive;\n" + MEET,
            "divergence", "a second barrier.cluster.arrive without barrier.cluster.wait",
        ),
        (
            "    barrier.cluster.wait;\n",
            "divergence", "barrier.cluster.wait without barrier.cluster.arrive",
        ),
        (
            MEET + "    barrier.cluster.wait;\n",
            "divergence", "barrier.cluster.wait without barrier.cluster.arrive",
        ),
        (
            "    setp.gt.u32 %p1, %r0, 3;\n    @%p1 bra PART;\n" + MEET + "PART:\n",
            "divergence", "a part of the warp executes an aligned instruction",
        ),
        (
            "    setp.gt.u32 %p1, %r0, 3;\n    @%p1 barrier.cluster.arrive;\n"
            "    @%p1 barrier.cluster.wait;\n",
            "unsupported", "a part of a warp waits at barrier.cluster",
        ),
    ],
)  # fmt: skip
def test_wrong_uses_of_the_barrier(body, kind, message):
    found = fault("    mov.u32 %r1, %cluster_ctarank;\n" + body, empty=[])
    assert (found.kind, message in str(found)) == (kind, True), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("arrival", "good"),
    [
        ("barrier.cluster.arrive.release.aligned", True),
        ("barrier.cluster.arrive.relaxed.aligned", False),
        ("fence.acq_rel.cluster;\n    barrier.cluster.arrive.relaxed.aligned", True),
        ("fence.acq_rel.gpu;\n    barrier.cluster.arrive.relaxed.aligned", True),
        ("fence.acq_rel.cta;\n    barrier.cluster.arrive.relaxed.aligned", False),
    ],
)
def test_a_relaxed_arrival_orders_what_a_fence_has_ordered(arrival, good, seed):
    body = WORDS + FILL + MEET.replace("barrier.cluster.arrive.aligned", arrival) + READ + MEET
    if good:
        assert torch.equal(run(body, seed=seed), of_neighbours(2))
        return
    assert fault(body, seed).kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_passes_on_what_another_cluster_has_released(seed):
    """Both blocks of cluster 1 must see a value of cluster 0, even if only one acquires the flag.

    Both blocks then wait at barrier.cluster, which orders the other block after the acquire. If the
    arrival is relaxed, the read of the other block must be a race.
    """
    body = """
    mov.u32 %r1, %clusterid.x;
    mov.u32 %r2, %cluster_ctarank;
    setp.ne.u32 %p1, %r1, 0;
    setp.ne.u32 %p2, %r2, 0;
    @%p1 bra SECOND;
    @%p2 bra END;
    st.global.u32 [%d1], 7;
    st.release.gpu.global.u32 [%d1+4], 1;
    bra END;
SECOND:
    @%p2 bra JOIN;
LOOP:
    ld.acquire.gpu.global.u32 %r3, [%d1+4];
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra LOOP;
JOIN:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.global.u32 %r4, [%d1];
    mad.lo.u32 %r5, %r2, 128, 256;
    cvt.u64.u32 %d5, %r5;
    add.u64 %d5, %d0, %d5;
    st.global.u32 [%d5], %r4;
END:
"""
    flag = torch.zeros(2, dtype=torch.int32)
    options = {"blocks": 4, "threads": 1, "tensors": [flag], "seed": seed, "empty": []}
    assert run(body, **options)[:, 0].tolist() == [0, 0, 7, 7]
    without = body.replace("barrier.cluster.arrive;", "barrier.cluster.arrive.relaxed;")
    flag.zero_()
    assert fault(without, **options).kind == "race"


# Scopes of atomic operations and of releases.


@pytest.mark.parametrize(("scope", "good"), [("cta", False), ("cluster", True), ("gpu", True)])
@pytest.mark.parametrize("place", ["shared", "global"])
def test_atomics_of_two_blocks_need_the_scope_of_the_cluster(place, scope, good):
    if place == "shared":
        # Both blocks count in block 0.
        count = f"    mapa.shared::cluster.u32 %r3, %r4, 0;\n    st.shared.u32 [%r2], 0;\n{MEET}"
        count += f"    red.relaxed.{scope}.shared::cluster.add.u32 [%r3], 1;\n{MEET}"
        body = WORDS + count + "    ld.shared.u32 %r9, [%r4];\n    st.global.u32 [%d0], %r9;\n"
        body = body.replace("    st.global", "    setp.eq.u32 %p1, %r1, 0;\n    @%p1 st.global")
    else:
        body = f"    red.relaxed.{scope}.global.add.u32 [%d0], 1;\n"
    if good:
        assert run(body, empty=[])[0, 0] == 64
    else:
        assert fault(body, empty=[]).kind == "race"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("cluster", "scope", "good"),
    [(2, "cta", False), (2, "cluster", True), (1, "cluster", False), (1, "gpu", True)],
)
def test_a_release_needs_a_scope_with_both_blocks(cluster, scope, good, seed):
    body = f"""
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
    st.global.u32 [%d1], 7;
    st.release.{scope}.global.u32 [%d1+4], 1;
    bra END;
LOOP:
    ld.acquire.{scope}.global.u32 %r3, [%d1+4];
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra LOOP;
    ld.global.u32 %r4, [%d1];
    st.global.u32 [%d0], %r4;
END:
"""
    flag = torch.zeros(2, dtype=torch.int32)
    options = {"cluster": (cluster,), "threads": 1, "tensors": [flag], "seed": seed, "empty": []}
    if good:
        assert run(body, **options)[0, 0] == 7
    else:
        assert fault(body, **options).kind == "race"
