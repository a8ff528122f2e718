"""Bulk copies, tensor maps and mbarriers of the PTX machine."""

import pytest
import torch
from small_kernels import HEADER, REGISTERS, launch

from ptxmachine import PtxFault, load, tensor_map


def run(body, tensors, maps, shared, threads=64, **options):
    names = [f".param .u64 p{n}" for n in range(len(tensors))]
    names += [f".param .align 64 .b8 m{n}[128]" for n in range(len(maps))]
    loads = "".join(f"ld.param.u64 %d{n}, [p{n}];\n" for n in range(len(tensors)))
    loads += "".join(
        f"mov.b64 %d{20 + n}, m{n};\ncvta.param.u64 %d{20 + n}, %d{20 + n};\n"
        for n in range(len(maps))
    )
    text = (
        f"{HEADER}.visible .entry k({', '.join(names)})\n{{{REGISTERS}"
        f".shared .align 1024 .b8 memory[{shared}];\n.shared .align 8 .b8 full[16];\n{loads}"
        f"mov.u32 %r0, %tid.x;\nmov.u32 %r1, memory;\nmov.u32 %r2, full;\n{body}\nret;\n}}\n"
    )
    given = [map_ for _, map_ in maps]
    memory = [tensor for tensor, _ in maps]
    return load(text).launch("k", (1,), (threads,), [*tensors, *given], memory=memory, **options)


TENSOR = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
INIT = """
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra WAIT;
"""


def loading(bytes_, coordinates, dims):
    return (
        f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes_};\n"
        f"@%p1 {TENSOR.format(dims)} [%r1], [%d20, {{{coordinates}}}], [%r2];\n"
    )


# Thread t copies 16 bytes from shared memory to the output.
OUT = """
mad.lo.u32 %r3, %r0, 16, %r1;
ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];
mul.wide.u32 %d10, %r0, 16;
add.s64 %d11, %d0, %d10;
st.global.v4.b32 [%d11], {%r4, %r5, %r6, %r7};
"""


def expected(source, first, box, width, fill=0):
    """Return the box after the swizzle, of shape (rows, columns), computed by index arithmetic."""
    rows, columns = box
    image = torch.full((rows, columns), fill, dtype=source.dtype)
    for r in range(rows):
        for c in range(columns):
            row, column = first[0] + r, first[1] + c
            if 0 <= row < source.shape[0] and 0 <= column < source.shape[1]:
                value = source[row, column]
            else:
                value = fill
            at = 2 * (r * columns + c)
            if width:
                at ^= (at >> 7 & (width // 16 - 1)) << 4
            image.view(-1)[at // 2] = value
    return image


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("first", [(0, 0), (3, 8), (40, 60), (-2, -4)])
def test_a_box_arrives_in_the_layout_of_its_swizzle(first, width, seed):
    source = torch.arange(50 * 80, dtype=torch.int16).reshape(50, 80)
    columns = (width or 64) // 2
    rows = 1024 // (2 * columns)
    out = torch.zeros(rows, columns, dtype=torch.int16)
    map_ = tensor_map(source, (rows, columns), swizzle=width)
    body = INIT + loading(1024, f"{first[1]}, {first[0]}", 2) + WAIT + OUT
    run(body, [out], [(source, map_)], 1024, seed=seed)
    assert torch.equal(out, expected(source, first, (rows, columns), width))


def test_outside_the_tensor_a_map_may_fill_with_nan():
    source = torch.ones(4, 32, dtype=torch.bfloat16)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    map_ = tensor_map(source, (16, 32), fill_nan=True)
    run(INIT + loading(1024, "0, 2", 2) + WAIT + OUT, [out], [(source, map_)], 1024)
    assert (out[:2] == 1).all()
    assert out[2:].isnan().all()


def test_three_dimensions():
    source = torch.arange(4 * 6 * 16, dtype=torch.int32).reshape(4, 6, 16)
    out = torch.zeros(4, 4, 16, dtype=torch.int32)
    map_ = tensor_map(source, (4, 4, 16))
    run(INIT + loading(1024, "0, 1, 0", 3) + WAIT + OUT, [out], [(source, map_)], 1024)
    assert torch.equal(out, source[:, 1:5])


@pytest.mark.parametrize("seed", range(6))
def test_a_box_is_not_there_before_its_barrier_says_so(seed):
    source = torch.zeros(16, 32, dtype=torch.int16)
    out = torch.zeros(16, 32, dtype=torch.int16)
    maps = [(source, tensor_map(source, (16, 32)))]
    with pytest.raises(PtxFault, match=r"race|uninitialised"):
        run(INIT + loading(1024, "0, 0", 2) + OUT, [out], maps, 1024, seed=seed)


@pytest.mark.parametrize("bytes_", [1008, 1040])
def test_a_barrier_that_expects_other_bytes_never_completes(bytes_):
    source, out = torch.zeros(16, 32, dtype=torch.int16), torch.zeros(16, 32, dtype=torch.int16)
    maps = [(source, tensor_map(source, (16, 32)))]
    with pytest.raises(PtxFault, match="deadlock"):
        run(INIT + loading(bytes_, "0, 0", 2) + WAIT + OUT, [out], maps, 1024)


STORE = """
mad.lo.u32 %r3, %r0, 16, %r1;
mov.b32 %r4, 5;
st.shared.v4.b32 [%r3], {{%r4, %r4, %r4, %r4}};
{fence}
{barrier}
setp.eq.u32 %p1, %r0, 0;
@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d20, {{-4, 3}}], [%r1];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
"""
FENCE, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"


@pytest.mark.parametrize("seed", range(3))
def test_a_store_writes_the_part_inside_the_tensor(seed):
    target = torch.zeros(10, 16, dtype=torch.int32)
    maps = [(target, tensor_map(target, (8, 16)))]
    # The box has 8 x 16 words, which are the 512 bytes that the first 32 threads have written.
    run(STORE.format(fence=FENCE, barrier=BARRIER), [], maps, 1024, seed=seed)
    expected_ = torch.zeros(10, 16, dtype=torch.int32)
    expected_[3:, :12] = 5
    assert torch.equal(target, expected_)


@pytest.mark.parametrize(("fence", "barrier"), [("", BARRIER), (FENCE, "")])
def test_a_store_needs_fence_and_barrier(fence, barrier):
    target = torch.zeros(10, 16, dtype=torch.int32)
    maps = [(target, tensor_map(target, (8, 16)))]
    with pytest.raises(PtxFault) as caught:
        run(STORE.format(fence=fence, barrier=barrier), [], maps, 1024)
    assert caught.value.kind in (("missing fence",) if barrier else ("race", "uninitialised"))


def test_memory_is_not_reused_before_a_store_has_read_it():
    target = torch.zeros(10, 16, dtype=torch.int32)
    maps = [(target, tensor_map(target, (8, 16)))]
    again = "\n@%p1 st.shared.b32 [%r1], 9;"
    body = STORE.format(fence=FENCE, barrier=BARRIER)
    run(body + again, [], maps, 1024)
    with pytest.raises(PtxFault, match="race"):
        run(body.replace("@%p1 cp.async.bulk.wait_group.read 0;", "") + again, [], maps, 1024)


PIPELINE = """
// Thread 0 of warp 0 produces four boxes through two stages; warp 1 consumes them.
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1;
mov.u32 %r10, empty;
@%p1 mbarrier.init.shared::cta.b64 [%r10], 32;
@%p1 mbarrier.init.shared::cta.b64 [%r10+8], 32;
bar.sync 0;
setp.ge.u32 %p3, %r0, 32;
mov.u32 %r20, 0;
@%p3 bra CONSUMER;
@!%p1 bra END;
PRODUCE:
and.b32 %r21, %r20, 1;
shr.u32 %r22, %r20, 1;
xor.b32 %r23, %r22, 1;
mad.lo.u32 %r24, %r21, 8, %r10;
mad.lo.u32 %r25, %r21, 8, %r2;
mad.lo.u32 %r26, %r21, 1024, %r1;
mul.lo.u32 %r27, %r20, 16;
EMPTY:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r24], %r23;
@!%p2 bra EMPTY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r25], 1024;
TENSOR [%r26], [%d20, {0, %r27}], [%r25];
add.u32 %r20, %r20, 1;
setp.lt.u32 %p4, %r20, 4;
@%p4 bra PRODUCE;
bra END;
CONSUMER:
and.b32 %r21, %r20, 1;
shr.u32 %r22, %r20, 1;
mad.lo.u32 %r24, %r21, 8, %r10;
mad.lo.u32 %r25, %r21, 8, %r2;
mad.lo.u32 %r26, %r21, 1024, %r1;
FULL:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r25], %r22;
@!%p2 bra FULL;
sub.u32 %r28, %r0, 32;
mad.lo.u32 %r29, %r28, 32, %r26;
ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r29];
ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r29+16];
mad.lo.u32 %r34, %r20, 1024, 0;
mad.lo.u32 %r34, %r28, 32, %r34;
cvt.u64.u32 %d10, %r34;
add.s64 %d11, %d0, %d10;
st.global.v4.b32 [%d11], {%r4, %r5, %r6, %r7};
st.global.v4.b32 [%d11+16], {%r30, %r31, %r32, %r33};
ARRIVE
add.u32 %r20, %r20, 1;
setp.lt.u32 %p4, %r20, 4;
@%p4 bra CONSUMER;
END:
"""


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_of_stages(seed):
    source = torch.arange(64 * 32, dtype=torch.int16).reshape(64, 32)
    maps = [(source, tensor_map(source, (16, 32)))]
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r24];"
    shared = ".shared .align 8 .b8 empty[16];\n"
    body = shared + PIPELINE.replace("ARRIVE", arrive).replace("TENSOR", TENSOR.format(2))
    out = torch.zeros_like(source)
    run(body, [out], maps, 2048, seed=seed)
    assert torch.equal(out, source)
    # If the consumer releases a stage before it reads the stage, there is a race.
    early = body.replace(arrive, "").replace("sub.u32 %r28", arrive + "\nsub.u32 %r28")
    with pytest.raises(PtxFault, match="race"):
        run(early, [out], maps, 2048, seed=seed)
    # If the consumer never releases a stage, the producer waits forever.
    with pytest.raises(PtxFault, match="deadlock"):
        run(body.replace(arrive, ""), [out], maps, 2048, seed=seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (16,)}, "box: got"),
        ({"box": (16, 7)}, "a row has 14 bytes"),
        ({"box": (16, 64), "swizzle": 64}, "up to the swizzle's 64"),
        ({"swizzle": 48}, "swizzle: got 48"),
    ],
)
def test_maps_that_the_hardware_would_not_take(change, message):
    source = torch.zeros(64, 64, dtype=torch.int16)
    with pytest.raises(ValueError, match=message):
        tensor_map(source, **{"box": (16, 32), **change})


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_issue_one_store_write_once(seed):
    target = torch.zeros(10, 16, dtype=torch.int32)
    maps = [(target, tensor_map(target, (8, 16)))]
    every = STORE.format(fence=FENCE, barrier=BARRIER)
    every = every.replace("setp.eq.u32 %p1, %r0, 0;", "setp.lt.u32 %p1, %r0, 32;")
    run(every, [], maps, 1024, seed=seed)
    assert (target[3:, :12] == 5).all()
    assert (target[:3] == 0).all()
    # If all lanes issue the same reduction, it must be executed once for each lane.
    reduction = every.replace("cp.async.bulk.tensor.2d", "cp.reduce.async.bulk.tensor.2d")
    reduction = reduction.replace("shared::cta.tile", "shared::cta.add.tile")
    run(reduction, [], maps, 1024, seed=seed)
    assert (target[3:, :12] == 5 + 32 * 5).all()


def test_a_replaced_stride_goes_to_its_dimension():
    # In the machine's own layout of a tensor map, the strides begin at byte 40.
    body = """
mov.u32 %r5, memory;
mad.lo.u32 %r6, %r0, 4, %r5;
st.shared.b32 [%r6], 0;
bar.warp.sync -1;
setp.eq.u32 %p1, %r0, 0;
mov.b64 %d5, 4096;
@%p1 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r5], 0x1, %d5;
bar.warp.sync -1;
ld.shared.u64 %d6, [%r5+48];
@%p1 st.global.b64 [%d0], %d6;
"""
    out = torch.zeros(1, dtype=torch.int64)
    launch(body, [out], shared=128)
    assert out.item() == 4096


@pytest.mark.parametrize(("code", "width"), [(0, 0), (1, 32), (2, 64), (3, 128)])
@pytest.mark.parametrize("rank", [1, 5])
def test_a_replaced_rank_is_one_more_and_a_swizzle_is_a_code(rank, code, width):
    # In the machine's own layout of a tensor map, byte 4 is the rank and byte 6 is the swizzle.
    body = f"""
mov.u32 %r5, memory;
mad.lo.u32 %r6, %r0, 4, %r5;
st.shared.b32 [%r6], 0;
bar.warp.sync -1;
setp.eq.u32 %p1, %r0, 0;
@%p1 tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r5], {rank - 1};
@%p1 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r5], {code};
bar.warp.sync -1;
ld.shared.u8 %r7, [%r5+4];
ld.shared.u8 %r8, [%r5+6];
@%p1 st.global.v2.b32 [%d0], {{%r7, %r8}};
"""
    out = torch.zeros(2, dtype=torch.int32)
    launch(body, [out], shared=128)
    assert out.tolist() == [rank, width]
