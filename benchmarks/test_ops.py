"""Every operation on every backend and in stock PyTorch, grouped by case and direction.

For ratios measured in turns use ``fastbert bench``; this suite keeps histories
(``--benchmark-autosave``, ``--benchmark-compare``).
"""

from __future__ import annotations

import functools
from itertools import count

import pytest
import torch

from fastbert.testing import bench


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = bench.default_device()
    runs = [
        pytest.param(case, dtype, engine, id=f"{case.op}-{case.name}-{dtype}-{engine}")
        for case in bench.bench_cases(quick=metafunc.config.getoption("quick"))
        for dtype in bench.default_dtypes(device)
        for engine in [*bench.served(case, dtype, device), bench.PEER]
    ]
    metafunc.parametrize(("case", "dtype", "engine"), runs)


@functools.cache
def red(op: str, backend: str, dtype: torch.dtype) -> str | None:
    return bench.gate(op, backend, dtype)


@pytest.mark.parametrize("direction", [bench.FORWARD, bench.TRAINING])
def test_op(benchmark, case, dtype, engine, direction):
    device = bench.default_device()
    if engine != bench.PEER and (reason := red(case.op, engine, dtype)):
        pytest.fail(reason)
    benchmark.group = f"{case.op} {case.name} {dtype} {direction}"
    call = bench.build(case.op, engine, direction, bench.rotated_inputs(case, dtype, device))
    index = count()

    def run() -> None:
        call(next(index))
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode(direction == bench.FORWARD):
        benchmark(run)
