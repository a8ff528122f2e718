"""Every registered case on every backend and dtype of this machine, forward and every gradient.

`make test` runs Triton's kernels in fp32 and bf16, and the quick cases in fp16 too, because fp16
and bf16 differ in the type alone. `make every-case` runs all cases.
"""

from __future__ import annotations

import pytest
import torch

from fastbert.testing import parity
from fastbert.testing.cases import CASES
from fastbert.testing.selection import find

RUNS = parity.plan()
QUICK = {id(case) for case in find(None, quick=True)}


def marks(case, backend, dtype) -> list[pytest.MarkDecorator]:
    slow = backend == "triton" and dtype == torch.float16 and id(case) not in QUICK
    return [pytest.mark.every_case] if slow else []


@pytest.mark.parametrize(
    ("case", "backend", "dtype", "device"),
    [
        pytest.param(c, b, t, d, id=f"{c.op}-{c.name}-{b}-{str(t)[6:]}-{d}", marks=marks(c, b, t))
        for c, b, t, d in RUNS
    ],
)
def test_case(case, backend, dtype, device):
    failed = [r for r in parity.check_case(case, backend, dtype, device) if not r.passed]
    assert not failed, f"{case.command(backend, dtype)}\n" + "\n".join(map(str, failed))


def test_every_operation_has_cases_and_every_backend_of_this_machine_runs():
    assert {case.op for case in CASES} == set(parity.TABLE_OF)
    assert {"reference"} <= {backend for _, backend, _, _ in RUNS}
