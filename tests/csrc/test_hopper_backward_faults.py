"""The PTX machine catches faults in the backward of attention for Hopper GPUs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from _broken_ptx import LONGEST, outcome, replaced
from _hopper_attention import compiled_in
from _hopper_backward_faults import FAULTS, UNCAUGHT

from fastbert import reference

KERNEL = "nv_bfloat16Lb0E"
SCALE = 0.125


def statistics(q, k, v, mask=None):
    """Return out in bf16 and the log-sum-exp."""
    out = reference.attention(*(x.double() for x in (q, k, v)), mask=mask, scale=SCALE)
    scores = q.double() @ k.double().transpose(-1, -2) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return out.bfloat16(), scores.logsumexp(-1).float()


class Problems:
    """Small problems with everything that a fault could break, and their right results."""

    def __init__(self, hopper):
        self.hopper = hopper
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape):
            return torch.randn(shape, generator=generator).bfloat16()

        # Three blocks of keys go around two places, and six tiles around four stages. The first
        # block has no key that is attended.
        q, dout = (drawn(1, 1, 70, 64) for _ in range(2))
        k, v = (drawn(1, 1, 300, 64) for _ in range(2))
        self.mask = torch.rand(1, 1, 1, 300, generator=generator) > 0.3
        self.mask[..., :140] = False
        out, lse = statistics(q, k, v, self.mask)
        for x in (k, v):
            x.masked_fill_(~self.mask.transpose(2, 3), torch.nan)
        self.dense = [dout, q, k, v, out, lse]
        # Sequences of a part of a tile, of no key, of two blocks and of no query, beside rows that
        # are NaN.
        self.queries = torch.tensor([0, 40, 45, 175, 175], dtype=torch.int32)
        self.keys = torch.tensor([0, 40, 40, 170, 180], dtype=torch.int32)
        q, dout = (drawn(180, 1, 64) for _ in range(2))
        k, v = (drawn(190, 1, 64) for _ in range(2))
        out, lse = torch.zeros_like(q), torch.full((1, 180), -torch.inf)
        for (a, b), (c, d) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            own = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
            result = statistics(*own)
            out[a:b], lse[:, a:b] = result[0][0].transpose(0, 1), result[1][0]
        for x in (q, dout, out):
            x[175:] = torch.nan
        for x in (k, v):
            x[180:] = torch.nan
        self.packed = [dout, q, k, v, out, lse]
        self.ptx = hopper.ptx(KERNEL, "attention_backward")
        self.expected = self.run(seed=1)

    def run(self, seed):
        """Return the gradients of both problems; one block runs all items of a problem."""
        self.hopper.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        self.hopper.compiled.set_multiprocessors(1)
        results = []
        for tensors, mask, ends, longest in (
            (self.dense, self.mask, (None, None), (70, 300)),
            (self.packed, None, (self.queries, self.keys), (130, 130)),
        ):
            gradients = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
            self.hopper.flash_attention_backward(
                *gradients, *tensors, mask, *ends, None, *longest, 0.0, SCALE
            )
            results += gradients
        return results

    def outcome(self, fault):
        """Return what is wrong with a fault in the kernel, or "" for nothing."""
        with replaced(self.hopper.compiled, fault.broken(self.ptx)):
            return outcome(self.run, self.expected)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return Problems(compiled_in(tmp_path_factory.mktemp("hopper")))


def test_without_a_fault(problems):
    assert all(x.isfinite().all() for x in problems.expected)
    for seed in range(4):
        assert all(map(torch.equal, problems.run(seed), problems.expected))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(problems, fault):
    assert problems.outcome(fault)


@pytest.mark.parametrize("fault", UNCAUGHT, ids=lambda fault: fault.name)
def test_a_harmless_change_is_not_taken_for_a_fault(problems, fault):
    assert problems.outcome(fault) == ""
