"""The PTX machine catches mistakes that tests insert into the product kernels with GELU."""

from __future__ import annotations

import pytest
import torch
from _broken_ptx import LONGEST, outcome, replaced
from _cuda_gemm import Problem, compiled_in
from _cuda_gemm_faults import BACKWARD, FAULTS, FORWARD
from quick_cases import first_of_each

# These tests check other tests, and nvcc needs long to compile the kernels.
pytestmark = pytest.mark.every_case


class Small:
    """Inputs of a product whose results every inserted mistake changes, and the right results.

    One block computes two tiles of the result, and five slices reuse the ring of three stages.
    """

    def __init__(self, folder, arch):
        self.gemm = compiled_in(folder, arch)
        depth = 296 if arch == 90 else 136
        self.problem = Problem(132, depth, 72, torch.bfloat16, seed=5)
        # The operands are slices of larger tensors full of NaN.
        for name in ("x", "weight", "dy", "w2"):
            inner = getattr(self.problem, name)
            outer = torch.full((inner.shape[0] + 8, inner.shape[1] + 8), torch.nan).bfloat16()
            outer[:-8, :-8] = inner
            setattr(self.problem, name, outer[:-8, :-8])
        self.gemm.options = {}
        _, self.saved, *_ = self.problem.run(self.gemm)
        self.expected = {name: self.run(name, 1) for name in (FORWARD, BACKWARD)}

    def run(self, kernel, seed):
        """Return the results of `kernel`; on Hopper, one block computes both tiles."""
        self.gemm.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        self.gemm.compiled.set_multiprocessors(1)
        p = self.problem
        if kernel == FORWARD:
            return self.gemm.linear_gelu_forward(p.x, p.weight, p.bias, "gelu", True)
        return p.backward(self.gemm, self.saved)

    def outcome(self, kernel, fault):
        """Return the kind of error that `fault` causes in `kernel`, or "" if results are right."""
        ptx = self.gemm.ptx(kernel, "bfloat16", "GeluByI")
        with replaced(self.gemm.compiled, fault.broken(ptx)):
            return outcome(lambda seed: self.run(kernel, seed), self.expected[kernel])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    known = {}

    def of(arch):
        if arch not in known:
            known[arch] = Small(tmp_path_factory.mktemp(f"gemm{arch}"), arch)
        return known[arch]

    return of


@pytest.mark.parametrize("arch", FAULTS)
def test_without_a_fault(small, arch):
    for kernel, expected in small(arch).expected.items():
        assert all(x.isfinite().all() for x in expected)
        for seed in range(4):
            assert all(map(torch.equal, small(arch).run(kernel, seed), expected))


@pytest.mark.parametrize(
    ("arch", "kernel", "fault"),
    first_of_each(
        [(arch, kernel, fault) for arch, faults in FAULTS.items() for kernel, fault in faults],
        lambda arch, kernel, fault: (arch, kernel),
        lambda arch, kernel, fault: f"sm_{arch} {kernel} {fault.name}",
    ),
)
def test_a_fault_is_caught(small, arch, kernel, fault):
    assert small(arch).outcome(kernel, fault)
