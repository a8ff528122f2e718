"""The check of machine code reports products whose descriptor is not a constant of the kernel."""

from __future__ import annotations

import pytest
from _listing import listing

from fastbert.testing.descriptors import stale_descriptors

PRODUCT = "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR8].tnspA.tnspB, R88, gsb0"
FROM_REGISTERS = "HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR8].tnspB, R56, gsb0"
OTHER = "UMOV UR9, 0x40000040"
HIGH = "UMOV UR11, 0x80000020"


RIGHT = {
    "moves": [OTHER, HIGH, PRODUCT],
    "a_from_registers": [HIGH, "ULDC.64 UR8, c[0x0][0x258]", FROM_REGISTERS],
    "through_a_register": [OTHER, "MOV R5, 0x80000020", "R2UR UR11, R5", PRODUCT],
    "sum_of_halves": [
        OTHER, "IMAD.MOV.U32 R5, RZ, RZ, RZ", "IADD3.X R5, R5, -0x7fffffe0, RZ, P3, !PT",
        "R2UR UR11, R5", PRODUCT,
    ],
    "halves_of_a_float": [OTHER, "HFMA2.MMA R5, -RZ, RZ, -0.0, 1.9073486328125e-06",
                          "R2UR UR11, R5", PRODUCT],
    "step_of_a_descriptor": [
        OTHER, "UMOV UR13, 0x80000020", "UIADD3.64 UR10, UR12, 0x40, URZ", PRODUCT,
    ],
    "step_back": [
        OTHER, "UMOV UR13, 0x80000020", "UMOV UR4, 0xfffffffe", "UMOV UR5, 0xffffffff",
        "UIADD3.64 UR10, UR12, UR4, URZ", PRODUCT,
    ],
    "subtracted_constant": [
        OTHER, "UMOV UR13, URZ", "UMOV UR4, 0xffffffc0", "UMOV UR5, 0x7fffffdf",
        "UIADD3.64 UR10, UR12, -UR4, URZ", PRODUCT,
    ],
    "exchange_by_exclusive_or": [
        OTHER, "UMOV UR10, 0x80000020", "R2UR UR11, R3",
        "ULOP3.LUT UR11, UR11, UR10, URZ, 0x3c, !UPT",
        "ULOP3.LUT UR10, UR11, UR10, URZ, 0x3c, !UPT",
        "ULOP3.LUT UR11, UR11, UR10, URZ, 0x3c, !UPT", PRODUCT,
    ],
    "logical_or": [OTHER, "UMOV UR11, 0x20", "ULOP3.LUT UR11, UR11, 0x80000000, URZ, 0xfc, !UPT",
                   PRODUCT],
    "both_branches": [OTHER, "@P0 BRA 0x40", HIGH, "BRA 0x50", HIGH, PRODUCT],
    "loop": [OTHER, HIGH, PRODUCT, "@P0 BRA 0x20"],
    "a_guarded_copy_of_the_same_word": [OTHER, HIGH, "@P0 LDG.E R5, [R2]", PRODUCT],
}  # fmt: skip
WRONG = {
    # ptxas 12.8 made this code of the short backward: UR8 is a length, and UR10 and UR11 hold its
    # sign and the address of an argument, not the descriptor that is written to UR54 later.
    "sum_before_its_input": [
        "ULDC.64 UR10, c[0x0][0x258]", "USHF.R.S32.HI UR10, URZ, 0x1f, UR8",
        "UIADD3 UR10, UP0, UR10, 0x40, URZ", "UIADD3.X UR11, UR11, -0x7fffffe0, URZ, UP0, !UPT",
        "R2UR UR54, R4", "UMOV UR9, 0x40000040", PRODUCT,
    ],
    "never_written": [OTHER, PRODUCT],
    "zero": [OTHER, "UMOV UR11, URZ", PRODUCT],
    "descriptor_of_a": [HIGH, "ULDC UR9, c[0x0][0x258]", PRODUCT],
    "one_of_two_branches": [OTHER, HIGH, "@P0 BRA 0x40", "ULDC UR11, c[0x0][0x258]", PRODUCT],
    "guarded_write": [OTHER, HIGH, "@UP0 UMOV UR11, 0x40000040", PRODUCT],
    "next_turn_of_a_loop": [OTHER, HIGH, PRODUCT, "R2UR UR11, R4", "@P0 BRA 0x20"],
    "half_of_a_wide_load": [OTHER, HIGH, "ULDC.64 UR10, c[0x0][0x258]", PRODUCT],
    "exclusive_or_with_an_older_word": [
        OTHER, "R2UR UR11, R3", "UMOV UR10, 0x80000020",
        "ULOP3.LUT UR12, UR11, UR10, URZ, 0x3c, !UPT", "R2UR UR11, R5",
        "ULOP3.LUT UR11, UR12, UR11, URZ, 0x3c, !UPT", PRODUCT,
    ],
    "exclusive_or_with_the_word_of_the_last_turn": [
        OTHER, "UMOV UR12, 0x80000020", "R2UR UR13, R3",
        "ULOP3.LUT UR11, UR12, UR13, URZ, 0x3c, !UPT", PRODUCT,
        "ULOP3.LUT UR12, UR12, UR13, URZ, 0x3c, !UPT", "@P0 BRA 0x20",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_has_no_fault(name):
    assert stale_descriptors(listing(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_descriptor_that_is_no_constant_is_found(name):
    faults = stale_descriptors(listing(*WRONG[name]))
    assert faults
    assert all("is no descriptor" in fault for fault in faults)


def test_functions_of_one_binary_are_apart():
    right, wrong = listing(*RIGHT["moves"]), listing(*WRONG["never_written"])
    assert stale_descriptors(right + "\n" + right) == []
    assert len(stale_descriptors(right + "\n" + wrong)) == 1
