"""Loads, local memory and atomic operations, compared with Python's integers."""

from __future__ import annotations

import pytest
import torch
from small_kernels import launch

import ptxmachine as ptx

VALUES = [0, 1, 2, 7, 8, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
TRIPLES = [(old, b, c) for old in VALUES for b in VALUES for c in (5, old)]


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


# Operation → function that returns the new value in memory from the old value and the operands b
# and c (PTX ISA, "atom").
OPERATIONS = {
    "add.u32": lambda old, b, c: old + b,
    "min.u32": lambda old, b, c: min(old, b),
    "max.u32": lambda old, b, c: max(old, b),
    "min.s32": lambda old, b, c: min(old, b, key=signed),
    "max.s32": lambda old, b, c: max(old, b, key=signed),
    "inc.u32": lambda old, b, c: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b, c: b if old == 0 or old > b else old - 1,
    "and.b32": lambda old, b, c: old & b,
    "or.b32": lambda old, b, c: old | b,
    "xor.b32": lambda old, b, c: old ^ b,
    "exch.b32": lambda old, b, c: b,
    "cas.b32": lambda old, b, c: c if old == b else old,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_atomic_operation_returns_the_old_value_and_stores_the_new(operation, space):
    given = torch.tensor(TRIPLES, dtype=torch.int64).flatten().to(torch.int32)
    before, after = (torch.zeros(len(TRIPLES), dtype=torch.int32) for _ in range(2))
    third = ", %r4" if operation.startswith("cas") else ""
    body = f"""
mad.wide.u32 %d4, %r0, 12, %d0;
ld.global.b32 %r2, [%d4];
ld.global.b32 %r3, [%d4+4];
ld.global.b32 %r4, [%d4+8];
mad.wide.u32 %d5, %r0, 4, %d1;
mad.wide.u32 %d6, %r0, 4, %d2;
mov.u32 %r5, memory;
mad.lo.u32 %r6, %r0, 4, %r5;
st.global.b32 [%d6], %r2;
st.shared.b32 [%r6], %r2;
atom.{space}.{operation} %r7, [{"%d6" if space == "global" else "%r6"}], %r3{third};
st.global.b32 [%d5], %r7;
ld.{space}.b32 %r8, [{"%d6" if space == "global" else "%r6"}];
st.global.b32 [%d6], %r8;
"""
    launch(body, [given, before, after], threads=len(TRIPLES), shared=4 * len(TRIPLES))
    assert [value & 0xFFFFFFFF for value in before.tolist()] == [old for old, _, _ in TRIPLES]
    expected = [OPERATIONS[operation](*triple) & 0xFFFFFFFF for triple in TRIPLES]
    assert [value & 0xFFFFFFFF for value in after.tolist()] == expected


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_a_load_extends_by_the_sign_or_by_zeros(sign, bits):
    given = torch.tensor([0x7FFFFFFF, -0x7FFFFF80, -1, 0x12348081], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32)
    body = f"""
mul.wide.u32 %d4, %r0, 4;
add.s64 %d5, %d0, %d4;
add.s64 %d6, %d1, %d4;
ld.global.{sign}{bits} %r2, [%d5];
st.global.b32 [%d6], %r2;
"""
    launch(body, [given, out], threads=4)
    kinds = {"s8": torch.int8, "u8": torch.uint8, "s16": torch.int16, "u16": torch.uint16}
    narrow = given.view(kinds[f"{sign}{bits}"])[:: 32 // bits]
    assert out.tolist() == narrow.tolist()


def test_a_negative_register_and_a_positive_offset_reach_shared_memory():
    """An address in a register of 32 bits is the sum modulo 2^32, which compilers rely on."""
    out = torch.zeros(32, dtype=torch.int32)
    body = """
mov.u32 %r1, memory;
mad.lo.u32 %r2, %r0, 4, %r1;
sub.u32 %r3, %r2, 4096;
st.shared.b32 [%r3+4096], %r0;
ld.shared.b32 %r4, [%r2];
mad.wide.u32 %d4, %r0, 4, %d0;
st.global.b32 [%d4], %r4;
"""
    launch(body, [out], shared=128)
    assert out.tolist() == list(range(32))
    with pytest.raises(ptx.PtxFault, match="out of bounds"):
        launch(body.replace("+4096", "+4224"), [out], shared=128)


def test_each_lane_has_its_own_local_memory():
    out = torch.zeros(64, dtype=torch.int32)
    body = """
.local .align 4 .b8 own[16];
mov.u64 %d3, own;
mul.lo.u32 %r1, %r0, 3;
st.local.b32 [%d3+8], %r1;
bar.sync 0;
ld.local.b32 %r2, [%d3+8];
mad.wide.u32 %d4, %r0, 4, %d0;
st.global.b32 [%d4], %r2;
"""
    launch(body, [out], threads=64)
    assert out.tolist() == [3 * thread for thread in range(64)]
