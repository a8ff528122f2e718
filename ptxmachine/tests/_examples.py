"""One instruction of each kind that the PTX machine executes, with operands that fit it.

The registers are those of small_kernels.py: %p registers are predicates, %h registers have 16 bits,
%r registers 32 bits, and %d registers 64 bits. A question mark precedes an optional operand. A
question mark without an operand, at the end, stands for an optional operand that the example omits.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import NamedTuple


def _registers(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{prefix}{first + n}" for n in range(count)) + "}"


TWO, FOUR, EIGHT = (_registers("r", n, 8) for n in (2, 4, 8))
SUMS, HALVES = _registers("c", 32), _registers("c", 16)
INTEGERS, BITS = ("u16", "s16", "u32", "s32", "u64", "s64"), ("b16", "b32", "b64")
FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
WIDTHS = {"16": "%h", "32": "%r", "64": "%d"}


def _of(kind: str) -> str:
    """Return the prefix of registers for a type."""
    return "%r" if kind.endswith("x2") else WIDTHS[kind.lstrip("abcdefghijklmnopqrstuvwxyz")]


def _same(mnemonics: str, kinds: tuple[str, ...], sources: int) -> list[str]:
    """Return instructions whose result and sources all have the type of their suffix."""
    return [
        f"{mnemonic}.{kind} " + ", ".join(f"{_of(kind)}{n + 1}" for n in range(sources + 1))
        for mnemonic in mnemonics.split()
        for kind in kinds
    ]


ARITHMETIC = [
    *_same("add sub mul.lo mul.hi div rem min max", INTEGERS, 2),
    *_same("neg abs", ("s16", "s32", "s64"), 1),
    *_same("mad.lo mad.hi sad", ("u16", "s32", "u64"), 3),
    *_same("min.relu max.relu", ("s32",), 2),
    *_same("and or xor", BITS, 2),
    *_same("not cnot brev", BITS, 1),
    *_same("add.cc addc subc.cc", ("u32", "s64"), 2),
    *_same("mad.lo.cc madc.hi", ("u32",), 3),
    *_same("prmt.b32.f4e shf.l.wrap shf.r.clamp", ("b32",), 3),
    *_same("bmsk.wrap", ("b32",), 2),
    "mul.wide.u16 %r1, %h2, %h3",
    "mul.wide.s32 %d1, %r2, %r3",
    "mad.wide.s16 %r1, %h2, %h3, %r4",
    "mad.wide.u32 %d1, %r2, %r3, %d4",
    "and.pred %p1, %p2, %p3",
    "or.pred %p1, %p2, %p3",
    "xor.pred %p1, %p2, %p3",
    "not.pred %p1, %p2",
    "shl.b16 %h1, %h2, %r3",
    "shl.b64 %d1, %d2, %r3",
    "shr.s32 %r1, %r2, %r3",
    "popc.b32 %r1, %r2",
    "popc.b64 %r1, %d2",
    "clz.b64 %r1, %d2",
    "bfind.u64 %r1, %d2",
    "bfind.shiftamt.s32 %r1, %r2",
    "bfe.u32 %r1, %r2, %r3, %r4",
    "bfe.s64 %d1, %d2, %r3, %r4",
    "bfi.b32 %r1, %r2, %r3, %r4, %r5",
    "bfi.b64 %d1, %d2, %d3, %r4, %r5",
    "prmt.b32 %r1, %r2, %r3, %r4",
    "lop3.b32 %r1, %r2, %r3, %r4, 128",
    "dp4a.u32.s32 %r1, %r2, %r3, %r4",
]
FLOAT = [
    *_same("add sub mul min max min.NaN", FLOATS, 2),
    *_same("fma.rn", FLOATS, 3),
    *_same("neg abs", FLOATS, 1),
    *_same("add.rz.ftz mul.sat div.full min.xorsign.abs", ("f32",), 2),
    *_same("div.rn copysign", ("f32", "f64"), 2),
    *_same("rcp.rn sqrt.rn rsqrt.approx", ("f32", "f64"), 1),
    *_same("ex2.approx.ftz lg2.approx sin.approx cos.approx tanh.approx", ("f32",), 1),
    *_same("ex2.approx tanh.approx", ("f16", "bf16x2"), 1),
    "mad.rn.f32 %r1, %r2, %r3, %r4",
]
COMPARE = [
    *(f"setp.lt.{kind} %p1, {_of(kind)}2, {_of(kind)}3" for kind in (*INTEGERS, "f32", "f64")),
    "setp.eq.b16 %p1, %h2, %h3",
    "setp.gtu.f16 %p1, %h2, %h3",
    "setp.num.bf16 %p1, %h2, %h3",
    "setp.ne.u32 %p1|%p2, %r2, %r3",
    "setp.ge.and.s32 %p1, %r2, %r3, !%p3",
    "setp.ge.or.f64 %p1|%p2, %d2, %d3, %p3",
    "setp.le.f16x2 %p1|%p2, %r2, %r3",
    "setp.eq.bf16x2 %p1|%p2, %r2, %r3",
    "set.eq.u32.f32 %r1, %r2, %r3",
    "set.lt.f32.s64 %r1, %d2, %d3",
    "set.lt.f16x2.f16x2 %r1, %r2, %r3",
    "set.gt.bf16x2.bf16x2 %r1, %r2, %r3",
    "selp.b16 %h1, %h2, %h3, %p4",
    "selp.f32 %r1, %r2, %r3, !%p4",
    "selp.u64 %d1, %d2, %d3, %p4",
    "slct.s32.f32 %r1, %r2, %r3, %r4",
    "slct.u64.s32 %d1, %d2, %d3, %r4",
    "testp.finite.f32 %p1, %r2",
]
CONVERT = [
    "cvt.u32.u16 %r1, %h2",
    "cvt.s64.s32 %d1, %r2",
    "cvt.u8.u32 %h1, %r2",
    "cvt.sat.s16.s32 %h1, %r2",
    "cvt.rn.f32.s64 %r1, %d2",
    "cvt.rzi.s32.f32 %r1, %r2",
    "cvt.f64.f32 %d1, %r2",
    "cvt.rn.f16.f32 %h1, %r2",
    "cvt.f32.f16 %r1, %h2",
    "cvt.f32.bf16 %r1, %h2",
    "cvt.rna.tf32.f32 %r1, %r2",
    "cvt.rn.f16x2.f32 %r1, %r2, %r3",
    "cvt.rn.bf16x2.f32 %r1, %r2, %r3",
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r3",
    "cvt.rn.satfinite.e5m2x2.f16x2 %h1, %r2",
    "cvt.rn.f16x2.e4m3x2 %r1, %h2",
    "cvta.to.global.u64 %d1, %d2",
    "cvta.shared.u64 %d1, %d2",
    "isspacep.shared %p1, %d2",
    "isspacep.shared::cluster %p1, %d2",
    "mapa.shared::cluster.u32 %r1, %r2, %r3",
    "mapa.u64 %d1, %d2, %r3",
    "getctarank.shared::cluster.u32 %r1, %r2",
    "mov.b16 %h1, %h2",
    "mov.u32 %r1, %r2",
    "mov.u32 %r1, %tid.x",
    "mov.b64 %d1, %d2",
    "mov.pred %p1, %p2",
    "mov.b32 %r1, {%h2, %h3}",
    "mov.b32 {%h1, %h2}, %r3",
    "mov.b64 %d1, {%r2, %r3}",
    "mov.b64 {%h1, %h2, %h3, %h4}, %d5",
]
MEMORY = [
    "ld.global.u8 %h1, [%d2]",
    "ld.global.s32 %d1, [%d2+4]",
    "ld.shared.b16 %h1, [%r2]",
    "ld.param.u64 %d1, [p0]",
    f"ld.global.nc.v4.b32 {FOUR}, [%d2]",
    "ld.volatile.shared.v2.f64 {%d1, %d2}, [%r2]",
    "ldu.global.u32 %r1, [%d2]",
    "st.global.b8 [%d1], %h2",
    "st.shared.f32 [%r1+4], %r2",
    f"st.global.v4.b32 [%d1], {FOUR}",
    "prefetch.global.L2 [%d1]",
    "prefetchu.L1 [%d1]",
    "discard.global.L2 [%d1], 128",
    "applypriority.global.L2::evict_normal [%d1], 128",
    "atom.global.add.u32 %r1, [%d2], %r3",
    "atom.shared.exch.b64 %d1, [%r2], %d3",
    "atom.global.cas.b32 %r1, [%d2], %r3, %r4",
    "atom.global.add.noftz.f16x2 %r1, [%d2], %r3",
    f"atom.global.v2.f32.add {TWO}, [%d2], {{%r1, %r2}}",
    "red.global.add.f32 [%d1], %r2",
    "red.shared.or.b32 [%r1], %r2",
    f"red.global.v4.f32.add [%d1], {FOUR}",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2]",
    f"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {TWO}, [%r2]",
    f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR}, [%r2]",
    f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {FOUR}",
]
MATRIX = [
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {FOUR}, {FOUR}, {TWO}, {FOUR}",
    f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {FOUR}, {FOUR}, {TWO}, {FOUR}",
    f"mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {FOUR}, {TWO}, {{%r1}}, {FOUR}",
    f"mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {TWO}, {FOUR}, {TWO}, {TWO}",
    f"mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {FOUR}, {FOUR}, {TWO}, {FOUR}",
    f"wmma.load.a.sync.aligned.m16n16k16.row.shared.f16 {EIGHT}, [%r1], ?%r2",
    f"wmma.load.b.sync.aligned.m16n16k16.col.global.bf16 {FOUR}, [%d1], ?%r2",
    f"wmma.load.c.sync.aligned.m16n16k16.row.global.f32 {EIGHT}, [%d1], ?",
    f"wmma.store.d.sync.aligned.m16n16k16.row.global.f32 [%d1], {EIGHT}, ?%r2",
    f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {EIGHT}, {EIGHT}, {EIGHT}, {EIGHT}",
    f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {EIGHT}, {FOUR}, {FOUR}, {EIGHT}",
    f"wmma.mma.sync.aligned.row.col.m16n16k16.f16.f16 {FOUR}, {EIGHT}, {EIGHT}, {FOUR}",
    "wgmma.fence.sync.aligned",
    "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned 1",
    f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {SUMS}, %d1, %d2, %p1, 1, -1, 0, 1",
    f"wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16 {HALVES}, {FOUR}, %d2, %p1, 1, 1, 0",
    f"wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {SUMS}, %d1, %d2, %p1, 1, 1",
    f"wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {SUMS}, %d1, %d2, %p1",
]
BOX = "tensor.2d"
ASYNC = [
    "cp.async.ca.shared.global [%r1], [%d1], 8, ?",
    "cp.async.cg.shared.global [%r1], [%d1], 16, ?%r2",
    "cp.async.ca.shared.global.L2::cache_hint [%r1], [%d1], 4, %d2",
    "cp.async.commit_group",
    "cp.async.wait_group 2",
    "cp.async.wait_all",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1]",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3]",
    "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], %r2",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], %r2",
    f"cp.async.bulk.{BOX}.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1],"
    " [%d1, {%r2, %r3}], [%r4]",
    f"cp.async.bulk.{BOX}.global.shared::cta.tile.bulk_group [%d1, {{%r2, %r3}}], [%r1]",
    f"cp.reduce.async.bulk.{BOX}.global.shared::cta.add.tile.bulk_group [%d1, {{%r2, %r3}}], [%r1]",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1],"
    " [%d1], %r2, [%r3], %h4",
    f"cp.async.bulk.{BOX}.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster.L2::cache_hint [%r1], [%d1, {%r2, %r3}], [%r4], 3, %d5",
    "cp.async.bulk.prefetch.L2.global [%d1], %r2",
    f"cp.async.bulk.prefetch.{BOX}.L2.global.tile [%d1, {{%r2, %r3}}]",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group.read 0",
    "bar.sync 0, ?",
    "bar.sync %r1, ?64",
    "bar.arrive 1, 64",
    "bar.red.popc.u32 %r1, 0, !%p1",
    "bar.red.and.pred %p1, 0, ?32, %p2",
    "barrier.sync.aligned 0, ?",
    "barrier.cluster.arrive.relaxed.aligned",
    "barrier.cluster.wait.acquire",
    "mbarrier.init.shared::cta.b64 [%r1], 32",
    "mbarrier.inval.shared::cta.b64 [%r1]",
    "mbarrier.arrive.shared::cta.b64 ?%d1, [%r1], ?",
    "mbarrier.arrive.shared::cta.b64 ?_, [%r1], ?2",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 ?_, [%r1], ?%r2",
    "mbarrier.arrive.expect_tx.shared::cta.b64 ?_, [%r1], %r2",
    "mbarrier.arrive_drop.shared::cta.b64 ?%d1, [%r1], ?1",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r2",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], %r2",
    "mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d1",
    "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2, ?",
    "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2, ?%r3",
    "fence.acq_rel.gpu",
    "fence.proxy.async.shared::cta",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128",
    "fence.proxy.tensormap::generic.release.gpu",
    "membar.gl",
    "tensormap.replace.tile.global_address.global.b1024.b64 [%d1], %d2",
    "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r1], %r2",
    "tensormap.replace.tile.box_dim.global.b1024.b32 [%d1], 1, %r2",
    "tensormap.replace.tile.global_stride.global.b1024.b64 [%d1], 0, %d2",
    "tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%d1], 3",
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    " [%d1], [%r1], 128",
    "setmaxnreg.inc.sync.aligned.u32 160",
    "setmaxnreg.dec.sync.aligned.u32 40",
    "griddepcontrol.wait",
    "nanosleep.u32 20",
    "pmevent 7",
]
WARP = [
    "shfl.sync.idx.b32 %r1, %r2, %r3, 31, -1",
    "shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1",
    "shfl.sync.down.b32 %r1, %r2, 1, 31, %r3",
    "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1",
    "vote.sync.ballot.b32 %r1, %p1, -1",
    "vote.sync.any.pred %p1, !%p2, %r1",
    "redux.sync.add.s32 %r1, %r2, -1",
    "elect.sync %r1|%p1, -1",
    "elect.sync _|%p1, %r1",
    "match.any.sync.b32 %r1, %r2, -1",
    "match.all.sync.b64 %r1|%p1, %d2, -1",
    "bar.warp.sync -1",
    "activemask.b32 %r1",
]
FLOW = ["bra END", "bra.uni END", "ret", "exit", "trap", "brkpt"]
EXAMPLES = [
    *ARITHMETIC, *FLOAT, *COMPARE, *CONVERT, *MEMORY, *MATRIX, *ASYNC, *WARP, *FLOW,
]  # fmt: skip


# A vector operand of seven registers, which fits no optional operand of the examples.
TOO_MUCH = "{%r1, %r2, %r3, %r4, %r5, %r6, %r7}"
# Register prefix → a register that does not fit, because it has too few bits or another kind.
NARROWER = {"%p": "%r1", "%h": "%p1", "%r": "%h1", "%d": "%h1", "%c": "%h1"}


class Example(NamedTuple):
    """The parts of an example.

    Attributes:
        mnemonic: The mnemonic.
        operands: All operands.
        required: The operands that are not optional.
        full: Whether the example contains all its optional operands.
    """

    mnemonic: str
    operands: list[str]
    required: list[str]
    full: bool

    def text(self, operands: list[str]) -> str:
        """Return the instruction with other operands."""
        return f"{self.mnemonic} {', '.join(operands)}".strip()

    @property
    def base(self) -> str:
        """The part of the mnemonic before its first dot."""
        return self.mnemonic.split(".")[0]


def read(example: str) -> Example:
    """Return the parts of an example."""
    mnemonic, _, rest = example.partition(" ")
    given = [part.strip() for part in re.split(r",(?![^{]*\})(?![^\[]*\])", rest) if part.strip()]
    operands = [part.lstrip("?") for part in given if part != "?"]
    required = [part for part in given if not part.startswith("?")]
    return Example(mnemonic, operands, required, "?" not in given)


def misfits(example: str) -> Iterator[tuple[str, str]]:
    """Yield variants of an example whose operands do not fit: the mistake and the instruction.

    In each variant, one operand is missing, there is one operand too many, or one operand has
    another kind or too few bits.
    """
    known = read(example)
    for n in range(len(known.required)):
        yield "missing", known.text([*known.required[:n], *known.required[n + 1 :]])
    yield "too many", known.text([*known.operands, "%r1" if known.full else TOO_MUCH])
    for n, operand in enumerate(known.operands):
        for other in _others(known, n, operand):
            yield "kind", known.text([*known.operands[:n], other, *known.operands[n + 1 :]])


def _others(known: Example, n: int, operand: str) -> list[str]:
    """Return texts that must be refused in the place of operand number `n`."""
    if operand == "END":
        return ["%r1", "7", "[%r1]"]
    if operand == "_":
        return ["[%d1]", "%h1", "7"]
    if operand.startswith("["):
        without = operand[1:-1].split(",")[0]
        return ["%d1", "7", "END", "[%h1]", "[%p1]", f"[{without}, {{%r1, %r2, %r3, %r4}}]"]
    if operand.startswith("{"):
        parts = operand[1:-1].split(", ")
        more, fewer = ", ".join([*parts, parts[0]]), ", ".join(parts[:-1])
        narrow = ", ".join([*parts[:-1], NARROWER[parts[0][:2]]])
        return [f"{{{more}}}", f"{{{fewer}}}", f"{{{narrow}}}", "[%d1]", "END"]
    if "|" in operand:
        first, second = operand.split("|")
        return [f"{operand}|{second}", f"{first}|%h1", "[%d1]", "7"]
    if not operand.startswith(("%", "!")):
        return ["END", "[%r1]", "{%r1, %r2}"]
    register = operand.lstrip("!")
    narrow = NARROWER[register[:2]] if register != "%tid.x" else "%p1"
    found = ["END", "[%d1]", TOO_MUCH, f"!{narrow}", narrow]
    if n == 0 and known.base not in ("bar", "barrier", "nanosleep"):
        found += ["7", "%tid.x", "%clock64"]  # not allowed as a result
    if n > 0:
        found.append("_")  # not allowed as a source
    return found


VALUES = (
    0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 1023, 1024, 1040,
    1088, 1152, 2048, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64 - 16, 2**64 - 8, 2**64 - 1, 0x0100000000000400, 0x0200000000000000,
    0x0400000000000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3C003C00,
)  # fmt: skip


def with_values(example: str, seed: int) -> str:
    """Return the body of a kernel that sets the registers of an example and executes the example.

    A register in brackets usually has an address in the tensor at %d0, or in the shared variable
    `memory`, which begins with an mbarrier. 64-bit registers of wgmma usually have a matrix
    descriptor of `memory`. All other registers have random values.
    """
    draw = random.Random(f"{example} {seed}")
    known = read(example)
    instruction = known.text(known.operands)
    places = set(re.findall(r"\[(%[rd]\d+)", instruction))
    lines = [
        "mov.u32 %a2, memory;",
        "setp.eq.u32 %p15, %r0, 0;",
        f"@%p15 mbarrier.init.shared::cta.b64 [%a2], {draw.choice((1, 32, 128, 256))};",
        "bar.sync 0;",
    ]
    for register in dict.fromkeys(re.findall(r"%[phrdc]\d+", instruction)):
        kind, value = register[:2], draw.choice(VALUES)
        if register in places and draw.random() < 0.9:
            base, bits = ("%a2", 32) if kind == "%r" else ("%d0", 64)
            step, offset = draw.choice((0, 0, 4, 8, 16)), draw.choice((0, 0, 16, 128, 1024, 3072))
            lines += [
                f"mul.lo.u32 %a1, %r0, {step};",
                f"cvt.u{bits}.u32 {register}, %a1;",
                f"add.u{bits} {register}, {register}, {base};",
                f"add.u{bits} {register}, {register}, {offset};",
            ]
        elif kind == "%d" and known.base == "wgmma" and draw.random() < 0.7:
            lines.append(f"mov.b64 {register}, {64 | 8 << 16 | 16 << 32};")
        elif kind == "%r" and "bulk" in known.mnemonic and draw.random() < 0.7:
            lines.append(f"mov.b32 {register}, {draw.choice((16, 32, 48, 128))};")
        elif kind == "%p":
            lines += [f"and.b32 %a1, %r0, {value % 4};", f"setp.eq.u32 {register}, %a1, 0;"]
        else:
            bits = {"%h": 16, "%d": 64}.get(kind, 32)
            lines.append(f"mov.b{bits} {register}, {value % (1 << bits)};")
    fence = ["wgmma.fence.sync.aligned;"] if known.base == "wgmma" else []
    wait = [
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
        "cp.async.wait_all;",
    ]
    return "\n".join([*lines, *fence, f"{instruction};", "END:", *wait])
