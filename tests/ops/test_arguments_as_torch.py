"""Arguments that torch takes in every form: vectors with a stride, and gradients that are None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor

from fastbert import ops
from fastbert.testing import parity
from fastbert.testing.cases import Inputs

RUNS = parity.plan(dtype=torch.float32, quick=True)


def each_run(long_backend: str):
    """Run the quick cases on every backend; `make test` leaves those of one backend out."""
    runs = [
        (long_case if run[1] == long_backend else pytest.param)(
            *run, id="-".join((run[0].op, run[0].name, run[1], run[3]))
        )
        for run in RUNS
    ]
    return pytest.mark.parametrize(("case", "backend", "dtype", "device"), runs)


def column_of_a_matrix(vector: Tensor) -> Tensor:
    """Return the values as a view with a stride of 3, between values that would be seen."""
    matrix = torch.empty(len(vector), 3, dtype=vector.dtype, device=vector.device)
    matrix.fill_(float("nan") if vector.is_floating_point() else 1_000_000)
    matrix[:, 1] = vector
    return matrix[:, 1]


def with_columns(inputs: Inputs) -> Inputs:
    """Return the inputs with a column of a matrix in the place of every vector."""

    def changed(name: str, value: Any) -> Any:
        is_vector = isinstance(value, Tensor) and value.dim() == 1 and len(value) > 1
        return column_of_a_matrix(value) if is_vector else value

    return inputs.map(changed)


@each_run(long_backend="reference")
def test_a_vector_with_a_stride_gives_the_same_bits(case, backend, dtype, device):
    function, options = getattr(ops, case.op), {"backend": backend}
    inputs = case.inputs(dtype, device)
    strided = with_columns(inputs)
    expected = parity.run_with_gradients(function, inputs, options)
    found = parity.run_with_gradients(function, strided, options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class WithoutGradient(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> None:
        return None


# All backends share what comes before the gradient, and Triton's interpreter is slow.
@each_run(long_backend="triton")
def test_a_result_whose_gradient_is_none_gives_none(case, backend, dtype, device):
    inputs = case.inputs(dtype, device)
    leaves = {name: value for name, value in inputs.items() if name in inputs.gradients}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = getattr(ops, case.op)(*inputs.positional.values(), **inputs.keyword, backend=backend)
    WithoutGradient.apply(out).sum().backward()
    assert leaves
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == []
