"""The PTX machine enforces the rules of hardware.

For each rule, a kernel that keeps the rule runs, and a kernel that breaks the rule has a fault.
"""

import re
import struct

import numpy
import pytest
import torch
from small_kernels import HEADER, kernel

from ptxmachine import PtxFault, PtxSyntaxError, load, tensor_map

KIB = 1024
STORE = "    mad.wide.u32 %d5, %r0, 4, %d0;\n    st.global.u32 [%d5], 1;"


def run(text, threads=32, grid=(1,), size=None, **options):
    """Run a kernel whose threads each store 1 to a tensor; return whether each element is 1."""
    out = torch.zeros(size or threads, dtype=torch.int32)
    load(text).launch("k", grid, (threads,), [out], **options)
    return bool(out.all())


def fault(text, **options):
    """Run a kernel, which must have a fault, and return the fault."""
    with pytest.raises(PtxFault) as caught:
        run(text, **options)
    return caught.value


def for_target(text, target, version="8.6"):
    """Return a text with another target architecture and another version of the PTX ISA."""
    return text.replace("sm_90a", target).replace(".version 8.6", f".version {version}")


# Registers of a block.


def moving(action, count, bounds):
    body = f"    setmaxnreg.{action}.sync.aligned.u32 {count};\n{STORE}"
    return kernel(body, bounds=bounds)


@pytest.mark.parametrize(
    ("threads", "registers"),
    [
        (384, 168),
        (512, 128),
        # 408 threads have 13 warps, and registers are allocated for 16 warps.
        (408, 128),
    ],
)
def test_a_block_may_have_the_registers_of_a_multiprocessor(threads, registers):
    assert run(moving("dec", 40, f".maxnreg {registers}"), threads=threads)
    found = fault(moving("dec", 40, f".maxnreg {registers + 8}"), threads=threads)
    assert found.kind == "registers"
    assert "and a multiprocessor has 65536" in str(found)


def test_a_block_cannot_start_with_more_registers_than_a_multiprocessor_has():
    found = fault(moving("dec", 40, ".maxnreg 168"), threads=512)
    assert "a block of 512 threads needs 86016 registers, 168 for each thread of 16" in str(found)


@pytest.mark.parametrize("bounds", ["", ".maxntid 384, 1, 1", ".reqntid 384", ".minnctapersm 1"])
def test_setmaxnreg_needs_bounds_of_the_registers(bounds):
    """If no directive limits the registers of a thread, setmaxnreg must be a fault.

    ptxas ignores setmaxnreg in such a kernel.
    """
    found = fault(moving("dec", 40, bounds), threads=384)
    assert found.kind == "registers"
    assert "setmaxnreg has no effect, because the kernel has neither .maxnreg nor" in str(found)
    assert run(moving("dec", 40, ".maxntid 384\n.minnctapersm 1"), threads=384)


@pytest.mark.parametrize("seed", range(3))
def test_registers_that_a_block_can_never_have(seed):
    """A request that exceeds the registers of the block must be a fault.

    The only warpgroup has 21,504 registers, and 176 registers for each thread would be 22,528.
    """
    found = fault(moving("inc", 176, ".maxnreg 168"), threads=128, seed=seed)
    assert found.kind == "registers"
    assert (
        "takes 1024 registers for the warps of a warpgroup, and the block can free at most 0"
        in (str(found))
    )
    assert run(moving("inc", 168, ".maxnreg 168"), threads=128, seed=seed)


@pytest.mark.parametrize("part", [True, False])
def test_all_warps_of_a_warpgroup_move_registers(part):
    body = f"    setp.lt.u32 %p1, %r0, {96 if part else 128};\n"
    body += f"    @%p1 setmaxnreg.dec.sync.aligned.u32 40;\n{STORE}"
    text = kernel(body, bounds=".maxnreg 168")
    if part:
        found = fault(text, threads=256)
        assert found.kind == "divergence"
        assert "setmaxnreg is executed by a part of a warpgroup" in str(found)
    else:
        assert run(text, threads=256)


# Shared memory.


def test_static_shared_memory():
    assert run(kernel(STORE, shared=48 * KIB))
    with pytest.raises(PtxSyntaxError, match=r"bytes of memory in .shared: got 49153"):
        run(kernel(STORE, shared=48 * KIB + 1))


def test_static_shared_memory_of_several_variables():
    text = kernel("    mov.u32 %r1, outside;\n" + STORE, shared=32 * KIB)
    text = text.replace(".visible", ".shared .b8 outside[{}];\n.visible")
    assert run(text.replace("{}", str(16 * KIB)))
    with pytest.raises(PtxSyntaxError, match=r"bytes of .shared variables: .* at most"):
        run(text.replace("{}", str(16 * KIB + 1)))
    # A shared variable outside the kernel takes no shared memory if the kernel does not use it.
    assert run(text.replace("{}", str(17 * KIB)).replace("mov.u32 %r1, outside", "mov.u32 %r1, 0"))


@pytest.mark.parametrize(
    ("target", "most"),
    [
        ("sm_60", 48), ("sm_70", 96), ("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_89", 99),
        ("sm_90", 227), ("sm_90a", 227), ("sm_120", 99),
    ],
)  # fmt: skip
@pytest.mark.parametrize("static", [0, 32 * KIB])
def test_shared_memory_of_an_architecture(target, most, static):
    text = for_target(kernel(STORE, shared=static), target)
    assert run(text, dynamic_shared=most * KIB - static)
    message = f"dynamic_shared: got .*allowed: .*{most * KIB}"
    with pytest.raises(ValueError, match=message):
        run(text, dynamic_shared=most * KIB - static + 1)


# The parameters and the shape of a launch.


@pytest.mark.parametrize(
    ("target", "version", "most"),
    [("sm_60", "8.6", 4096), ("sm_90", "8.0", 4096), ("sm_70", "8.1", 32_764),
     ("sm_90", "9.0", 32_764)],
)  # fmt: skip
def test_parameters_of_a_kernel(target, version, most):
    text = for_target(
        f"{HEADER}.visible .entry k(.param .align 4 .b8 x[{{}}])\n{{\nret;\n}}\n", target, version
    )
    load(text.replace("{}", str(most))).launch("k", (1,), (1,), [bytes(most)])
    with pytest.raises(PtxSyntaxError, match=rf"line 4: bytes of .*: got {most + 4}, .* {most}$"):
        load(text.replace("{}", str(most + 4))).launch("k", (1,), (1,), [bytes(most + 4)])


@pytest.mark.parametrize(
    ("sizes", "good"),
    [
        ({"grid": (2**31 - 1, 1, 1)}, True),
        ({"grid": (2**31, 1, 1)}, False),
        ({"grid": (1, 65_535, 1)}, True),
        ({"grid": (1, 65_536, 1)}, False),
        ({"grid": (1, 1, 65_535)}, True),
        ({"grid": (1, 1, 65_536)}, False),
        ({"block": (1024, 1, 1)}, True),
        ({"block": (1025, 1, 1)}, False),
        ({"block": (1, 1024, 1)}, True),
        ({"block": (32, 33, 1)}, False),
        ({"block": (1, 1, 64)}, True),
        ({"block": (1, 1, 65)}, False),
    ],
)
def test_sizes_of_a_launch(sizes, good):
    module = load(kernel("", pointers=0))
    given = {"grid": (1,), "block": (1,), **sizes}
    if good:
        module.launch("k", given["grid"], given["block"], [], blocks=[0])
    else:
        name = next(iter(sizes))
        with pytest.raises(
            ValueError, match=re.escape(f"{name}: got {sizes[name]}, allowed: at most")
        ):
            module.launch("k", given["grid"], given["block"], [], blocks=[0])


# Barriers.


def test_numbers_of_barriers():
    assert run(kernel(f"    bar.sync 15;\n{STORE}"))
    assert "barrier 16, allowed: 0 to 15" in str(fault(kernel("    bar.sync 16;")))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (64, ""),
        (48, "a barrier of 48 threads, allowed: multiples of 32"),
        (96, "a barrier of 96 threads in a block of 64"),
    ],
)
def test_threads_of_a_barrier(count, message):
    text = kernel(f"    bar.sync 1, {count};\n{STORE}")
    if message:
        assert message in str(fault(text, threads=64))
    else:
        assert run(text, threads=64)


BY_WARP = """
    setp.lt.u32 %p1, %r0, 32;
    @!%p1 bra OTHER;
    {first}
    bra JOIN;
OTHER:
    {other}
JOIN:
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("first", "other"), [(64, 64), (64, 128), (128, 64)])
def test_warps_meet_at_a_barrier_with_one_count(first, other, seed):
    body = BY_WARP.format(first=f"bar.sync 1, {first};", other=f"bar.sync 1, {other};")
    text = kernel(body + STORE)
    if first == other:
        assert run(text, threads=64, seed=seed)
        return
    found = fault(text, threads=128, seed=seed)
    assert (found.kind, "met with different counts" in str(found)) == ("divergence", True)


@pytest.mark.parametrize("arrivals", [1, 2])
def test_arrivals_alone_complete_a_barrier(arrivals):
    """Two arrivals complete a phase of a barrier, so a later bar.sync waits for the next phase."""
    body = BY_WARP.format(first="bar.arrive 1, 64;\n" * arrivals, other="bar.sync 1, 64;")
    text = kernel(body + STORE)
    if arrivals == 1:
        assert run(text, threads=64)
    else:
        assert fault(text, threads=64).kind == "deadlock"


def with_mbarrier(instruction, count=32, offset=0):
    body = f"""
    mov.u32 %r1, memory;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1+{offset}], {count};
    bar.sync 0;
    {instruction}
{STORE}"""
    return kernel(body, shared=64)


@pytest.mark.parametrize("count", [1, 2**20 - 1])
def test_an_mbarrier_that_hardware_has(count):
    assert run(with_mbarrier("", count, offset=8))


@pytest.mark.parametrize(
    ("count", "offset", "message"),
    [
        (0, 0, "an mbarrier of 0 arrivals, allowed: 1 to 2^20 - 1"),
        (2**20, 0, "an mbarrier of 1048576 arrivals, allowed: 1 to 2^20 - 1"),
        (1, 4, "is not a multiple of 8"),
    ],
)
def test_an_mbarrier_that_hardware_has_not(count, offset, message):
    assert message in str(fault(with_mbarrier("", count, offset)))


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%r1], 1;", ""),
        ("mbarrier.arrive.shared::cta.b64 _, [%r1], 0;", "an arrival at an mbarrier with"),
        ("@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048575;", ""),
        ("@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048576;",
         "an mbarrier waits for 1048576 bytes, allowed: at most 2^20 - 1"),
    ],
)  # fmt: skip
def test_counts_of_an_mbarrier(instruction, message):
    text = with_mbarrier(instruction)
    if message:
        assert message in str(fault(text))
    else:
        assert run(text)


# Tensor maps.

BOX = """
    .shared .align 8 .b8 full[8];
    mov.u32 %r1, memory;
    mov.u32 %r2, full;
    mov.b64 %d2, m;
    cvta.param.u64 %d2, %d2;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r1+{at}], [%d2, {{0, 0}}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
"""


def copy_box(map_, source, bytes_=1024, at=0, align=64, pad=0):
    """Run a kernel that copies a box of `source` to shared memory.

    Return whether all threads reached the end of the kernel, where each of them stores 1.

    `map_` is the tensor map. `at` is the place of the box in shared memory, in bytes.
    """
    text = kernel(BOX.format(bytes=bytes_, at=at) + STORE, shared=2048)
    head = f", .param .b8 pad[{pad}]" if pad else ""
    head += f", .param .align {align} .b8 m[128])"
    text = text.replace(".param .u64 p0)", f".param .u64 p0{head}")
    out = torch.zeros(32, dtype=torch.int32)
    given = [out, *([bytes(pad)] if pad else []), map_]
    load(text).launch("k", (1,), (32,), given, memory=[source])
    return bool(out.all())


SOURCE = torch.zeros(64, 64, dtype=torch.bfloat16)


def test_a_tensor_map_among_the_parameters_has_a_multiple_of_64_as_its_address():
    map_ = tensor_map(SOURCE, (16, 32))
    assert copy_box(map_, SOURCE)
    with pytest.raises(PtxFault, match=r"misaligned: a tensor map at byte 8 of the parameters"):
        copy_box(map_, SOURCE, align=8)


def test_a_box_goes_to_a_multiple_of_128_bytes():
    map_ = tensor_map(SOURCE, (16, 32))
    assert copy_box(map_, SOURCE, at=128)
    with pytest.raises(PtxFault, match="misaligned"):
        copy_box(map_, SOURCE, at=64)


@pytest.mark.parametrize(
    ("box", "swizzle", "message"),
    [
        ((32, 16), 0, ""),
        ((32, 16), 64, ""),
        ((32, 16), 32, "a row of the box has 64 bytes, more than the swizzle's 32"),
        ((4, 128), 0, "a row of the box has 8 bytes, no multiple of 16"),
        ((32, 0), 0, "a side of the box is not 1 to 256"),
        ((32, 257), 0, "a side of the box is not 1 to 256"),
    ],
)
def test_a_tensor_map_that_a_kernel_has_made(box, swizzle, message):
    """A copy with a tensor map that breaks the rules of ``cuTensorMapEncodeTiled`` must fault.

    The test changes the bytes of a valid map, whose layout is `TensorMap` in csrc/machine.h.
    """
    map_ = bytearray(tensor_map(SOURCE, (16, 32)))
    map_[6] = swizzle
    struct.pack_into("<2H", map_, 72, *box)
    if not message:
        assert copy_box(bytes(map_), SOURCE)
        return
    with pytest.raises(PtxFault, match=f"tensor map: {message}"):
        copy_box(bytes(map_), SOURCE)


def test_a_stride_of_a_tensor_map_that_a_kernel_has_made():
    map_ = bytearray(tensor_map(SOURCE, (16, 32)))
    for stride, good in ((128, True), (136, False), (2**40, False)):
        struct.pack_into("<Q", map_, 40, stride)
        if good:
            assert copy_box(bytes(map_), SOURCE)
            continue
        with pytest.raises(PtxFault, match="a stride is not a multiple of 16 below 2\\^40"):
            copy_box(bytes(map_), SOURCE)


def matrix(columns=64, stride=128, offset=0):
    """Return a float16 array of 64 rows that begin `stride` bytes apart.

    The address of the array is `offset` modulo 16. The array may exceed its memory, because no test
    accesses its elements.
    """
    whole = numpy.zeros(4096, dtype=numpy.float16)
    first = offset - whole.ctypes.data % 16
    whole = whole.view(numpy.uint8)[first % 16 :][:2048].view(numpy.float16)
    return numpy.lib.stride_tricks.as_strided(whole, (64, columns), (stride, 2))


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        ({}, {}, ""),
        ({"offset": 8}, {}, "multiples of 16"),
        ({"stride": 136}, {}, "multiples of 16"),
        ({"stride": 2**40 - 16}, {}, ""),
        ({"stride": 2**40}, {}, "allowed: 0 to 1099511627760"),
        ({"columns": 0}, {}, "sizes of 1 to"),
        ({}, {"box": (256, 64)}, ""),
        ({}, {"box": (257, 64)}, "2 sizes of 1 to 256"),
        ({}, {"box": (8, 64), "swizzle": 128}, ""),
        ({}, {"box": (8, 72), "swizzle": 128}, "up to the swizzle's 128"),
        ({}, {"box": (8, 4)}, "allowed: multiples of 16"),
        ({}, {"fill_nan": True}, ""),
    ],
)
def test_arguments_of_a_tensor_map(array, options, message):
    given = {"box": (16, 32), **options}
    if not message:
        assert len(tensor_map(matrix(**array), **given)) == 128
        return
    with pytest.raises(ValueError, match=message):
        tensor_map(matrix(**array), **given)


def test_integers_have_no_nan():
    with pytest.raises(ValueError, match="fill_nan: got a tensor of i16"):
        tensor_map(SOURCE.view(torch.int16), (16, 32), fill_nan=True)


# Order between blocks.

HANDOVER = """
    mov.u32 %r1, {part};
    setp.eq.u32 %p1, %r1, {writer};
    and.b32 %r2, %r0, 31;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra END;
    @!%p1 bra READ;
    st.global.u32 [%d0], 7;
    {release}
    bra END;
READ:
    {acquire}
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra READ;
    {fence}
    ld.global.u32 %r4, [%d0];
    st.global.u32 [%d0+8], %r4;
END:
"""
ORDERS = {
    "release": ("st.release.{0}.global.u32 [%d0+4], 1;", "ld.acquire.{0}.global.u32 %r3, [%d0+4];",
                ""),
    "fences": ("fence.acq_rel.{0};\nst.relaxed.{0}.global.u32 [%d0+4], 1;",
               "ld.relaxed.{0}.global.u32 %r3, [%d0+4];", "fence.acq_rel.{0};"),
    "fence.sc": ("fence.sc.{0};\nst.relaxed.{0}.global.u32 [%d0+4], 1;",
                 "ld.acquire.{0}.global.u32 %r3, [%d0+4];", ""),
    "atom": ("atom.release.{0}.global.exch.b32 %r5, [%d0+4], 1;",
             "atom.acquire.{0}.global.or.b32 %r3, [%d0+4], 0;", ""),
    "red": ("red.release.{0}.global.add.u32 [%d0+4], 1;",
            "ld.relaxed.{0}.global.u32 %r3, [%d0+4];", "fence.acq_rel.{0};"),
}  # fmt: skip


def handed_over(release, acquire, fence, *, writer=0, blocks=2, seed=0):
    """Return the value that one block (or warp) reads after another block (or warp) has written."""
    part = "%ctaid.x" if blocks == 2 else "%warpid"
    body = HANDOVER.format(release=release, acquire=acquire, fence=fence, part=part, writer=writer)
    x = torch.zeros(3, dtype=torch.int32)
    # Both blocks must run concurrently, because one block waits for the other.
    load(kernel(body)).launch("k", (blocks,), (64 // blocks,), [x], threads=blocks, seed=seed)
    return x[2].item()


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_release_and_an_acquire_order_two_blocks(order, scope, writer):
    assert handed_over(*(part.format(scope) for part in ORDERS[order]), writer=writer) == 7


# With the seed 0, warp 1 runs only after warp 0, so warp 0 must be the writer.
@pytest.mark.parametrize(("seed", "writer"), [(0, 0), (1, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_the_scope_of_a_block_orders_its_warps(order, seed, writer):
    parts = [part.format("cta") for part in ORDERS[order]]
    assert handed_over(*parts, writer=writer, blocks=1, seed=seed) == 7


@pytest.mark.parametrize("scope", ["cta", "cluster"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("side", ["both", "release", "acquire"])
def test_the_scope_of_a_block_does_not_order_two_blocks(order, side, scope):
    release, acquire, fence = ORDERS[order]
    near, far = scope, "gpu"
    parts = (
        release.format(far if side == "acquire" else near),
        acquire.format(far if side == "release" else near),
        fence.format(far if side == "release" else near),
    )
    with pytest.raises(PtxFault, match="race"):
        handed_over(*parts)


STRONG = ("st.relaxed.gpu.global.u32 [%d0+4], 1;", "ld.relaxed.gpu.global.u32 %r3, [%d0+4];", "")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {0: "st.release.gpu.global.u32 [%d0+4], 1;"},
        {1: "ld.acquire.gpu.global.u32 %r3, [%d0+4];"},
        {0: "fence.acq_rel.gpu;\n" + STRONG[0]},
        {2: "fence.acq_rel.gpu;"},
        # One fence has the scope of a block, although the accesses have the scope of the device.
        {0: "fence.acq_rel.cta;\n" + STRONG[0], 2: "fence.acq_rel.gpu;"},
        {0: "fence.acq_rel.gpu;\n" + STRONG[0], 2: "fence.acq_rel.cta;"},
        # One access to the flag is weak.
        {0: "fence.acq_rel.gpu;\nst.global.u32 [%d0+4], 1;", 2: "fence.acq_rel.gpu;"},
        {0: "st.release.gpu.global.u32 [%d0+4], 1;", 1: "ld.global.u32 %r3, [%d0+4];"},
    ],
)
def test_half_an_order_is_a_race(change):
    with pytest.raises(PtxFault, match="race"):
        handed_over(*(change.get(n, part) for n, part in enumerate(STRONG)))


@pytest.mark.parametrize(("scope", "good"), [("gpu", True), ("cta", False)])
def test_atomics_of_two_blocks_need_the_scope_of_the_device(scope, good):
    module = load(kernel(f"    red.relaxed.{scope}.global.add.u32 [%d0], 1;"))
    x = torch.zeros(1, dtype=torch.int32)
    module.launch("k", (1,), (64,), [x])
    if good:
        module.launch("k", (2,), (64,), [x])
        assert x.item() == 3 * 64
        return
    with pytest.raises(PtxFault, match="race"):
        module.launch("k", (2,), (64,), [x])
