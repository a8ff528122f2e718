"""The PTX machine reports a fault for what is wrong on a GPU, with the place of the fault."""

import pytest
import torch
from small_kernels import HEADER, kernel, launch

from ptxmachine import PtxFault, PtxSyntaxError, load


def fault(body, tensors=None, **options):
    tensors = [torch.zeros(64, dtype=torch.int32)] if tensors is None else tensors
    with pytest.raises(PtxFault) as caught:
        launch(body, tensors, **options)
    return caught.value


ADDRESS = "    mad.wide.u32 %d5, %r0, 4, %d0;\n"
SHARED = "    mov.u32 %r1, memory;\n    mad.lo.u32 %r2, %r0, 4, %r1;\n"


def test_an_access_after_the_end_of_a_tensor():
    found = fault(ADDRESS + "    st.global.u32 [%d5+4], %r0;", [torch.zeros(32, dtype=torch.int32)])
    assert (found.kind, found.lane, found.block) == ("out of bounds", 31, 0)
    assert "0 bytes after the end of buffer 0 (32,)" in str(found)
    assert "st.global.u32" in str(found)


def test_an_access_before_a_tensor():
    found = fault(ADDRESS + "    ld.global.u32 %r1, [%d5+-4];")
    assert (found.kind, found.lane) == ("out of bounds", 0)


def test_an_access_that_is_misaligned():
    found = fault(ADDRESS + "    ld.global.v2.u32 {%r1, %r2}, [%d5];")
    assert (found.kind, found.lane) == ("misaligned", 1)


def test_an_access_to_shared_memory_that_is_misaligned():
    found = fault(SHARED + "    st.shared.v2.u32 [%r2], {%r0, %r0};", shared=256)
    assert (found.kind, found.lane) == ("misaligned", 1)


def test_shared_memory_has_an_end():
    body = SHARED + "    st.shared.u32 [%r2+4], %r0;"
    assert fault(body, shared=128).kind == "out of bounds"
    launch(SHARED + "    st.shared.u32 [%r2], %r0;", [torch.zeros(1)], shared=128)


def test_a_value_that_nothing_wrote_may_be_moved_but_not_used():
    launch("    mov.b32 %r5, %r6;\n    add.s32 %r5, %r5, 1;", [torch.zeros(1)])
    store = ADDRESS + "    add.s32 %r5, %r6, 1;\n    st.global.u32 [%d5], %r5;"
    assert fault(store).kind == "uninitialised"
    assert fault("    setp.eq.s32 %p1, %r6, 1;\n    @%p1 bra END;\nEND:").kind == "uninitialised"
    assert fault("    ld.global.u32 %r1, [%d9];").kind == "uninitialised"


def test_shared_memory_holds_nothing_at_first():
    body = SHARED + ADDRESS + "    ld.shared.u32 %r3, [%r2];\n    st.global.u32 [%d5], %r3;"
    assert fault(body, shared=128).kind == "uninitialised"


def test_a_tensor_that_holds_nothing_yet():
    x, y = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = (
        "    mad.wide.u32 %d5, %r0, 4, %d0;\n    mad.wide.u32 %d6, %r0, 4, %d1;\n"
        "    ld.global.u32 %r1, [%d5];\n    st.global.u32 [%d6], %r1;"
    )
    launch(body, [x, y])
    assert fault(body, [x, y], empty=[x]).kind == "uninitialised"
    launch(body, [x, y], empty=[y])


EXCHANGE = (
    SHARED
    + "    st.shared.u32 [%r2], 0;\n    bar.sync 0;\n"
    + "    st.shared.u32 [%r2], %r0;\n{barrier}"
    + "    xor.b32 %r3, %r0, {other};\n    mad.lo.u32 %r3, %r3, 4, %r1;\n"
    + "    ld.shared.u32 %r4, [%r3];\n"
    + ADDRESS
    + "    st.global.u32 [%d5], %r4;"
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("other", "barrier"), [(32, "bar.sync 0"), (1, "bar.warp.sync -1")])
def test_an_exchange_needs_its_barrier(other, barrier, seed):
    x = torch.zeros(64, dtype=torch.int32)
    body = EXCHANGE.format(barrier=f"    {barrier};\n", other=other)
    launch(body, [x], threads=64, shared=256, seed=seed)
    assert x.tolist() == [n ^ other for n in range(64)]
    found = fault(EXCHANGE.format(barrier="", other=other), threads=64, shared=256, seed=seed)
    assert found.kind == "race"


def test_a_barrier_of_the_warp_does_not_order_another_warp():
    body = EXCHANGE.format(barrier="    bar.warp.sync -1;\n", other=32)
    assert fault(body, threads=64, shared=256).kind == "race"


def test_reading_before_the_next_write_needs_a_barrier():
    again = "\n    st.shared.u32 [%r2], 7;"
    body = EXCHANGE.format(barrier="    bar.sync 0;\n", other=32) + again
    assert fault(body, threads=64, shared=256).kind == "race"
    launch(
        body.replace(again, "\n    bar.sync 0;" + again),
        [torch.zeros(64, dtype=torch.int32)],
        threads=64,
        shared=256,
    )


def test_threads_may_write_the_same_value_to_one_place():
    launch(
        "    mov.u32 %r1, memory;\n    st.shared.u32 [%r1], 5;",
        [torch.zeros(1)],
        threads=64,
        shared=16,
    )
    body = "    mov.u32 %r1, memory;\n    st.shared.u32 [%r1], %r0;"
    assert fault(body, threads=64, shared=16).kind == "race"


@pytest.mark.parametrize(("seed", "winner"), [(0, 0), (1, 31)])
def test_lanes_that_write_to_one_place_in_one_instruction(seed, winner):
    x = torch.full((1,), -1, dtype=torch.int32)
    report = launch("    st.global.u32 [%d0], %r0;", [x], seed=seed)
    assert (x.item(), report.counts["conflicting_stores"]) == (winner, 31)
    assert launch("    st.global.u32 [%d0], 4;", [x]).counts["conflicting_stores"] == 0


def test_blocks_race_in_global_memory():
    module = load(kernel("    mov.u32 %r1, %ctaid.x;\n    st.global.u32 [%d0], %r1;"))
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(PtxFault, match="race"):
        module.launch("k", (2,), (1,), [x], threads=1)
    module.launch("k", (2,), (1,), [x], threads=1, races=False)


def test_atomics_do_not_race_with_each_other():
    module = load(kernel("    atom.global.add.u32 %r1, [%d0], 3;"))
    x = torch.zeros(1, dtype=torch.int32)
    module.launch("k", (5,), (64,), [x])
    assert x.item() == 3 * 5 * 64


def test_a_part_of_a_warp_at_a_barrier():
    body = "    setp.lt.u32 %p1, %r0, 7;\n    @%p1 bra END;\n    bar.sync 0;\nEND:"
    assert fault(body).kind == "divergence"


def test_a_barrier_that_some_warps_miss():
    body = "    setp.lt.u32 %p1, %r0, 32;\n    @%p1 bra END;\n    bar.sync 1, 64;\n"
    body += "END:\n    bar.sync 0;"
    assert fault(body, threads=64).kind == "deadlock"


def test_a_shuffle_whose_lanes_do_not_come():
    body = (
        "    setp.lt.u32 %p1, %r0, 7;\n    @%p1 bra OTHER;\n"
        "    shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;\n    bra END;\n"
        "OTHER:\n    shfl.sync.idx.b32 %r1, %r0, 1, 31, -1;\nEND:"
    )
    assert fault(body).kind == "deadlock"


def test_lanes_meet_again_after_a_branch():
    x = torch.zeros(32, dtype=torch.int32)
    body = (
        "    mov.u32 %r5, 1;\n    setp.lt.u32 %p1, %r0, 7;\n    @%p1 bra LOW;\n"
        "    mov.u32 %r5, 10;\n    bra JOIN;\nLOW:\n    mov.u32 %r5, 100;\nJOIN:\n"
        "    shfl.sync.bfly.b32 %r6, %r5, 31, 31, -1;\n" + ADDRESS + "    st.global.u32 [%d5], %r6;"
    )
    launch(body, [x])
    assert x.tolist() == [10] * 25 + [100] * 7


def test_an_endless_loop_meets_its_limit():
    assert fault("L:\n    bra L;", limit=1000).kind == "limit"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wait", ["cp.async.wait_group 0", "cp.async.wait_all"])
def test_an_asynchronous_copy_is_there_after_its_wait(wait, seed):
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = (
        SHARED
        + "    mad.wide.u32 %d5, %r0, 4, %d0;\n    mad.wide.u32 %d6, %r0, 4, %d1;\n"
        + "    cp.async.ca.shared.global [%r2], [%d5], 4;\n    cp.async.commit_group;\n{wait}"
        + "    ld.shared.u32 %r4, [%r2];\n    st.global.u32 [%d6], %r4;"
    )
    launch(body.format(wait=f"    {wait};\n"), [x, y], shared=128, seed=seed)
    assert torch.equal(x, y)
    for missing in ("", "    cp.async.wait_group 1;\n"):
        assert fault(body.format(wait=missing), [x, y], shared=128, seed=seed).kind == "race"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("own_arrival", [False, True])
def test_copies_arrive_at_an_mbarrier(own_arrival, seed):
    """A wait at an mbarrier must wait for the copies whose arrival the mbarrier counts.

    Without .noinc, the arrival of the copies does not reduce the number of pending arrivals, so
    the kernel also needs an arrival of its own.
    """
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    arrival = "    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+128];\n"
    if own_arrival:
        arrival = (
            "    cp.async.mbarrier.arrive.shared::cta.b64 [%r1+128];\n"
            "    mbarrier.arrive.shared::cta.b64 _, [%r1+128];\n"
        )
    body = (
        SHARED
        + "    mad.wide.u32 %d5, %r0, 4, %d0;\n    mad.wide.u32 %d6, %r0, 4, %d1;\n"
        + "    setp.eq.u32 %p1, %r0, 0;\n    @%p1 mbarrier.init.shared::cta.b64 [%r1+128], 32;\n"
        + "    bar.sync 0;\n    cp.async.ca.shared.global [%r2], [%d5], 4;\n"
        + arrival
        + "L:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+128], 0;\n    @!%p2 bra L;\n"
        + "    xor.b32 %r3, %r0, 1;\n    mad.lo.u32 %r3, %r3, 4, %r1;\n"
        + "    ld.shared.u32 %r4, [%r3];\n    st.global.u32 [%d6], %r4;"
    )
    launch(body, [x, y], shared=136, seed=seed, limit=100_000)
    assert torch.equal(y, x.view(-1, 2).flip(1).flatten())


def test_a_copy_fills_with_zeros():
    x, y = torch.ones(32, dtype=torch.int32), torch.full((32,), 9, dtype=torch.int32)
    body = (
        SHARED
        + "    mad.wide.u32 %d5, %r0, 4, %d0;\n    mad.wide.u32 %d6, %r0, 4, %d1;\n"
        + "    setp.lt.u32 %p1, %r0, 7;\n    selp.b32 %r5, 4, 0, %p1;\n"
        + "    cp.async.ca.shared.global [%r2], [%d5], 4, %r5;\n    cp.async.wait_all;\n"
        + "    ld.shared.u32 %r4, [%r2];\n    st.global.u32 [%d6], %r4;"
    )
    launch(body, [x, y], shared=128)
    assert y.tolist() == [1] * 7 + [0] * 25


def test_unknown_instructions_are_named_before_anything_runs():
    module = load(kernel("    frobnicate.u32 %r1, %r2;"))
    with pytest.raises(ValueError, match=r"does not know 1 instructions: line \d+: frobnicate.u32"):
        module.launch("k", (1,), (1,), [torch.zeros(1)])


def test_a_register_that_is_not_declared():
    module = load(HEADER + ".visible .entry k()\n{\n    mov.u32 [%nothing], 1;\n    ret;\n}\n")
    with pytest.raises(PtxSyntaxError, match="%nothing"):
        module.launch("k", (1,), (1,), [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "name: got 'other', allowed: k"),
        ({"args": []}, "args: got 0 values, k has 1"),
        ({"args": ["x"]}, "args: got a str for p0"),
        ({"grid": (0,)}, "grid: got"),
        ({"accumulate": "sideways"}, "accumulate: got 'sideways'"),
    ],
)
def test_arguments_of_a_launch(change, message):
    module = load(kernel(""))
    given = {"name": "k", "grid": (1,), "block": (1,), "args": [torch.zeros(1)], **change}
    with pytest.raises(ValueError, match=message):
        module.launch(**given)
