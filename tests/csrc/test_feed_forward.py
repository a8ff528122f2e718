"""The C++ bias and GELU against float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 59, 111, 768, 1023, 3584)
FORMS = ("none", "tanh")


def draw(rows, columns, dtype, with_bias=True):
    h, dy = (2 * torch.randn(rows, columns)).to(dtype), torch.randn(rows, columns).to(dtype)
    return h, torch.randn(columns).to(dtype) if with_bias else None, dy


def gradients(h, bias, dy, approximate, dtype):
    h = h.detach().to(dtype).requires_grad_()
    bias = None if bias is None else bias.detach().to(dtype).requires_grad_()
    y = reference.gelu(h if bias is None else h + bias, approximate)
    y.backward(dy.to(dtype))
    return y.detach(), h.grad, None if bias is None else bias.grad


def run(operators, h, bias, dy, approximate):
    y = operators.bias_gelu_forward(h, bias, approximate)
    return y, *operators.bias_gelu_backward(dy, h, bias, approximate)


def check(operators, h, bias, dy, approximate):
    oracle = gradients(h, bias, dy, approximate, torch.float64)
    yardstick = gradients(h, bias, dy, approximate, h.dtype)
    actual = run(operators, h, bias, dy, approximate)
    for i, name in enumerate(("y", "dh", "dbias")[: 2 if bias is None else 3]):
        assert_close(f"bias_gelu {name}", actual[i], oracle[i], yardstick[i])
    if bias is None:
        assert actual[2].numel() == 0


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_agrees_with_float64(isa, operators, columns, dtype, approximate):
    check(operators, *draw(37, columns, dtype), approximate)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias(isa, operators, dtype, approximate):
    check(operators, *draw(9, 768, dtype, with_bias=False), approximate)


def test_many_rows_in_several_chunks(isa, operators):
    check(operators, *draw(1500, 59, torch.float32), "none")


@pytest.mark.parametrize("approximate", FORMS)
def test_every_fp16_number(isa, operators, approximate):
    """All 63,488 finite numbers; the largest are 65504 in magnitude."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()].view(-1, 62)
    ones = torch.ones_like(x)
    check(operators, x, None, ones, approximate)
    check(operators, x.float(), None, ones.float(), approximate)
    check(operators, x.bfloat16(), None, ones.bfloat16(), approximate)


@pytest.mark.parametrize("approximate", FORMS)
def test_exact_far_from_zero_and_nan_propagates(isa, operators, approximate):
    x = torch.tensor([[65504.0, -65504.0, 3e38, -3e38, torch.inf, 20.0, -20.0, 0.0, -0.0]])
    y, slope, _ = run(operators, x, None, torch.ones_like(x), approximate)
    assert torch.equal(y, x.clamp(min=0.0))
    assert torch.equal(slope, torch.tensor([[1.0, 0, 1, 0, 1, 1, 0, 0.5, 0.5]]))
    x = torch.full((1, 37), torch.nan)
    assert all(
        t.isnan().all() for t in run(operators, x, None, torch.ones_like(x), approximate)[:2]
    )


def test_negative_tail_keeps_its_digits(isa, operators):
    """1 + erf cancels to nothing below -6 in fp32; the tail is computed directly instead."""
    x = torch.linspace(-12.0, -3.0, 1000).view(1, -1)
    expected = x.double() * torch.exp(torch.special.log_ndtr(x.double()))
    y = operators.bias_gelu_forward(x, None, "none").double()
    # Rounding the exponent x^2 / 2 costs that many times fp32's epsilon; the rest, a few of them.
    bound = (x.double().square() / 2 + 8) * 2.0**-23
    assert bool(((y / expected - 1).abs() <= bound).all())


def test_row_strides_and_odd_addresses(isa, operators):
    for dtype in DTYPES:
        h, bias, dy = draw(13, 59, dtype)
        expected = run(operators, h, bias, dy, "none")
        wide = torch.full((2, 13, 211), torch.nan, dtype=dtype)
        wide[0, :, 1:60], wide[1, :, 1:60] = h, dy
        actual = run(operators, wide[0, :, 1:60], bias, wide[1, :, 1:60], "none")
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_no_rows(isa, operators):
    y, dh, dbias = run(operators, *draw(0, 111, torch.float32), "none")
    assert y.shape == dh.shape == (0, 111)
    assert torch.equal(dbias, torch.zeros(111))


def test_reruns_and_thread_counts_agree_bitwise(isa, operators):
    arguments = draw(1200, 111, torch.float32)
    expected = run(operators, *arguments, "none")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            actual = run(operators, *arguments, "none")
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), count
    finally:
        torch.set_num_threads(threads)
