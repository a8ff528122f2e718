"""fastbert operations pass torch's own test samples, on every backend and dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _opinfo import COUNTERPARTS, Call, calls
from quick_cases import long_case
from torch import Tensor

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing import parity
from fastbert.testing.cases import Inputs
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

# On Triton, `make test` runs only these operations; a sample takes up to 1 s in the interpreter.
IN_MAKE_TEST = ("layer_norm", "rms_norm", "embedding")
RUNS = [
    (
        pytest.param
        if dtype == torch.float32 and (backend != "triton" or op in IN_MAKE_TEST)
        else long_case
    )(op, backend, dtype, id=f"{op}-{backend}-{backends.dtype_name(dtype)}")
    for op in COUNTERPARTS
    for backend in backends.TABLES[op]
    for dtype in backends.LOW_PRECISION
    if backends.refusal(op, backend, backends.Request("cpu", dtype)) is None
]
drawn: dict[str, list[Call]] = {}


def of_torch(op: str) -> list[Call]:
    if op not in drawn:
        torch.manual_seed(0)
        drawn[op] = list(calls(op))
    return drawn[op]


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs in `dtype` with unchanged strides, which ``Tensor.to`` may change."""

    def to(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            if 0 in value.stride():
                return value.to(dtype)
            return torch.empty_strided(value.shape, value.stride(), dtype=dtype).copy_(value)
        return value

    return inputs.map(to)


def joined(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the results of all samples, because a few elements may be exact by chance."""
    names = {name for result in results for name in result}
    return {
        name: torch.cat([result[name].flatten() for result in results if name in result])
        for name in sorted(names)
    }


@pytest.mark.parametrize(("op", "backend", "dtype"), RUNS)
def test_agrees_with_torch(op, backend, dtype):
    """Results agree with torch's in float64; the reference's errors in `dtype` set the limit."""
    function, options = getattr(ops, op), {"backend": backend}
    results, oracle, plain = [], [], []
    for call in of_torch(op):
        inputs = cast(call.inputs, dtype)
        if call.refused:
            with pytest.raises(ValueError, match=f"^{call.refused}: got "):
                parity.run_with_gradients(function, inputs, options)
            continue
        results.append(parity.run_with_gradients(function, inputs, options))
        oracle.append(
            parity.run_with_gradients(call.torch_function, cast(inputs, torch.float64), {})
        )
        plain.append(partial(parity.run_with_gradients, getattr(reference, op), inputs, {}))
        for name, value in results[-1].items():
            assert value.shape == oracle[-1][name].shape, name
    assert len(results) >= 3
    exact, yardstick = joined(oracle), Yardstick(lambda: joined([run() for run in plain]))
    for name, value in joined(results).items():
        assert_close(f"{op} {name}", value, exact[name], yardstick[name])


@pytest.mark.parametrize("backend", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("op", ["linear", "linear_gelu", "feed_forward"])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_a_product_over_nothing_is_the_bias(op, backend, leading):
    """A product with inner dimension 0, for which torch has no sample, equals the bias."""
    if backends.refusal(op, backend, backends.Request("cpu", torch.float32)) is not None:
        pytest.skip(f"the backend {backend} is not here")
    x, weight = torch.randn(*leading, 0), torch.randn(4, 0)
    bias = torch.randn(4)
    rest = (torch.randn(4, 4), None) if op == "feed_forward" else ()
    names = ("x", "w1", "b1", "w2", "b2") if rest else ("x", "weight", "bias")
    arguments = dict(zip(names, (x, weight, bias, *rest), strict=True))
    inputs = Inputs(arguments, {}, tuple(n for n, value in arguments.items() if value is not None))

    def torch_function(x, weight, bias, w2=None, b2=None):
        h = F.linear(x, weight, bias)
        h = h if op == "linear" else F.gelu(h)
        return h if w2 is None else F.linear(h, w2)

    actual = parity.run_with_gradients(getattr(ops, op), inputs, {"backend": backend})
    expected = parity.run_with_gradients(torch_function, inputs, {})
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        torch.testing.assert_close(actual[name], value)


@pytest.mark.parametrize("backend", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_relu_at_nan_and_at_zero_has_the_gradient_of_torch(backend, dtype):
    if backends.refusal("linear_gelu", backend, backends.Request("cpu", dtype)) is not None:
        pytest.skip(f"the backend {backend} does not take this")
    x = torch.tensor([[-1.0], [0.0], [1.0], [float("nan")]], dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)

    def slope(function):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(torch.full_like(y, 2.0))
        return y.detach(), leaf.grad

    stock = slope(lambda leaf: F.relu(F.linear(leaf, one)))
    ours = slope(lambda leaf: ops.linear_gelu(leaf, one, None, approximate="relu", backend=backend))
    for actual, expected in zip(ours, stock, strict=True):
        assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["reference", "triton", "cpu"])
def test_every_backend_refuses_the_same_eps(backend, eps):
    if backends.refusal("layer_norm", backend, backends.Request("cpu", torch.float32)) is not None:
        pytest.skip(f"the backend {backend} is not here")
    x, row = torch.randn(2, 4), torch.ones(4)
    ids = torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: ops.layer_norm(x, row, row, eps=eps, backend=backend),
        lambda: ops.rms_norm(x, row, eps=eps, backend=backend),
        lambda: ops.embedding(ids, None, None, x, None, None, row, row, eps=eps, backend=backend),
    ):
        with pytest.raises(ValueError, match=r"^eps: got .+, allowed: a finite number >= 0$"):
            call()
