"""The counts of a whole grid are estimated well from a sample of its blocks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastbert.ops import backend as backends
from fastbert.testing.ptx import sass
from fastbert.testing.ptx.sample import MORE, PROBED, mean_counts, spread


@pytest.mark.parametrize("blocks", [1, 5, PROBED, 396, 12288])
def test_blocks_are_spread_over_the_grid(blocks):
    chosen = spread(blocks, PROBED)
    assert len(set(chosen)) == len(chosen) == min(blocks, PROBED)
    assert all(0 <= block < blocks for block in chosen)
    if blocks > PROBED:
        quarters = [sum(4 * b // blocks == q for b in chosen) for q in range(4)]
        assert min(quarters) >= PROBED // 4 - 2


def test_equal_blocks_are_probed_only():
    found = mean_counts(lambda blocks: {"instructions": 10.0 * len(blocks), "mufu": 1.0}, 1000)
    assert found.sampled == PROBED
    assert found.counts["instructions"] == pytest.approx(10_000)
    assert found.counts["mufu"] == pytest.approx(1000)


def test_unequal_blocks_have_more_of_them_run():
    def run(blocks):
        # Of each 128 consecutive blocks, only the first 20 have work.
        return {"instructions": float(sum(1000 if block % 128 < 20 else 1 for block in blocks))}

    found = mean_counts(run, 12800)
    assert found.sampled == MORE
    assert found.counts["instructions"] == pytest.approx(2_010_800, rel=0.06)


COUNT = """
import json, sys, torch
from fastbert.testing.cases import Case
from fastbert.testing.ptx import sample
case = Case("linear_gelu", "x", (130, 64, 96))
found = {}
for probed in (1, 1000):
    sample.PROBED = probed
    found[probed] = sample.count(case, torch.bfloat16, 80, 108)
few, every = found[1], found[1000]
print(json.dumps([
    [few["forward"][0].sampled, every["forward"][0].blocks],
    [launch.name for launch in every["backward"]],
    [sum(x.counts["tensor_flops"] for x in every[d]) for d in ("forward", "backward")],
    [x["forward"][0].counts["instructions"] for x in (few, every)],
    every["forward"][0].counts,
]))
"""


@pytest.mark.every_case
@pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton")
def test_the_counts_of_a_compiled_launch():
    """The counts of a launch are right; a child process computes them, so that Triton compiles."""
    result = subprocess.run(
        [sys.executable, "-c", COUNT], env=backends.compiler_environment(), capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (sampled, blocks), backward, flops, instructions, counts = json.loads(result.stdout)
    assert sampled == 1
    assert blocks > 1
    # Tiles of 64 × 32 cover 192 × 96 results.
    assert flops[0] == 2 * 192 * 96 * 64
    # Library GEMMs compute the gradient of x and the gradient of the weight.
    assert backward.count("library") == 2
    assert flops[1] == 2 * 2 * 130 * 96 * 64
    assert instructions[0] == pytest.approx(instructions[1], rel=0.25)
    assert counts["sass_issue"] == pytest.approx(counts["instructions"], rel=0.35)
    assert 0 < counts["sass_fma"] + counts["sass_alu"] + counts["sass_lsu"] < counts["sass_issue"]


def test_the_mix_of_machine_code():
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   IMAD.MOV.U32 R8, RZ, RZ, R1 ;
        /*0030*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0040*/                   LOP3.LUT R9, R8, 0xff, RZ, 0xc0, !PT ;
        /*0050*/                   NOP ;
    """
    found = sass.mix(text)
    assert found == {"fma": 1, "alu": 1, "lsu": 1, "issue": 5}
    # The launch ran 20 PTX instructions. Its text of 10 PTX instructions has 5 machine
    # instructions.
    assert sass.corrected(20, 10, found) == {"fma": 2, "alu": 2, "lsu": 2, "issue": 10}
