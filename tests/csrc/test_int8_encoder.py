"""One call of all int8 layers gives the bits of one call per operator, at every level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.ops.int8_linear import Int8Weight, pack

HIDDEN, HEADS, INNER, LAYERS = 48, 3, 80, 2
# A pair is (outputs, inputs) of a linear layer. A layer norm follows the second and fourth pair.
LINEARS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))


def parameters(layout, dtype):
    """Return each layer's packed weights, biases, and parameters of the layer norms."""
    layers = []
    for _ in range(LAYERS):
        weights = [pack(*reference.int8_weight(torch.randn(s) * 0.2), *layout) for s in LINEARS]
        biases = [torch.randn(n).to(dtype) for n, _ in LINEARS]
        norms = [(torch.rand(HIDDEN) + 0.5).to(dtype), torch.randn(HIDDEN).to(dtype)] * 2
        layers.append((weights, biases, norms))
    return layers


def flat(layers):
    tensors, scales = [], []
    for weights, biases, norms in layers:
        linear = [(w.packed, b) for w, b in zip(weights, biases, strict=True)]
        tensors += [*linear[0], *linear[1], *norms[:2], *linear[2], *linear[3], *norms[2:]]
        scales += [t for w in weights for t in (w.scale, w.column_sum)]
    return tensors, scales


def one_by_one(operators, hidden, layers, cu_seqlens, max_seqlen, activation, dtype):
    states = []

    def product(x, weight: Int8Weight, bias, activation="none"):
        sizes = (weight.outputs, bias, None, activation, dtype)
        return operators.int8_linear(x, *weight[:3], *sizes)

    def norm(y, residual, weight, bias):
        y = y.to(residual.dtype)
        return operators.layer_norm_forward(y, weight, bias, residual, None, None, 0.0, 1e-6)[0]

    for weights, biases, norms in layers:
        qkv = product(hidden, weights[0], biases[0]).view(-1, 3, HEADS, HIDDEN // HEADS)
        x, _ = operators.attention_forward(
            *qkv.unbind(1), None, None, cu_seqlens, cu_seqlens, None, max_seqlen, max_seqlen, 0.0,
            (HIDDEN // HEADS) ** -0.5, -1, -1,
        )  # fmt: skip
        middle = norm(product(x.reshape(-1, HIDDEN), weights[1], biases[1]), hidden, *norms[:2])
        x = product(middle, weights[2], biases[2], activation)
        hidden = norm(product(x, weights[3], biases[3]), middle, *norms[2:])
        states.append(hidden)
    return states


@pytest.mark.parametrize(
    ("rows", "products"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(33,), (1, 20, 7, 70)], ids=str)
def test_the_bits_of_the_operators_inside(isa, operators, rows, products, lengths):
    layers = parameters(operators.int8_layout(), rows)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    hidden = torch.randn(sum(lengths), HIDDEN).to(rows)
    expected = one_by_one(operators, hidden, layers, ends, max(lengths), "gelu", products)
    actual = operators.encoder(
        hidden, *flat(layers), ends, None, None, [], [], [], None, len(lengths), max(lengths),
        HEADS, HEADS, 1, 1, False, False, 1e-6, "gelu", products, True,
    )  # fmt: skip
    assert actual[0].dtype == rows
    assert len(actual) == LAYERS
    assert all(map(torch.equal, actual, expected))
