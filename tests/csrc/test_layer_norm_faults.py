"""The PTX machine catches mistakes inserted into the CUDA layer norm's ring buffer of rows."""

from __future__ import annotations

import pytest
import torch
from _broken_ptx import LONGEST, Fault, kernel_in, outcome, replaced
from _layer_norm import problem
from _nvcc import require_nvcc
from quick_cases import first_of_each

from fastbert.testing.ptx.cuda_operators import CompiledOperators

# `LAYOUT` is in the names of both kernels for bf16 rows of 384 columns, where 16 threads share a
# row.

# These tests check other tests, and nvcc needs long to compile the kernels.
pytestmark = pytest.mark.every_case

LAYOUT = "bfloat16Li128ELi16ELi24ELb1E"
COLUMNS, ROWS = 384, 133  # a block of the forward loops over rows
COPY = r"(cp\.async\.cg\.shared\.global [^;]*, 16, )%r\d+;"
COMMIT = r"cp\.async\.commit_group;"
WAIT = r"cp\.async\.wait_group 1;"
STAGE = r"mov\.u32\s+(%r\d+), (12288|18432);"
FAULTS = [
    Fault("no wait for copies", WAIT, ""),
    Fault("a wait for older copies", WAIT, "cp.async.wait_group 2;"),
    Fault("no end of the first groups of copies", COMMIT, "", (0,)),
    Fault("rows after the last one are copied", COPY, r"\g<1>16;"),
]
# These mistakes change a result only after several iterations. The backward always has 264 blocks,
# and each block iterates once here.
LATER_FAULTS = [
    Fault("the same stage in every turn", STAGE, r"mov.u32 \1, 0;"),
    Fault("no end of the later groups of copies", COMMIT, "", (1,)),
]


class Problem:
    """Inputs of a small layer norm that runs on the PTX machine, and the right results."""

    def __init__(self, folder):
        self.folder, self.operators = folder, CompiledOperators(folder, 80)
        self.operators.compiled.set_multiprocessors(1)
        self.case = problem(ROWS, COLUMNS, torch.bfloat16, dropout_p=0.1)
        self.expected = self.run(1)

    def run(self, seed):
        self.operators.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        return list(self.case.run(self.operators).values())

    def outcome(self, kernel, fault):
        [path] = self.folder.glob("cuda-layer_norm-80/*.ptx")
        whole, own = path.read_text(encoding="utf-8"), kernel_in(path, f"{kernel}_kernel", LAYOUT)
        body = own[own.index(".entry") :]
        assert whole.count(body) == 1
        with replaced(self.operators.compiled, whole.replace(body, fault.broken(body))):
            return outcome(self.run, self.expected)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    require_nvcc()
    return Problem(tmp_path_factory.mktemp("layer_norm"))


def test_without_a_fault_every_schedule_has_the_same_bits(small):
    for seed in range(3):
        assert all(map(torch.equal, small.run(seed), small.expected))


@pytest.mark.parametrize(
    ("kernel", "fault"),
    first_of_each(
        [
            *(("forward", fault) for fault in (*FAULTS, *LATER_FAULTS)),
            *(("backward", fault) for fault in FAULTS),
        ],
        lambda kernel, fault: kernel,
        lambda kernel, fault: f"{kernel}-{fault.name}",
    ),
)
def test_a_fault_is_caught(small, kernel, fault):
    assert small.outcome(kernel, fault)
