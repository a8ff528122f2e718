"""Every operation on every backend and in stock PyTorch, grouped by case and direction.

``fastbert bench`` times implementations in turns and reports ratios of their times. This suite can
compare a run with earlier runs (``--benchmark-autosave``, ``--benchmark-compare``).
"""

from __future__ import annotations

import functools
from itertools import count

import pytest
import torch

from fastbert.bench import operations
from fastbert.bench.encoder import default_device, default_dtypes
from fastbert.bench.limits import BOTH, FORWARD


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = default_device()
    runs = [
        pytest.param(case, dtype, engine, id=f"{case.op}-{case.name}-{dtype}-{engine}")
        for case in operations.bench_cases(quick=metafunc.config.getoption("quick"))
        for dtype in default_dtypes(device)
        for engine in [*operations.served(case, dtype, device), operations.PEER]
    ]
    metafunc.parametrize(("case", "dtype", "engine"), runs)


@functools.cache
def red(op: str, backend: str, dtype: torch.dtype) -> str | None:
    return operations.gate(op, backend, dtype)


@pytest.mark.parametrize("direction", [FORWARD, BOTH])
def test_op(benchmark, case, dtype, engine, direction):
    device = default_device()
    if engine != operations.PEER and (reason := red(case.op, engine, dtype)):
        pytest.fail(reason)
    benchmark.group = f"{case.op} {case.name} {dtype} {direction}"
    call = operations.build(
        case.op, engine, direction, operations.rotated_inputs(case, dtype, device)
    )
    index = count()

    def run() -> None:
        call(next(index))
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode(direction == FORWARD):
        benchmark(run)
