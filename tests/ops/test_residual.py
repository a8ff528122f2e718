"""With a residual connection, one autograd node returns y and x, and adds both gradients of x."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.launches import counted
from fastbert.testing.yardstick import Yardstick

SHAPES = {
    "linear": ((12, 12), (12,)),
    "feed_forward": ((20, 12), (20,), (12, 20), (12,)),
}
NAMES = ("out", "dx", "dw1", "db1", "dw2", "db2")
each_op = pytest.mark.parametrize("op", SHAPES)
RUNS = [
    (op, backend)
    for op in SHAPES
    for backend in ("reference", "cpu", "triton")
    if backends.refusal(op, backend, backends.Request("cpu", torch.float32)) is None
]


def inputs(op: str, *leading: int) -> list[Tensor]:
    """Return random x of shape (..., 12), and random parameters of the operation ``op``."""
    shapes = ((*leading, 12), *SHAPES[op])
    return [(torch.randn(shape) * 0.4).requires_grad_() for shape in shapes]


def around(function: Callable, **options) -> Callable[..., Tensor]:
    """Return a function that weights the output y and the residual x of a layer differently."""

    def run(*arguments: Tensor) -> Tensor:
        y, residual = function(*arguments, return_residual=True, **options)
        return torch.tanh(y) * 2 + residual.square()

    return run


def run(function, leaves: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    out = function(*leaves)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


@pytest.mark.parametrize("leading", [(7,), (3, 5), (2, 3, 4), (0,), ()], ids=str)
@pytest.mark.parametrize(("op", "backend"), RUNS)
def test_both_uses_of_x_are_differentiated(op, backend, leading):
    leaves, plain = inputs(op, *leading), around(getattr(reference, op))
    results = run(around(getattr(ops, op), backend=backend), leaves)
    oracle, yardstick = run(plain, leaves, torch.float64), Yardstick(lambda: run(plain, leaves))
    for name, *triple in zip(NAMES, results, oracle, yardstick, strict=False):
        if triple[0].numel():
            assert_close(name, *triple)


@pytest.mark.parametrize(("op", "backend"), RUNS)
def test_autograd_adds_nothing(op, backend):
    x, *parameters = inputs(op, 9)
    h = x * 2
    y, residual = getattr(ops, op)(h, *parameters, return_residual=True, backend=backend)
    dy, dresidual = torch.ones_like(y), torch.ones_like(h)
    with counted() as launches:
        torch.autograd.grad((y, residual), (h, *parameters), (dy, dresidual))
    if backend == "cpu":
        # There is one product for each gradient of x, of a weight, and of an inner activation.
        assert launches.kernels["matmul"] == {"linear": 2, "feed_forward": 4}[op]
        assert not launches.gemms
    else:
        assert launches.gemms["addmm"] == 1
    assert "aten.add" not in launches.foreign
    if backend == "triton":
        assert not launches.foreign


@each_op
def test_one_of_the_two_results_alone(op):
    x, *parameters = inputs(op, 6)
    y, residual = getattr(ops, op)(x, *parameters, return_residual=True)
    expected = torch.autograd.grad(getattr(ops, op)(x, *parameters).sum(), (x, *parameters))
    got = torch.autograd.grad(y.sum(), (x, *parameters), retain_graph=True)
    for ours, stock in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, stock)
    residual.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(parameter.grad is None for parameter in parameters)


@each_op
def test_what_needs_no_gradient_gets_none(op):
    x, weight, *others = inputs(op, 6)
    frozen = weight.detach()
    around(getattr(ops, op))(x, frozen, *others).sum().backward()
    assert frozen.grad is None
    assert all(t.grad is not None for t in (x, *others))
    data = x.detach()
    y, residual = getattr(ops, op)(data, weight, *others, return_residual=True)
    assert residual is data
    y.sum().backward()
    assert weight.grad is not None


@each_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(op, mode):
    x, *parameters = inputs(op, 3, 4)
    expected = getattr(ops, op)(x, *parameters)
    with mode():
        y, residual = getattr(ops, op)(x, *parameters, return_residual=True)
    assert residual is x
    assert not y.requires_grad
    torch.testing.assert_close(y, expected.detach())


@pytest.mark.parametrize(("op", "backend"), RUNS)
def test_autocast_keeps_the_residual_in_float32(op, backend):
    x, *parameters = inputs(op, 6)
    dy, dresidual = torch.randn(6, 12).bfloat16(), torch.randn(6, 12)
    with torch.autocast("cpu", torch.bfloat16):
        alone = getattr(ops, op)(x, *parameters, backend=backend)
        (dx,) = torch.autograd.grad(alone, x, dy)
        y, residual = getattr(ops, op)(x, *parameters, return_residual=True, backend=backend)
    assert (y.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    torch.autograd.backward((y, residual), (dy, dresidual))
    if backend == "cpu":  # The GEMM adds dresidual, so the sum is rounded once.
        assert (x.grad - dresidual - dx).abs().max() <= dx.abs().max() * 2.0**-8
    else:
        assert torch.equal(x.grad, dx + dresidual)
    assert {t.grad.dtype for t in parameters} == {torch.float32}


@each_op
def test_hooks_and_retained_gradients_see_the_whole_gradient(op):
    x, *parameters = inputs(op, 5)
    h = x * 1
    h.retain_grad()
    seen: list[Tensor] = []
    h.register_hook(seen.append)
    around(getattr(ops, op))(h, *parameters).sum().backward()
    other = x.detach().requires_grad_()
    around(getattr(reference, op))(other, *parameters).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], other.grad)
    torch.testing.assert_close(h.grad, other.grad)


@each_op
def test_activation_checkpointing(op):
    leaves, layer = inputs(op, 5), around(getattr(ops, op))
    expected = run(layer, leaves)
    got = run(lambda *a: checkpoint(layer, *a, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each_op
@pytest.mark.parametrize("mixed", [False, True])
def test_compiles_in_one_graph(op, mixed):
    leaves, layer = inputs(op, 2, 5), around(getattr(ops, op))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        pairs = zip(run(compiled, leaves), run(layer, leaves), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


@each_op
def test_double_backward_raises_clearly(op):
    x, *parameters = inputs(op, 5)
    out = around(getattr(ops, op))(x, *parameters).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fastbert\.reference"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(4, 5)),
            r"weight: got shape \(4, 5\), allowed: \(4, 3",
        ),
        ((torch.ones(2, 3), torch.ones(3)), r"weight: got shape \(3,\), allowed: \(N, 3\)"),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), r"bias: got shape \(3,\)"),
        ((torch.ones(2, 3), torch.ones(4, 3).half()), "weight: got torch.float16"),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).half()), "bias: got torch.float16"),
    ],
)
def test_errors_of_linear_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.linear(*arguments)
