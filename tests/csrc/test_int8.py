"""int8 products have exact integer sums, and the epilogue is within tolerance, at every level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.ops.int8_linear import pack, unpack
from fastbert.testing.compare import assert_close

# The shapes (M, N, K) have single elements, odd sizes, whole tiles, and more rows than a block.
SHAPES = ((1, 1, 1), (2, 3, 5), (7, 33, 59), (33, 65, 64), (50, 17, 129), (200, 130, 1500))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(operators, x, values, scale, bias=None, residual=None, activation="none", **options):
    """Run the operator on weights packed for the current level, or in groups of ``group``."""
    lanes, group = operators.int8_layout()
    weight = pack(values, scale, lanes, options.get("group", group))
    dtype = options.get("dtype", x.dtype)
    return operators.int8_linear(x, *weight[:3], weight.outputs, bias, residual, activation, dtype)


def integers(m, n, k, low=-128):
    """Return rows x of integers, which quantisation with scale 1 does not change, and weights."""
    x = torch.randint(low, low + 256, (m, k)).float()
    x[:, 0] = low if k == 1 and low < -1 else low + 255
    x[:, -1] = low if k > 1 else x[:, -1]
    return x, torch.randint(-128, 128, (n, k), dtype=torch.int8)


def exact(x, values):
    """Return the exact product of x and the weights, rounded to fp32 once, as in the operator."""
    return (x.long() @ values.long().t()).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("low", [0, -128, -255])
def test_integer_products_are_exact(isa, operators, shape, low):
    m, n, k = shape
    if k == 1:
        low = 0 if low == 0 else -255
    x, values = integers(m, n, k, low)
    assert torch.equal(run(operators, x, values, torch.ones(n)), exact(x, values))
    assert torch.equal(run(operators, x, values, torch.ones(n), group=2), exact(x, values))


@pytest.mark.parametrize("extreme", [-128, 127])
def test_the_largest_sums(isa, operators, extreme):
    """No 16-bit sum saturates, and a sum of 65,536 extreme products is exact in 32 bits."""
    values = torch.full((3, 65536), extreme, dtype=torch.int8)
    for x in (torch.full((2, 65536), 255.0), torch.full((2, 65536), -255.0)):
        assert torch.equal(run(operators, x, values, torch.ones(3)), exact(x, values))


def test_all_levels_quantise_alike(isa, operators):
    """All levels quantise x to the same integers, as a product with the identity matrix shows."""
    x = torch.randn(64, 120) * torch.logspace(-30, 30, 64).unsqueeze(1)
    x[3], x[4], x[5, 7], x[6] = 0.0, 2.5, 1e30, x[6].abs()
    # In a row from -a to a, both the zero point and the largest element round up, so their sum
    # exceeds 255.
    x[8:40, 0] = x[8:40].abs().amax(1) * 1.5
    x[8:40, 1] = -x[8:40, 0]
    q, scale, zero = reference.int8_rows(x)
    identity = torch.eye(120).to(torch.int8)
    for dtype in DTYPES:
        rows = x.to(dtype)
        if not rows.isfinite().all():
            rows = torch.randn(64, 120).to(dtype)
        q, scale, zero = reference.int8_rows(rows)
        y = run(operators, rows, identity, torch.ones(120), dtype=torch.float32)
        assert torch.equal(y, (q - zero) * scale)


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(isa, operators, dtype, activation):
    """The epilogue agrees with float64 arithmetic on the same integer sums."""
    x, bias, residual = torch.randn(37, 70).to(dtype), torch.randn(41), torch.randn(37, 41)
    values, scale = reference.int8_weight(torch.randn(41, 70))
    bias, residual = bias.to(dtype), residual.to(dtype)
    q, row_scale, zero = reference.int8_rows(x)

    def expected(kind):
        y = ((q - zero).double() @ values.double().t()).to(kind)
        y = y * (row_scale.to(kind) * scale.to(kind)) + bias.to(kind)
        return (y if activation == "none" else reference.activate(y, activation)) + residual.to(
            kind
        )

    y = run(operators, x, values, scale, bias, residual, activation)
    yardstick = expected(torch.float32).to(dtype)
    assert_close(f"int8_linear {activation}", y, expected(torch.float64), yardstick)


def test_rows_that_are_zero_tiny_or_not_finite(isa, operators):
    x = torch.randn(40, 100)
    x[1], x[2] = 0.0, 1e-38
    for row, value in ((3, torch.nan), (4, torch.inf), (35, -torch.inf)):
        x[row, row] = value
    values, scale = reference.int8_weight(torch.randn(20, 100))
    bias = torch.randn(20)
    y = run(operators, x, values, scale, bias)
    assert torch.equal(y[1:3], bias.expand(2, 20))
    for row in (3, 4, 35):
        assert y[row].isnan().all()
    rest = [row for row in range(40) if row not in (3, 4, 35)]
    assert torch.equal(y[rest], run(operators, x[rest], values, scale, bias))
    assert y[rest].isfinite().all()


def test_no_rows(isa, operators):
    values, scale = reference.int8_weight(torch.randn(20, 100))
    assert run(operators, torch.empty(0, 100), values, scale).shape == (0, 20)


def test_row_strides_and_odd_addresses(isa, operators):
    values, scale = reference.int8_weight(torch.randn(20, 59))
    for dtype in DTYPES:
        x = torch.randn(13, 59).to(dtype)
        wide = torch.full((13, 211), torch.nan, dtype=dtype)
        wide[:, 1:60] = x
        expected = run(operators, x, values, scale)
        assert torch.equal(run(operators, wide[:, 1:60], values, scale), expected)
        assert torch.equal(run(operators, x.t().contiguous().t(), values, scale), expected)


def test_a_row_alone_in_any_batch_and_on_any_threads_is_bitwise_the_same(isa, operators):
    x, bias = torch.randn(700, 768), torch.randn(150)
    values, scale = reference.int8_weight(torch.randn(150, 768))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(operators, x, values, scale, bias, None, "gelu")
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(operators, x, values, scale, bias, None, "gelu"), expected)
    finally:
        torch.set_num_threads(threads)
    for begin, end in ((0, 1), (1, 3), (5, 9), (100, 133), (699, 700)):
        part = run(operators, x[begin:end], values, scale, bias, None, "gelu")
        assert torch.equal(part, expected[begin:end])


@pytest.mark.parametrize(("lanes", "group"), [(4, 2), (8, 2), (16, 2), (16, 4)])
def test_packing_loses_nothing(lanes, group):
    values, scale = torch.randint(-128, 128, (37, 70), dtype=torch.int8), torch.rand(37)
    weight = pack(values, scale, lanes, group)
    assert all(torch.equal(a, b) for a, b in zip(unpack(weight), (values, scale), strict=True))
    assert torch.equal(weight.column_sum[:37], values.sum(1, dtype=torch.int32))


def test_bad_arguments_are_named(operators):
    lanes, group = operators.int8_layout()
    weight = pack(torch.ones(5, 70, dtype=torch.int8), torch.ones(5), lanes, group)
    x = torch.randn(3, 70)

    def call(x=x, weight=weight, outputs=5, bias=None, residual=None, activation="none"):
        tail = (outputs, bias, residual, activation, torch.float32)
        operators.int8_linear(x, *weight[:3], *tail)

    with pytest.raises(ValueError, match=r"packed: got shape .*allowed for x of 130"):
        call(torch.randn(3, 130))
    with pytest.raises(ValueError, match="x: got 65537 columns, allowed: at most 65536"):
        call(torch.randn(1, 65537))
    with pytest.raises(TypeError, match="x: got dtype Double"):
        call(x.double())
    other = pack(torch.ones(5, 70, dtype=torch.int8), torch.ones(5), 2 * lanes, group)
    with pytest.raises(ValueError, match=r"packed: got shape .*allowed at the level"):
        call(weight=other)
    with pytest.raises(ValueError, match=r"bias: got shape \[4\]"):
        call(bias=torch.ones(4))
    with pytest.raises(ValueError, match=r"residual: got shape \[3, 4\]"):
        call(residual=torch.ones(3, 4))
    with pytest.raises(ValueError, match="activation: got 'tanh'"):
        call(activation="tanh")
