"""The PTX machine catches mistakes that tests insert into the attention kernels for Hopper GPUs."""

from __future__ import annotations

import functools

import _hopper_backward_faults as backward
import _hopper_faults as forward
import _hopper_narrow_faults as narrow
import _hopper_wide_faults as wide
import pytest
import torch
from _hopper_attention import compiled_in
from _hopper_problems import Backward, Forward
from quick_cases import first_of_each, long_case

# These tests check other tests, and nvcc needs long to compile the kernels.
pytestmark = pytest.mark.every_case

KERNELS = [
    *((Forward, 64), (Backward, 64)),
    *(long_case(kernel, dim) for kernel, dim in ((Forward, 32), (Backward, 32), (Backward, 128))),
]
FAULTS = [
    *((Forward, 64, fault) for fault in forward.FAULTS),
    *((Backward, 64, fault) for fault in backward.FAULTS),
    *((Forward, 32, fault) for fault in narrow.FORWARD_FAULTS),
    *((Backward, 32, fault) for fault in narrow.BACKWARD_FAULTS),
    *((Backward, 128, fault) for fault in wide.BACKWARD_FAULTS),
]
UNCAUGHT = [
    *((Forward, 64, fault) for fault in forward.UNCAUGHT),
    *((Backward, 64, fault) for fault in backward.UNCAUGHT),
]


def name(kernel, dim, fault):
    return f"{kernel.__name__.lower()}, head dim {dim}: {fault.name}"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a function that returns the small inputs of a kernel, with the right results."""
    hopper = compiled_in(tmp_path_factory.mktemp("hopper"))
    return functools.cache(lambda kernel, dim: kernel(hopper, dim))


@pytest.mark.parametrize(("kernel", "dim"), KERNELS)
def test_without_a_fault(problems, kernel, dim):
    chosen = problems(kernel, dim)
    # In the forward, only the first two results are outputs; the log-sum-exps may be -inf.
    results = chosen.expected[:2] if kernel is Forward else chosen.expected
    assert all(x.isfinite().all() for x in results)
    for seed in range(4):
        assert all(map(torch.equal, chosen.run(seed), chosen.expected))


@pytest.mark.parametrize(
    ("kernel", "dim", "fault"),
    first_of_each(FAULTS, lambda kernel, dim, fault: kernel, name),
)
def test_a_fault_is_caught(problems, kernel, dim, fault):
    assert problems(kernel, dim).outcome(fault)


@pytest.mark.parametrize(
    ("kernel", "dim", "fault"), first_of_each(UNCAUGHT, lambda kernel, dim, fault: kernel, name)
)
def test_a_harmless_change_is_not_taken_for_a_fault(problems, kernel, dim, fault):
    assert problems(kernel, dim).outcome(fault) == ""
