"""Operations accept vectors with any stride, and gradients that are None, as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _without_gradient import WithoutGradient
from quick_cases import long_case
from torch import Tensor

from fastbert import ops
from fastbert.testing import parity
from fastbert.testing.cases import Inputs


def is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) > 1


RUNS = parity.plan(dtype=torch.float32, quick=True)
WITH_VECTORS = [
    run
    for run in RUNS
    if any(is_vector(value) for _, value in run[0].inputs(torch.float32, "cpu").items())
]


def each_run(chosen: list, long_backend: str):
    """Parametrize a test by cases; `make test` leaves out the cases of the backend `long_backend`.

    Triton's interpreter is slow, so `make test` runs one Triton case of each operation.
    """
    first = {case.op: case for case, *_ in reversed(chosen)}
    runs = []
    for case, backend, dtype, device in chosen:
        is_long = backend == long_backend or (backend == "triton" and case != first[case.op])
        name = "-".join((case.op, case.name, backend, device))
        form = long_case if is_long else pytest.param
        runs.append(form(case, backend, dtype, device, id=name))
    return pytest.mark.parametrize(("case", "backend", "dtype", "device"), runs)


def column_of_a_matrix(vector: Tensor) -> Tensor:
    """Return `vector` as a view with stride 3; values in the gaps would change the results."""
    matrix = torch.empty(len(vector), 3, dtype=vector.dtype, device=vector.device)
    matrix.fill_(float("nan") if vector.is_floating_point() else 1_000_000)
    matrix[:, 1] = vector
    return matrix[:, 1]


def with_columns(inputs: Inputs) -> Inputs:
    """Return the inputs with every vector replaced by an equal column of a matrix."""

    def changed(name: str, value: Any) -> Any:
        return column_of_a_matrix(value) if is_vector(value) else value

    return inputs.map(changed)


@each_run(WITH_VECTORS, long_backend="reference")
def test_a_vector_with_a_stride_gives_the_same_bits(case, backend, dtype, device):
    function, options = getattr(ops, case.op), {"backend": backend}
    inputs = case.inputs(dtype, device)
    strided = with_columns(inputs)
    expected = parity.run_with_gradients(function, inputs, options)
    actual = parity.run_with_gradients(function, strided, options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# `make test` omits Triton's cases, because backends share the tested code and the interpreter is
# slow.
@each_run(RUNS, long_backend="triton")
def test_a_result_whose_gradient_is_none_gives_none(case, backend, dtype, device):
    inputs = case.inputs(dtype, device)
    leaves = {name: value for name, value in inputs.items() if name in inputs.gradients}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = getattr(ops, case.op)(*inputs.positional.values(), **inputs.keyword, backend=backend)
    WithoutGradient.apply(out).sum().backward()
    assert leaves
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == []
