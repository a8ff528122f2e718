"""The whole encoder in fastbert and transformers, with a benchmark group per batch and dtype."""

from __future__ import annotations

import functools
from itertools import count

import pytest
import torch

from fastbert.bench import encoder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = encoder.default_device()
    engines = encoder.engine_names(device)
    shapes = encoder.encoder_shapes(quick=metafunc.config.getoption("quick"))
    metafunc.parametrize("engine", engines)
    metafunc.parametrize("dtype", encoder.default_dtypes(device), ids=str)
    metafunc.parametrize("shape", shapes, ids=lambda shape: shape.name)


@functools.cache
def red(shape: encoder.EncoderShape, dtype: torch.dtype, device: str) -> dict[str, str]:
    with torch.inference_mode():
        return encoder.gate(shape, dtype, device)


def test_encoder(benchmark, shape, dtype, engine):
    device = encoder.default_device()
    if reason := red(shape, dtype, device).get(engine):
        pytest.fail(reason)
    benchmark.group = f"{shape.name} {dtype}"
    weights = encoder.random_weights(shape.config)
    call = encoder.build(engine, shape, weights, dtype, device)
    index = count()

    def run() -> None:
        call(next(index))
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode():
        benchmark(run)
