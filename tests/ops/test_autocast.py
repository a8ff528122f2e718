"""With fp32 parameters, operations are within tolerance under autocast, on every backend.

Their errors are compared with the errors of the reference under the same autocast.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.ops import product
from fastbert.testing.compare import compare
from fastbert.testing.parity import run_with_gradients
from fastbert.testing.selection import find
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.bfloat16, torch.float16)
CASES = [
    *find("relative_attention", "deberta"),
    *find("relative_attention", "packed"),
    *find("linear", "bias"),
    *find("linear_gelu", "erf"),
    *find("feed_forward", "tanh"),
    *find("feed_forward", "relu"),
    *find("feed_forward", "swiglu"),
    *find("feed_forward", "recompute_geglu"),
]
# Under autocast, plain PyTorch adds relative terms in fp32. The backend "reference" rounds its
# inputs first, and adds the terms in 16 bits.
RUNS = [
    (case, backend)
    for case in CASES
    for backend in (("cpu",) if case.op == "relative_attention" else ("reference", "cpu"))
    if backends.refusal(case.op, backend, backends.Request("cpu", torch.bfloat16)) is None
]
each_run = pytest.mark.parametrize(
    ("case", "backend"), RUNS, ids=[f"{c.op}-{c.name}-{b}" for c, b in RUNS]
)
needs_cpu = pytest.mark.skipif(
    backends.unavailable("cpu", "cpu") is not None, reason="the extension cannot run here"
)


def to(dtype, inputs):
    """Return the inputs with every floating tensor in the dtype."""

    def convert(_, value):
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return inputs.map(convert)


def run(function, inputs, dtype, **extra) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype):
        return run_with_gradients(function, inputs, extra)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_run
def test_results_and_gradients(case, backend, dtype):
    # All fp32 inputs are exactly representable in `dtype`, so the float64 oracle has the same
    # inputs as autocast.
    inputs = to(torch.float32, case.inputs(dtype))
    exact = to(torch.float64, inputs)
    function = getattr(reference, case.op)
    oracle = run_with_gradients(function, exact, {})
    yardstick = Yardstick(lambda: run(function, inputs, dtype))
    got = run(getattr(ops, case.op), inputs, dtype, backend=backend)
    assert got["out"].dtype == dtype
    for name in oracle:
        result = compare(name, got[name], oracle[name], yardstick[name], tested=dtype)
        assert result.passed, str(result)


@needs_cpu
def test_the_gradient_of_an_fp32_weight_is_not_rounded_to_bf16():
    x, weight = torch.randn(40, 24), torch.randn(8, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ops.linear(x, weight, backend="cpu").sum().backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


@needs_cpu
def test_no_copy_of_an_fp32_weight_is_made():
    weight = torch.randn(5, 8)
    assert product.parameters_for("cpu", torch.bfloat16, weight, None) == (weight, None)
    (cast,) = product.parameters_for("reference", torch.bfloat16, weight)
    assert cast.dtype == torch.bfloat16
    (cast,) = product.parameters_for("cpu", torch.bfloat16, weight.half())
    assert cast.dtype == torch.bfloat16


@needs_cpu
@pytest.mark.parametrize("op", ["linear", "linear_gelu", "feed_forward"])
def test_opcheck_of_mixed_dtypes(op):
    x, w, b = torch.randn(6, 8).bfloat16(), torch.randn(8, 8), torch.randn(8)
    dy, needs = torch.randn(6, 8).bfloat16(), [True] * 3
    run = {
        "linear": (x, w, b, "cpu"),
        "linear_gelu": (x, w, b, "gelu", True, "cpu"),
        "feed_forward": (x, w, b, w.clone(), b.clone(), "gelu", True, "cpu"),
    }[op]
    back = {
        "linear": (dy, x, w, b, torch.randn(6, 8), needs, "cpu"),
        "linear_gelu": (dy, x, w, b, x.clone(), "gelu", needs, "cpu"),
        "feed_forward": (
            dy, x, w, b, w.clone(), b.clone(), x.clone(), torch.randn(6, 8), "gelu", [True] * 5,
            "cpu",
        ),
    }[op]  # fmt: skip
    leaves = tuple(a.requires_grad_() if isinstance(a, Tensor) else a for a in run)
    torch.library.opcheck(getattr(torch.ops.fastbert, op).default, leaves)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in back)
    torch.library.opcheck(getattr(torch.ops.fastbert, f"{op}_backward").default, plain)


@needs_cpu
@pytest.mark.parametrize("op", ["linear", "feed_forward"])
def test_compiles_in_one_graph_without_gradients(op):
    x, w, b = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8)
    arguments = (x, w, b) if op == "linear" else (x, w, b, w, b)
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*arguments), getattr(ops, op)(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_is_left_alone(dtype):
    inputs = find("rotary")[0].inputs(dtype)
    plain = run_with_gradients(ops.rotary, inputs, {})
    for name, tensor in run(ops.rotary, inputs, torch.bfloat16).items():
        assert torch.equal(tensor, plain[name])
        assert tensor.dtype == dtype
