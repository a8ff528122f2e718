"""Every registered case passes on every backend and dtype of this machine, with all gradients."""

from __future__ import annotations

import pytest

from fastbert.testing import parity
from fastbert.testing.cases import CASES

RUNS = parity.plan()


@pytest.mark.parametrize(
    ("case", "backend", "dtype", "device"),
    [pytest.param(c, b, t, d, id=f"{c.op}-{c.name}-{b}-{str(t)[6:]}-{d}") for c, b, t, d in RUNS],
)
def test_case(case, backend, dtype, device):
    failed = [r for r in parity.check_case(case, backend, dtype, device) if not r.passed]
    assert not failed, f"{case.command(backend, dtype)}\n" + "\n".join(map(str, failed))


def test_every_operation_has_cases_and_every_backend_of_this_machine_runs():
    assert {case.op for case in CASES} == set(parity.TABLE_OF)
    assert {"reference"} <= {backend for _, backend, _, _ in RUNS}
