"""The check of machine code reports code that overwrites operand A of a wgmma without a wait."""

from __future__ import annotations

import pytest
from _listing import listing

from fastbert.testing.wgmma_hazards import overwritten_operands

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


RIGHT = {
    "write_after_the_wait": [f"{PRODUCT}, gsb0", WAIT, "MOV R5, R60"],
    "other_registers": [f"{PRODUCT}, gsb0", "MOV R8, R60", "LDS.64 R2, [R70]", WAIT],
    "operands_are_read": [
        f"{PRODUCT}, gsb0", "STS.128 [R70], R4", "ISETP.GE.AND P0, PT, R4, R5, PT",
    ],
    "operand_in_shared_memory": [
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", "MOV R8, R60",
    ],
    "second_product_of_the_group": [
        PRODUCT, "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0", WAIT, "MOV R4, R60",
    ],
    "wait_for_all_but_one": [
        f"{PRODUCT}, gsb0", "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R4, R60",
    ],
    "loop_that_waits": [
        "MOV R4, R60", f"{PRODUCT}, gsb0", WAIT, "@P0 BRA 0x0",
    ],
    "join_of_another_barrier": [
        "BSSY B0, 0x20", "BSYNC B0", "MOV R4, R60", f"{PRODUCT}, gsb0", "BSSY B0, 0x60",
        "BSYNC B0", WAIT, "@P0 BRA 0x0",
    ],
    "write_before_the_product": ["MOV R4, R60", "F2FP.BF16.F32.PACK_AB R5, R61, R62", PRODUCT],
}  # fmt: skip
WRONG = {
    "write_before_the_wait": [f"{PRODUCT}, gsb0", "MOV R5, R60", WAIT],
    "last_register_of_the_operand": [f"{PRODUCT}, gsb0", "MOV R7, R60", WAIT],
    "second_register_of_a_wide_load": [f"{PRODUCT}, gsb0", "LDS.64 R2, [R70]", "LDS.128 R2, [R70]"],
    "group_that_has_not_ended": [PRODUCT, WAIT, "MOV R5, R60"],
    "wait_for_an_older_group": [
        "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0", f"{PRODUCT}, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R4, R60",
    ],
    "next_turn_of_a_loop": ["MOV R4, R60", f"{PRODUCT}, gsb0", "@P0 BRA 0x0", WAIT],
    "one_of_two_branches": [
        f"{PRODUCT}, gsb0", "@P0 BRA 0x30", WAIT, "IMAD.WIDE R4, R2, R3, R8", WAIT,
    ],
    "join_after_the_wait": [
        f"{PRODUCT}, gsb0", "BSSY B0, 0x40", "@P0 BSYNC B0", WAIT, "MOV R5, R60",
    ],
    "join_of_a_barrier_that_moves": [
        "BSSY B0, 0x20", "BMOV.32 B1, B0", "MOV R4, R60", f"{PRODUCT}, gsb0", "@P0 BSYNC B1", WAIT,
    ],
    "predicated_write": [f"{PRODUCT}, gsb0", "@!P1 SHFL.BFLY PT, R6, R60, 0x1, 0x1f", WAIT],
    "accumulator_of_another_product": [
        f"{PRODUCT}, gsb0", "HGMMA.64x16x16.F32.BF16 R0, gdesc[UR8], R0, gsb0", WAIT,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_has_no_fault(name):
    assert overwritten_operands(listing(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_write_to_the_operand_of_a_running_product_is_found(name):
    [fault] = overwritten_operands(listing(*WRONG[name]))
    assert "which may still run" in fault


def test_functions_of_one_binary_are_apart():
    wrong = listing(*WRONG["write_before_the_wait"])
    right = listing(*RIGHT["write_after_the_wait"])
    assert overwritten_operands(right + "\n" + right) == []
    assert len(overwritten_operands(right + "\n" + wrong)) == 1
