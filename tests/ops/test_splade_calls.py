"""`ops.splade`: sizes of 0, autocast, transforms, and what reaches the backends."""

from __future__ import annotations

import pytest
import torch

from fastbert import ops, reference
from fastbert.ops import backend as backends

ENDS = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
BACKENDS = [
    name
    for name in ("reference", "triton", "cpu")
    if backends.refusal("splade", name, backends.Request("cpu", torch.float32)) is None
]


def draw(columns: int = 3, classes: int = 5) -> list[torch.Tensor]:
    return [
        torch.randn(shape, requires_grad=True)
        for shape in ((4, columns), (classes, columns), (classes,))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("columns", "classes"), [(0, 5), (3, 0), (0, 0), (3, 4)])
def test_sizes_of_zero_and_autocast(backend, autocast, columns, classes):
    given = draw(columns, classes)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ops.splade(*given, cu_seqlens=ENDS, backend=backend)
    assert y.shape == (3, classes)
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert not y[1].any()
    y.float().sum().backward()
    assert [t.grad.dtype for t in given] == [torch.float32] * 3
    assert [t.grad.shape for t in given] == [t.shape for t in given]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", range(3))
def test_a_frozen_argument_has_no_gradient(backend, frozen):
    given = draw()
    given[frozen].requires_grad_(False)
    ops.splade(*given, cu_seqlens=ENDS, backend=backend).sum().backward()
    assert [t.grad is None for t in given] == [i == frozen for i in range(3)]


def test_transforms_take_the_reference():
    hidden, weight, bias = (t.detach() for t in draw())

    def of(function):
        return lambda h: function(h, weight, bias, cu_seqlens=ENDS).sum()

    gradients = [torch.func.grad(of(f))(hidden) for f in (ops.splade, reference.splade)]
    assert torch.equal(*gradients)
    _, tangent = torch.func.jvp(of(ops.splade), (hidden,), (hidden,))
    torch.testing.assert_close(tangent, (gradients[0] * hidden).sum())


def test_a_second_derivative_is_an_error_and_the_reference_has_it():
    hidden, weight, bias = draw()
    y = ops.splade(hidden, weight, bias, cu_seqlens=ENDS).square().sum()
    (gradient,) = torch.autograd.grad(y, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        gradient.sum().backward()
    y = reference.splade(hidden, weight, bias, cu_seqlens=ENDS).square().sum()
    (gradient,) = torch.autograd.grad(y, hidden, create_graph=True)
    gradient.sum().backward()
    assert hidden.grad.any()


def test_no_gradient_keeps_nothing(monkeypatch):
    saved = []
    table = backends.TABLES["splade"]["reference"]
    forward = table.forward
    monkeypatch.setitem(
        backends.TABLES["splade"],
        "reference",
        backends.Implementation(
            lambda *given: saved.append(given[-1]) or forward(*given), table.backward
        ),
    )
    given = draw()
    with torch.no_grad():
        ops.splade(*given, cu_seqlens=ENDS, backend="reference")
    ops.splade(*given, cu_seqlens=ENDS, backend="reference")
    assert saved == [False, True]
