"""Matrix instructions, compared with the fragment layouts of the manual and products of torch.

The functions in this file compute which element each register of a lane holds, from the figures of
the PTX ISA. The tests compare these elements with the results of ldmatrix, mma and wgmma.
"""

import pytest
import torch
from small_kernels import launch

from ptxmachine import PtxFault

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def run(body, tensors, threads=32, shared=0, **options):
    """Run a kernel with a given body on one block, where %r1 has the number of the lane."""
    return launch(f"and.b32 %r1, %r0, 31;\n{body}", tensors, threads, shared, **options)


def words(fragment):
    """Return the 32-bit words of a fragment of shape (32 lanes, registers, elements)."""
    return fragment.contiguous().view(torch.int32).reshape(32, -1).contiguous()


def a_fragment(a):
    """Return the fragment of a matrix A of shape (16, 8 n), whose 32-bit words have n elements.

    Register r of lane l holds word 4 (r / 2) + l % 4 of row l / 4, or of row l / 4 + 8 if r is odd.
    """
    n = a.shape[1] // 8
    lane = torch.arange(32)[:, None, None]
    register, element = torch.arange(4)[None, :, None], torch.arange(n)[None, None, :]
    return a[lane // 4 + 8 * (register % 2), n * (lane % 4 + 4 * (register // 2)) + element]


def b_fragment(b):
    """Return the fragment of a matrix B of shape (8 n, 8), whose 32-bit words have n elements.

    Register r of lane l holds rows n (l % 4 + 4 r) to n (l % 4 + 4 r) + n - 1 of column l / 4.
    """
    n = b.shape[0] // 8
    lane = torch.arange(32)[:, None, None]
    register, element = torch.arange(2)[None, :, None], torch.arange(n)[None, None, :]
    return b[n * (lane % 4 + 4 * register) + element, (lane // 4).expand(32, 2, n)]


def from_accumulators(c, columns):
    """Return the matrix D of shape (16, columns) from the registers of its fragment.

    Register r of lane l holds the element in row l / 4 + 8 (r / 2 % 2) and in column
    8 (r / 4) + 2 (l % 4) + r % 2.
    """
    d = torch.empty(16, columns)
    for lane in range(32):
        for r in range(columns // 2):
            d[lane // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (lane % 4) + r % 2] = c[lane, r]
    return d


LOAD = """
mul.lo.u32 %r2, %r1, 16;
cvt.u64.u32 %d10, %r2;
add.s64 %d11, %d0, %d10;
ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d11];
mul.lo.u32 %r3, %r1, 8;
cvt.u64.u32 %d12, %r3;
add.s64 %d13, %d1, %d12;
ld.global.v2.b32 {%b0, %b1}, [%d13];
add.s64 %d14, %d2, %d10;
"""


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("order", ["forward", "reverse", "exact", "truncate"])
def test_mma_multiplies_the_fragments_of_the_manual(kind, order):
    torch.manual_seed(0)
    a = torch.randint(-8, 9, (16, 16)).to(DTYPES[kind])
    b = torch.randint(-8, 9, (16, 8)).to(DTYPES[kind])
    c = torch.zeros(32, 4)
    body = LOAD + (
        "mov.b32 %c0, 0;\n"
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%c1, %c2, %c3, %c4}}, "
        "{%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};\n"
        "st.global.v4.b32 [%d14], {%c1, %c2, %c3, %c4};"
    )
    report = run(body, [words(a_fragment(a)), words(b_fragment(b)), c], accumulate=order)
    assert torch.equal(from_accumulators(c, 8), a.float() @ b.float())
    assert report.counts["tensor_flops"] == 2 * 16 * 8 * 16


@pytest.mark.parametrize("types", ["s8.s8", "u8.s8", "s8.u8", "u8.u8"])
def test_mma_multiplies_signed_and_unsigned_bytes(types):
    bounds = {"s8": (-128, 128, torch.int8), "u8": (0, 256, torch.uint8)}
    (low_a, top_a, dtype_a), (low_b, top_b, dtype_b) = (bounds[t] for t in types.split("."))
    a, b = torch.randint(low_a, top_a, (16, 32)), torch.randint(low_b, top_b, (32, 8))
    c = torch.zeros(32, 4, dtype=torch.int32)
    body = LOAD + (
        "mov.b32 %c0, 7;\n"
        f"mma.sync.aligned.m16n8k32.row.col.s32.{types}.s32 {{%c1, %c2, %c3, %c4}}, "
        "{%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};\n"
        "st.global.v4.b32 [%d14], {%c1, %c2, %c3, %c4};"
    )
    run(body, [words(a_fragment(a.to(dtype_a))), words(b_fragment(b.to(dtype_b))), c])
    assert torch.equal(from_accumulators(c, 8).long(), a @ b + 7)


def test_mma_ignores_the_lower_13_bits_of_tf32():
    a, b = torch.randint(-8, 9, (16, 8)).float(), torch.randint(-8, 9, (8, 8)).float()
    c = torch.zeros(32, 4)
    body = LOAD + (
        "mov.b32 %c0, 0;\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%c1, %c2, %c3, %c4}, "
        "{%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};\n"
        "st.global.v4.b32 [%d14], {%c1, %c2, %c3, %c4};"
    )
    run(body, [words(a_fragment(a)) | 0x1FFF, words(b_fragment(b)) | 0x1FFF, c])
    assert torch.equal(from_accumulators(c, 8), a @ b)


@pytest.mark.parametrize("kind", DTYPES)
def test_the_orders_of_a_sum_differ_and_stay_within_its_bound(kind):
    torch.manual_seed(1)
    a, b = torch.randn(16, 16).to(DTYPES[kind]), torch.randn(16, 8).to(DTYPES[kind])
    results = {}
    for order in ("forward", "reverse", "exact", "truncate"):
        c = torch.zeros(32, 4)
        body = LOAD + (
            "mov.b32 %c0, 0f3DCCCCCD;\n"
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%c1, %c2, %c3, %c4}}, "
            "{%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};\n"
            "st.global.v4.b32 [%d14], {%c1, %c2, %c3, %c4};"
        )
        run(body, [words(a_fragment(a)), words(b_fragment(b)), c], accumulate=order)
        results[order] = from_accumulators(c, 8)
    exact = a.double() @ b.double() + torch.tensor(0.1).double()
    assert torch.equal(results["exact"], exact.float())
    bound = (a.double().abs() @ b.double().abs()) * 17 * 2.0**-23
    for result in results.values():
        assert ((result.double() - exact).abs() <= bound).all()
    assert (results["truncate"].double().abs() <= exact.abs()).all()
    assert not torch.equal(results["forward"], results["reverse"])


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_the_fragments_of_mma_and_stmatrix_takes_them(transposed):
    a = torch.arange(256, dtype=torch.int16).reshape(16, 16)
    out, back = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int16)
    name = ".trans" if transposed else ""
    body = f"""
mov.u32 %r5, memory;
mul.lo.u32 %r2, %r1, 16;
cvt.u64.u32 %d10, %r2;
add.s64 %d11, %d0, %d10;
ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%d11];
add.s32 %r6, %r5, %r2;
st.shared.v4.b32 [%r6], {{%a0, %a1, %a2, %a3}};
bar.warp.sync -1;
// Lane l gives the row l % 16, and the second half of the columns from lane 16 on.
and.b32 %r7, %r1, 15;
shr.u32 %r8, %r1, 4;
mad.lo.u32 %r9, %r7, 32, %r5;
mad.lo.u32 %r9, %r8, 16, %r9;
ldmatrix.sync.aligned.m8n8.x4{name}.shared.b16 {{%a4, %a5, %a6, %a7}}, [%r9];
add.s64 %d12, %d1, %d10;
st.global.v4.b32 [%d12], {{%a4, %a5, %a6, %a7}};
bar.warp.sync -1;
stmatrix.sync.aligned.m8n8.x4{name}.shared.b16 [%r9+512], {{%a4, %a5, %a6, %a7}};
bar.warp.sync -1;
ld.shared.v4.b32 {{%a8, %a9, %a10, %a11}}, [%r6+512];
add.s64 %d13, %d2, %d10;
st.global.v4.b32 [%d13], {{%a8, %a9, %a10, %a11}};
"""
    run(body, [a, out, back], shared=1024)
    blocks = a.clone()
    if transposed:
        for r in (0, 8):
            for c in (0, 8):
                blocks[r : r + 8, c : c + 8] = a[r : r + 8, c : c + 8].T
    assert torch.equal(out, words(a_fragment(blocks)))
    assert torch.equal(back, a)


def test_a_matrix_instruction_needs_the_whole_warp():
    body = "setp.lt.u32 %p1, %r0, 5;\n@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%a0}, [%r1];"
    with pytest.raises(PtxFault, match="divergence"):
        run(body, [torch.zeros(1)], shared=1024)


@pytest.mark.parametrize("layout_d", ["row", "col"])
@pytest.mark.parametrize("layout_b", ["row", "col"])
@pytest.mark.parametrize("layout_a", ["row", "col"])
def test_wmma_reads_and_writes_matrices_by_rows_and_by_columns(layout_a, layout_b, layout_d):
    a, b = (torch.randint(-8, 9, (16, 16)).half() for _ in range(2))
    d = torch.zeros(16, 24)
    halves = ", ".join(f"%a{r}" for r in range(8)), ", ".join(f"%b{r}" for r in range(8))
    sums, zeros = ", ".join(f"%c{r}" for r in range(8)), ", ".join(["%c8"] * 8)
    shape = "sync.aligned.{}.m16n16k16"
    product = f"wmma.mma.{shape.format(f'{layout_a}.{layout_b}')}.f32.f32"
    body = f"""
mov.b32 %c8, 0;
wmma.load.a.{shape.format(layout_a)}.global.f16 {{{halves[0]}}}, [%d0], 16;
wmma.load.b.{shape.format(layout_b)}.global.f16 {{{halves[1]}}}, [%d1], 16;
{product} {{{sums}}}, {{{halves[0]}}}, {{{halves[1]}}}, {{{zeros}}};
wmma.store.d.{shape.format(layout_d)}.global.f32 [%d2], {{{sums}}}, 24;
"""
    kept = [a if layout_a == "row" else a.T.contiguous()]
    kept += [b if layout_b == "row" else b.T.contiguous()]
    run(body, [*kept, d])
    strides = (24, 1) if layout_d == "row" else (1, 24)
    assert torch.equal(d.as_strided((16, 16), strides), a.float() @ b.float())


# Products of a warpgroup with wgmma.


def swizzled(offset, width):
    """Return the offset, after the swizzle, of the 16 bytes at `offset` (PTX ISA, 9.7.15.5.1)."""
    return offset ^ (offset >> 7 & (width // 16 - 1)) << 4 if width >= 32 else offset


def k_major(matrix, width):
    """Return the bytes of a K-major matrix (rows, 16), and its descriptor for address 0."""
    rows, data = matrix.shape[0], matrix.contiguous().view(torch.uint8).reshape(matrix.shape[0], 32)
    image = torch.zeros(rows * max(width, 32), dtype=torch.uint8)
    for row in range(rows):
        for half in range(2):
            if width == 16:  # a core matrix has 8 rows and 128 bytes
                at = row // 8 * 256 + half * 128 + row % 8 * 16
            else:
                at = swizzled(row // 8 * 8 * width + row % 8 * width + 16 * half, width)
            image[at : at + 16] = data[row, 16 * half : 16 * half + 16]
    leading, stride = (128, 256) if width == 16 else (16, 8 * width)
    code = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    return image, (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


def rows_major(matrix, width):
    """Return the bytes of an M- or N-major matrix (rows, 16), and its descriptor for address 0."""
    rows = matrix.shape[0]
    data = matrix.T.contiguous().view(torch.uint8).reshape(16, 2 * rows)
    per = width // 16
    image = torch.zeros(16 * 2 * max(rows, width // 2), dtype=torch.uint8)
    for k in range(16):
        for j in range(rows // 8):
            if width == 16:
                at = j * 128 + k % 8 * 16 + k // 8 * (rows // 8) * 128
            else:
                # A block has one row for each k, with `per` pieces of 16 bytes. The swizzle pattern
                # repeats after 8 rows.
                at = swizzled(j % per * 16 + j // per * 16 * width + k * width, width)
            image[at : at + 16] = data[k, 16 * j : 16 * j + 16]
    if width == 16:
        leading, stride = rows // 8 * 128, 128
    else:
        leading, stride = 16 * width, 8 * width
    code = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    return image, (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


def wgmma(
    a, b, layout_a, layout_b, kind="bf16", width=128, seed=0, drop="", after_fence=(), steps=1,
    scale_d=True, at_start=(), before_wait=(), after_wait=(), **options,
):  # fmt: skip
    """Run wgmma on `a` of shape (64, 16) and `b` of shape (n, 16), and return D of shape (64, n).

    `width` is the width of the swizzle in bytes; 16 means no swizzle. All elements of D are 1
    before the first wgmma, which ignores them if `scale_d` is false. Instructions that begin with
    `drop`, a text or a tuple of texts, are left out. `after_fence` has instructions between the
    fence and the product. The shared memory has 8 bytes for an mbarrier, whose address is %r9.
    """
    n = b.shape[0]
    (image_a, code_a), (image_b, code_b) = layout_a(a, width), layout_b(b, width)
    start_b = -(-image_a.numel() // 1024) * 1024
    total = -(-(start_b + image_b.numel()) // 1024) * 1024
    image = torch.zeros(total, dtype=torch.uint8)
    image[: image_a.numel()], image[start_b : start_b + image_b.numel()] = image_a, image_b
    out = torch.zeros(128, n // 2)
    d = ", ".join(f"%c{r}" for r in range(n // 2))
    transpose = f"{int(layout_a is rows_major)}, {int(layout_b is rows_major)}"
    product = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, %d20, %d21, "
        f"%p1, 1, 1, {transpose};\n"
    )
    lines = [
        "mov.u32 %r5, memory;",
        f"add.u32 %r9, %r5, {total};",
        *at_start,
        "mov.u32 %r6, %r0;",
        "COPY:",
        "mul.wide.u32 %d10, %r6, 16;",
        "add.s64 %d11, %d0, %d10;",
        "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d11];",
        "mad.lo.u32 %r7, %r6, 16, %r5;",
        "st.shared.v4.b32 [%r7], {%a0, %a1, %a2, %a3};",
        "add.u32 %r6, %r6, 128;",
        f"setp.lt.u32 %p0, %r6, {total // 16};",
        "@%p0 bra COPY;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        "cvt.u64.u32 %d12, %r5;",
        "shr.u64 %d12, %d12, 4;",
        f"or.b64 %d20, %d12, {code_a};",
        f"add.s64 %d13, %d12, {start_b >> 4};",
        f"or.b64 %d21, %d13, {code_b};",
        *(f"mov.b32 %c{r}, 0f3F800000;" for r in range(n // 2)),
        f"setp.ne.u32 %p1, {int(scale_d)}, 0;",
        "wgmma.fence.sync.aligned;",
        *after_fence,
        *([product] * steps),
        "wgmma.commit_group.sync.aligned;",
        *before_wait,
        "wgmma.wait_group.sync.aligned 0;",
        *after_wait,
        f"mul.wide.u32 %d14, %r0, {2 * n};",
        "add.s64 %d15, %d1, %d14;",
        *(f"st.global.b32 [%d15+{4 * r}], %c{r};" for r in range(n // 2)),
    ]
    body = "\n".join(line for line in lines if not drop or not line.startswith(drop))
    run(body, [image, out], threads=128, shared=total + 8, seed=seed, **options)
    return torch.cat([from_accumulators(out[32 * w : 32 * w + 32], n) for w in range(4)])


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("layout_b", [k_major, rows_major])
@pytest.mark.parametrize("layout_a", [k_major, rows_major])
def test_wgmma_reads_shared_memory_by_its_descriptors(layout_a, layout_b, width):
    torch.manual_seed(2)
    a, b = torch.randint(-8, 9, (64, 16)).bfloat16(), torch.randint(-8, 9, (64, 16)).bfloat16()
    d = wgmma(a, b, layout_a, layout_b, width=width)
    assert torch.equal(d, a.float() @ b.float().T + 1)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("n", [8, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wgmma_of_every_width(n, kind, seed):
    torch.manual_seed(n)
    a, b = (torch.randint(-8, 9, (rows, 16)).to(DTYPES[kind]) for rows in (64, n))
    d = wgmma(a, b, k_major, k_major, kind, seed=seed, steps=2)
    assert torch.equal(d, 2 * (a.float() @ b.float().T) + 1)


def test_wgmma_forgets_the_accumulators_without_scale_d():
    a, b = torch.randint(-8, 9, (64, 16)).bfloat16(), torch.randint(-8, 9, (8, 16)).bfloat16()
    d = wgmma(a, b, k_major, k_major, steps=2, scale_d=False)
    assert torch.equal(d, a.float() @ b.float().T)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("drop", "kinds"),
    [
        ("fence.proxy", {"missing fence"}),
        ("bar.sync", {"race", "uninitialised"}),
        ("wgmma.fence", {"missing fence"}),
        ("wgmma.wait", {"uninitialised", "in flight"}),
        ("wgmma.commit", {"uninitialised", "in flight"}),
    ],
)
def test_wgmma_without_one_of_its_parts(drop, kinds, seed):
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    with pytest.raises(PtxFault) as caught:
        wgmma(a, b, k_major, k_major, seed=seed, drop=drop)
    assert caught.value.kind in kinds


def test_what_is_written_after_the_fence_needs_another():
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    late = "mov.b32 %c3, 0f3F800000;"
    with pytest.raises(PtxFault, match="accumulator was written after the last") as caught:
        wgmma(a, b, k_major, k_major, after_fence=[late])
    assert caught.value.kind == "missing fence"
    wgmma(a, b, k_major, k_major, after_fence=[late, "wgmma.fence.sync.aligned;"])


@pytest.mark.parametrize("seed", range(4))
def test_the_first_wgmma_needs_a_fence_even_if_nothing_has_written_its_registers(seed):
    torch.manual_seed(3)
    a, b = torch.randint(-8, 9, (64, 16)).bfloat16(), torch.randint(-8, 9, (64, 16)).bfloat16()
    options = {"scale_d": False, "seed": seed}
    d = wgmma(a, b, k_major, k_major, drop="mov.b32 %c", **options)
    assert torch.equal(d, a.float() @ b.float().T)
    with pytest.raises(PtxFault, match="first wgmma") as caught:
        wgmma(a, b, k_major, k_major, drop=("mov.b32 %c", "wgmma.fence"), **options)
    assert caught.value.kind == "missing fence"


ARRIVE = ["setp.eq.u32 %p2, %r0, 40;", "@%p2 mbarrier.arrive.shared.b64 _, [%r9];"]
# Thread 0 waits for an arrival, and then overwrites the operands that the last warp multiplies.
CLEAR = [
    "setp.ne.u32 %p3, %r0, 0;",
    "@%p3 bra CLEARED;",
    "WAIT:",
    "mbarrier.try_wait.parity.shared.b64 %p4, [%r9], 0;",
    "@!%p4 bra WAIT;",
    "mov.b32 %a0, 0;",
    "st.shared.v4.b32 [%r5+6144], {%a0, %a0, %a0, %a0};",
    "CLEARED:",
]


@pytest.mark.parametrize("seed", range(6))
def test_the_wait_of_a_warp_orders_the_reads_of_its_warpgroup(seed):
    """After the wait of warp 1, thread 0 may overwrite the operands of the whole warpgroup.

    Lane 8 of warp 1 arrives at an mbarrier after its wait, and thread 0 waits for this arrival.
    """
    torch.manual_seed(4)
    a, b = torch.randint(-8, 9, (64, 16)).bfloat16(), torch.randint(-8, 9, (64, 16)).bfloat16()
    init = ["setp.eq.u32 %p2, %r0, 0;", "@%p2 mbarrier.init.shared.b64 [%r9], 1;"]
    options = {"at_start": init, "seed": seed}
    d = wgmma(a, b, k_major, k_major, after_wait=[*ARRIVE, *CLEAR], **options)
    assert torch.equal(d, a.float() @ b.float().T + 1)
    with pytest.raises(PtxFault, match="while the read of a wgmma is not ordered") as caught:
        wgmma(a, b, k_major, k_major, before_wait=[*ARRIVE, *CLEAR], **options)
    assert caught.value.kind == "race"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rest", ["exit;", "bar.sync 1, 32;"])
def test_all_warps_of_a_warpgroup_execute_a_wgmma(rest, seed):
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    leave = ["setp.ge.u32 %p5, %r0, 96;", "@!%p5 bra STAY;", "AWAY:", rest, "bra AWAY;", "STAY:"]
    with pytest.raises(PtxFault) as caught:
        wgmma(a, b, k_major, k_major, seed=seed, after_fence=leave, limit=100_000)
    if rest == "exit;":
        assert caught.value.kind == "divergence"
        assert "a wgmma is executed by a part of a warpgroup" in str(caught.value)
    else:
        assert caught.value.kind == "limit"


def test_a_wgmma_that_a_warp_never_executes_is_a_deadlock():
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    leave = ["setp.ge.u32 %p5, %r0, 96;", "@!%p5 bra STAY;", "bar.sync 1, 64;", "STAY:"]
    with pytest.raises(PtxFault) as caught:
        wgmma(a, b, k_major, k_major, after_fence=leave)
    assert caught.value.kind == "deadlock"
