"""The operator for feed-forward and layer norm gives the bits of two operators, one per product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
# The numbers of rows are near the sizes of registers, panels and tasks. With 97 rows or more, a
# task normalises whole rows. With 64, 96, 416 or 1,536 activations, a row passes from product to
# product in panels; 40 and 63 activations do not fill whole panels.
SHAPES = [
    (0, 64, 16, 7),
    (1, 64, 64, 1),
    (3, 1536, 384, 15),
    (16, 96, 33, 59),
    (31, 416, 40, 300),
    (33, 40, 96, 70),
    (97, 63, 65, 33),
    (129, 416, 59, 257),
    (300, 96, 64, 800),
    (513, 64, 70, 130),
]


def draw(m, inner, k, n, dtype):
    """Return x, both weights with their biases, the residual, and weight and bias of the norm."""
    shapes = [(m, k), (inner, k), (inner,), (n, inner), (n,), (m, n), (n,), (n,)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def one_by_one(operators, given, activation, eps):
    x, inner, inner_bias, outer, outer_bias, residual, norm_weight, norm_bias = given
    between, _ = operators.linear(x, inner, inner_bias, None, activation, False)
    return operators.linear_layer_norm(
        between, outer, outer_bias, residual, norm_weight, norm_bias, eps
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "inner", "k", "n"), SHAPES)
def test_has_the_bits_of_its_two_products(isa, operators, m, inner, k, n, dtype, activation):
    given = draw(m, inner, k, n, dtype)
    for biases in (given[2], given[4]), (None, None):
        given[2], given[4] = biases
        y = operators.feed_forward_layer_norm(*given, activation, 1e-5)
        assert torch.equal(y, one_by_one(operators, given, activation, 1e-5))


def solve(given, activation, dtype):
    """Return PyTorch's result in ``dtype``; the sums of the norm are in fp32 or wider."""
    x, inner, inner_bias, outer, *rest = (t.to(dtype) for t in given)
    between = F.linear(x, inner, inner_bias)
    if activation != "none":
        between = reference.activate(between, activation)
    wide = torch.promote_types(dtype, torch.float32)
    outer_bias, residual, norm_weight, norm_bias = (t.to(wide) for t in rest)
    y = F.linear(between.to(wide), outer.to(wide), outer_bias) + residual
    return F.layer_norm(y, y.shape[1:], norm_weight, norm_bias, 1e-5).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "inner", "k", "n"), SHAPES[2:8])
def test_agrees_with_float64(isa, operators, m, inner, k, n, dtype, activation):
    """The result agrees with float64; a comparison of bits would miss an error in shared code."""
    given = draw(m, inner, k, n, dtype)
    y = operators.feed_forward_layer_norm(*given, activation, 1e-5)
    yardstick = Yardstick(lambda: solve(given, activation, dtype))
    assert_close("feed-forward", y, solve(given, activation, torch.float64), yardstick)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_hidden_states_in_fp32_and_wider_weights(isa, operators, dtype):
    given = draw(33, 96, 40, 70, dtype)
    given[5] = torch.randn(33, 70)
    given[1], given[3] = torch.randn(96, 40), torch.randn(70, 96)
    y = operators.feed_forward_layer_norm(*given, "gelu", 1e-12)
    assert y.dtype == torch.float32
    assert torch.equal(y, one_by_one(operators, given, "gelu", 1e-12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_in_any_batch(isa, operators, dtype):
    given = draw(300, 96, 40, 70, dtype)
    whole = operators.feed_forward_layer_norm(*given, "gelu", 1e-12)
    for begin, end in ((0, 1), (7, 40), (299, 300), (100, 229)):
        part = list(given)
        part[0], part[5] = given[0][begin:end], given[5][begin:end]
        y = operators.feed_forward_layer_norm(*part, "gelu", 1e-12)
        assert torch.equal(y, whole[begin:end])


def test_not_a_number_stays_in_its_row(isa, operators):
    """A NaN in x reaches only its own row, although the last panel extends beyond the last row."""
    for dtype in DTYPES:
        given = draw(5, 64, 40, 32, dtype)
        given[0][2] = float("nan")
        y = operators.feed_forward_layer_norm(*given, "gelu", 1e-12)
        assert y[2].isnan().all()
        assert y[[0, 1, 3, 4]].isfinite().all()


def test_errors_name_the_argument(operators):
    given = draw(5, 64, 40, 32, torch.float32)

    def refused(place, tensor, message, error=ValueError):
        wrong = list(given)
        wrong[place] = tensor
        with pytest.raises(error, match=message):
            operators.feed_forward_layer_norm(*wrong, "gelu", 1e-12)

    refused(1, torch.zeros(64, 41), r"inner: got shape \[64, 41\], allowed: \(N, 40\)")
    refused(2, torch.zeros(63), r"inner_bias: got shape \[63\]")
    refused(3, torch.zeros(32, 63), r"outer: got shape \[32, 63\], allowed: \(N, 64\)")
    refused(4, torch.zeros(31), r"outer_bias: got shape \[31\], allowed: \(32,\)")
    refused(5, torch.zeros(5, 31), r"residual: got shape \[5, 31\]")
    refused(1, torch.zeros(64, 40, dtype=torch.float16), "inner: got dtype Half", TypeError)
    with pytest.raises(ValueError, match="activation: got 'tanh'"):
        operators.feed_forward_layer_norm(*given, "tanh", 1e-12)
