"""The PTX machine catches inserted mistakes in the (query, key) masks of attention for Hopper."""

from __future__ import annotations

import functools

import _hopper_pair_faults as faults
import pytest
import torch
from _hopper_attention import compiled_in
from _hopper_pair_problems import BackwardPairs, ForwardPairs
from quick_cases import first_of_each, long_case

# These tests check other tests, and nvcc needs long to compile the kernels.
pytestmark = pytest.mark.every_case

KERNELS = [
    *((ForwardPairs, 64), (BackwardPairs, 64)),
    *(long_case(kernel, dim) for kernel in (ForwardPairs, BackwardPairs) for dim in (32, 128)),
]
FAULTS = [
    *((ForwardPairs, 64, False, fault) for fault in faults.FORWARD),
    *((BackwardPairs, 64, False, fault) for fault in faults.BACKWARD),
    *((BackwardPairs, dim, False, fault) for dim in (32, 128) for fault in faults.HIDING),
    *((ForwardPairs, 64, True, fault) for fault in faults.PACKING),
]


def name(kernel, dim, packing, fault):
    return f"{kernel.__name__}, {'packing' if packing else f'head dim {dim}'}: {fault.name}"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a function that returns the small inputs of a kernel, with the right results."""
    hopper = compiled_in(tmp_path_factory.mktemp("hopper"))
    return functools.cache(lambda kernel, dim, packing: kernel(hopper, dim, packing))


@pytest.mark.parametrize(("kernel", "dim"), KERNELS)
def test_without_a_fault(problems, kernel, dim):
    chosen = problems(kernel, dim, False)
    results = chosen.expected[::2] if kernel is ForwardPairs else chosen.expected
    used = [x if x.dim() == 4 else x[:110] for x in results]
    assert all(x.isfinite().all() for x in used)
    for seed in range(2):
        assert all(map(torch.equal, chosen.run(seed), chosen.expected))


@pytest.mark.parametrize(
    ("kernel", "dim", "packing", "fault"),
    first_of_each(FAULTS, lambda kernel, dim, packing, fault: kernel, name),
)
def test_a_fault_is_caught(problems, kernel, dim, packing, fault):
    assert problems(kernel, dim, packing).outcome(fault)
