"""The PTX machine catches faults in the kernel of attention for Hopper GPUs."""

from __future__ import annotations

import pytest
import torch
from _broken_ptx import LONGEST, outcome, replaced
from _hopper_attention import compiled_in
from _hopper_faults import FAULTS, UNCAUGHT

KERNEL = "nv_bfloat16Li64ELb0E"


class Problems:
    """Small problems with everything that a fault could break, and their right results."""

    def __init__(self, hopper):
        self.hopper = hopper
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape):
            return [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]

        # Five tiles go around the ring of four stages; the first tile has no allowed key.
        self.dense = drawn(1, 2, 520, 64)
        self.dense[0] = self.dense[0][:, :, :70]
        self.mask = torch.rand(1, 1, 1, 520, generator=generator) > 0.3
        self.mask[..., :140] = False
        self.dense[2].masked_fill_(~self.mask.transpose(2, 3), torch.nan)
        # Sequences of a part of a tile, of no key and of two tiles, beside rows that are NaN.
        self.queries = torch.tensor([0, 40, 170, 370, 380], dtype=torch.int32)
        self.keys = torch.tensor([0, 40, 40, 240, 250], dtype=torch.int32)
        self.packed = [x[:rows] for x, rows in zip(drawn(390, 1, 64), (390, 260, 260), strict=True)]
        for x, ends in zip(self.packed, (self.queries, self.keys, self.keys), strict=True):
            x[ends[-2] :] = torch.nan
        self.ptx = hopper.ptx(KERNEL)
        self.expected = self.run(seed=1)

    def run(self, seed):
        """Return out and log-sum-exp of both problems; one block runs all items of a problem."""
        self.hopper.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        self.hopper.compiled.set_multiprocessors(1)
        dense = self.hopper.flash_attention_forward(
            *self.dense, self.mask, None, None, None, 70, 520, 0.0, 0.125
        )
        packed = self.hopper.flash_attention_forward(
            *self.packed, None, self.queries, self.keys, None, 200, 200, 0.0, 0.125
        )
        rows = [*range(370), *range(380, 390)]
        return [*dense, packed[0][rows], packed[1][:, rows]]

    def outcome(self, fault):
        """Return what is wrong with a fault in the kernel, or "" for nothing."""
        with replaced(self.hopper.compiled, fault.broken(self.ptx)):
            return outcome(self.run, self.expected)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return Problems(compiled_in(tmp_path_factory.mktemp("hopper")))


def test_without_a_fault(problems):
    assert all(x.isfinite().all() for x in problems.expected[::2])
    for seed in range(4):
        assert all(map(torch.equal, problems.run(seed), problems.expected))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(problems, fault):
    assert problems.outcome(fault)


@pytest.mark.parametrize("fault", UNCAUGHT, ids=lambda fault: fault.name)
def test_a_harmless_change_is_not_taken_for_a_fault(problems, fault):
    assert problems.outcome(fault) == ""
