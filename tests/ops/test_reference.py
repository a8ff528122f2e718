"""``fastbert.reference`` has the same functions with the same arguments as ``fastbert.ops``."""

from __future__ import annotations

import inspect

import pytest
import torch

from fastbert import ops, reference
from fastbert.activations import ACTIVATIONS, APPROXIMATIONS, UNGATED, of_config

FUNCTIONS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]


def arguments(function) -> list[tuple]:
    parameters = inspect.signature(function).parameters.values()
    # The reference has no arguments that choose a backend.
    return [(p.name, p.kind, p.default) for p in parameters if not p.name.endswith("backend")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_are_those_of_the_operation(name):
    assert arguments(getattr(reference, name)) == arguments(getattr(ops, name))


def test_int8_linear_in_plain_pytorch_is_the_operation():
    x, residual = torch.randn(2, 5, 70), torch.randn(2, 5, 41)
    weight = reference.pack(*reference.int8_weight(torch.randn(41, 70)), 16, 4)
    bias = torch.randn(41)
    for activation in ("none", *UNGATED):
        options = {"residual": residual, "activation": activation}
        expected = reference.int8_linear(x, weight, bias, **options)
        actual = ops.int8_linear(x, weight, bias, backend="reference", **options)
        assert expected.shape == (2, 5, 41)
        assert torch.equal(actual, expected)


def test_the_reference_encoder_takes_int8_weights():
    hidden, inner, heads, lengths = 24, 40, 3, [5, 1, 9]
    shapes = ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
    weights = [torch.randn(shape) * 0.2 for shape in shapes]
    biases = [torch.randn(n) for n, _ in shapes]
    norms = [torch.rand(hidden) + 0.5, torch.randn(hidden)] * 2
    packed = [reference.pack(*reference.int8_weight(w), 16, 4) for w in weights]
    scales = [t for w in packed for t in (w.scale, w.column_sum)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()

    def run(four, scales):
        (a, b, c, d), (e, f, g, h) = four, biases
        parameters = [a, e, b, f, *norms[:2], c, g, d, h, *norms[2:]]
        x = torch.randn(sum(lengths), hidden, generator=torch.Generator().manual_seed(1))
        options = {"batch": len(lengths), "heads": heads, "scales": scales}
        (y,) = reference.encoder(x, parameters, ends, max(lengths), **options)
        return y

    whole = run(weights, ())
    quantised = run([w.packed for w in packed], scales)
    error = (quantised - whole).abs().max()
    assert 0 < error < 0.2, error  # 8-bit weights and rows have rounding errors


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_slope_of_an_activation_is_its_derivative(name):
    activation = ACTIVATIONS[name]
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation.function(x).sum(), x)
    torch.testing.assert_close(activation.slope(x.detach()), slope)


def test_every_name_of_an_activation_leads_to_it():
    assert {name: ACTIVATIONS[name].approximate for name in UNGATED} == {
        name: approximate for approximate, name in APPROXIMATIONS.items()
    }
    assert set(of_config(gated=False)) == {
        *("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
    }
    assert set(of_config(gated=True)) == {"gelu", "gelu_new", "gelu_pytorch_tanh", "silu"}
    assert of_config(gated=True)["gelu_new"].name == "geglu_tanh"
    assert of_config(gated=True)["silu"].name == "swiglu"
