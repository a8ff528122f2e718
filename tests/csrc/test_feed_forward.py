"""The C++ activations agree with float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.activations import ACTIVATIONS
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 59, 111, 768, 1023, 3584)
GELU = ("gelu", "gelu_tanh")


def draw(rows, columns, dtype, with_bias=True):
    h, dy = (2 * torch.randn(rows, columns)).to(dtype), torch.randn(rows, columns).to(dtype)
    return h, torch.randn(columns).to(dtype) if with_bias else None, dy


def gradients(h, bias, dy, activation, dtype):
    h = h.detach().to(dtype).requires_grad_()
    bias = None if bias is None else bias.detach().to(dtype).requires_grad_()
    y = reference.activate(h if bias is None else h + bias, activation)
    y.backward(dy.to(dtype))
    return y.detach(), h.grad, None if bias is None else bias.grad


def run(operators, h, bias, dy, activation):
    y = operators.activation_forward(h, bias, activation)
    summed = bias is not None
    return y, *operators.activation_backward(dy, h, bias, activation, summed, False)[:2]


def check(operators, h, bias, dy, activation):
    oracle = gradients(h, bias, dy, activation, torch.float64)
    yardstick = Yardstick(lambda: gradients(h, bias, dy, activation, h.dtype))
    actual = run(operators, h, bias, dy, activation)
    for i, name in enumerate(("y", "dh", "dbias")[: 2 if bias is None else 3]):
        assert_close(f"{activation} {name}", actual[i], oracle[i], yardstick[i])
    if bias is None:
        assert actual[2].numel() == 0


@pytest.mark.parametrize("activation", GELU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_agrees_with_float64(isa, operators, columns, dtype, activation):
    check(operators, *draw(37, columns, dtype), activation)


@pytest.mark.parametrize("activation", GELU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias(isa, operators, dtype, activation):
    check(operators, *draw(9, 768, dtype, with_bias=False), activation)


def test_many_rows_in_several_chunks(isa, operators):
    check(operators, *draw(1500, 59, torch.float32), "gelu")


@pytest.mark.parametrize("activation", GELU)
def test_every_fp16_number(isa, operators, activation):
    """The activation is right for all 63,488 finite fp16 numbers, up to 65,504 in magnitude."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()].view(-1, 62)
    ones = torch.ones_like(x)
    check(operators, x, None, ones, activation)
    check(operators, x.float(), None, ones.float(), activation)
    check(operators, x.bfloat16(), None, ones.bfloat16(), activation)


@pytest.mark.parametrize("activation", GELU)
def test_exact_far_from_zero_and_nan_propagates(isa, operators, activation):
    x = torch.tensor([[65504.0, -65504.0, 3e38, -3e38, torch.inf, 20.0, -20.0, 0.0, -0.0]])
    y, slope, _ = run(operators, x, None, torch.ones_like(x), activation)
    assert torch.equal(y, x.clamp(min=0.0))
    assert torch.equal(slope, torch.tensor([[1.0, 0, 1, 0, 1, 1, 0, 0.5, 0.5]]))
    for dtype in DTYPES:
        x = torch.full((1, 37), torch.nan, dtype=dtype)
        assert all(
            t.isnan().all() for t in run(operators, x, None, torch.ones_like(x), activation)[:2]
        )


def test_negative_tail_keeps_its_digits(isa, operators):
    """GELU of negative numbers is accurate, even below -6, where 1 + erf rounds to 0 in fp32."""
    x = torch.linspace(-12.0, -3.0, 1000).view(1, -1)
    expected = x.double() * torch.exp(torch.special.log_ndtr(x.double()))
    y = operators.activation_forward(x, None, "gelu").double()
    # Rounding the exponent x^2 / 2 adds an error of x^2 / 2 fp32 epsilons; other steps add a few.
    bound = (x.double().square() / 2 + 8) * 2.0**-23
    assert bool(((y / expected - 1).abs() <= bound).all())


def test_row_strides_and_odd_addresses(isa, operators):
    for dtype in DTYPES:
        h, bias, dy = draw(13, 59, dtype)
        expected = run(operators, h, bias, dy, "gelu")
        wide = torch.full((2, 13, 211), torch.nan, dtype=dtype)
        wide[0, :, 1:60], wide[1, :, 1:60] = h, dy
        actual = run(operators, wide[0, :, 1:60], bias, wide[1, :, 1:60], "gelu")
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_no_rows(isa, operators):
    y, dh, dbias = run(operators, *draw(0, 111, torch.float32), "gelu")
    assert y.shape == dh.shape == (0, 111)
    assert torch.equal(dbias, torch.zeros(111))


def test_reruns_and_thread_counts_agree_bitwise(isa, operators):
    arguments = draw(1200, 111, torch.float32)
    expected = run(operators, *arguments, "gelu")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            actual = run(operators, *arguments, "gelu")
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), count
    finally:
        torch.set_num_threads(threads)


# The following tests run every activation, including gated activations, without a bias.


def activation_problem(rows, columns, dtype, activation):
    width = 2 * columns if ACTIVATIONS[activation].gated else columns
    return (2 * torch.randn(rows, width)).to(dtype), torch.randn(rows, columns).to(dtype)


def activation_gradients(h, dy, activation, dtype):
    h = h.detach().to(dtype).requires_grad_()
    a = reference.activate(h, activation)
    a.backward(dy.to(dtype))
    return {"a": a.detach(), "dh": h.grad, "dbias": h.grad.sum(dim=0)}


def run_activation(operators, h, dy, activation):
    dh, dbias, a = operators.activation_backward(dy, h, None, activation, True, True)
    assert dbias.dtype == torch.float32  # without a bias, dbias is in fp32
    return {"a": a, "dh": dh, "dbias": dbias.to(h.dtype)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 111, 768])
def test_activation_agrees_with_float64(isa, operators, columns, dtype, activation):
    h, dy = activation_problem(37, columns, dtype, activation)
    oracle = activation_gradients(h, dy, activation, torch.float64)
    yardstick = Yardstick(lambda: activation_gradients(h, dy, activation, dtype))
    actual = run_activation(operators, h, dy, activation)
    for name, result in actual.items():
        assert_close(f"{activation} {name}", result, oracle[name], yardstick[name])
    assert torch.equal(operators.activation_forward(h, None, activation), actual["a"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_what_is_asked_for(isa, operators, activation):
    h, dy = activation_problem(5, 59, torch.float32, activation)
    expected = run_activation(operators, h, dy, activation)
    dh, dbias, a = operators.activation_backward(dy, h, None, activation, False, False)
    assert torch.equal(dh, expected["dh"])
    assert dbias.numel() == a.numel() == 0


@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
def test_activation_far_from_zero_and_nan(isa, operators, activation):
    x = torch.tensor([[65504.0, -65504.0, 3e38, -3e38, torch.inf, 90.0, -90.0, 0.0, -0.0]])
    h = torch.cat([x, torch.ones_like(x)], dim=1) if ACTIVATIONS[activation].gated else x
    results = run_activation(operators, h, torch.ones_like(x), activation)
    assert torch.equal(results["a"], x.clamp(min=0.0))
    at_zero = 0.0 if activation == "relu" else 0.5
    expected = torch.tensor([[1.0, 0, 1, 0, 1, 1, 0, at_zero, at_zero]])
    assert torch.equal(results["dh"][:, :9], expected)
    nan = torch.full_like(h, torch.nan)
    results = run_activation(operators, nan, torch.ones_like(x), activation)
    assert results["a"].isnan().all()


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_activation_rows_alone_strides_and_threads(isa, operators, activation):
    h, dy = activation_problem(1200, 59, torch.float32, activation)
    expected = run_activation(operators, h, dy, activation)
    wide = torch.full((1200, 211), torch.nan)
    wide[:, 1 : 1 + h.shape[1]] = h
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        actual = run_activation(operators, wide[:, 1 : 1 + h.shape[1]], dy, activation)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    alone = run_activation(operators, h[7:8], dy[7:8], activation)
    assert torch.equal(alone["a"], expected["a"][7:8])
    assert torch.equal(alone["dh"], expected["dh"][7:8])


def test_bad_activation_names_the_argument(operators):
    h, dy = activation_problem(4, 7, torch.float32, "gelu")
    for name, arguments in (
        ("activation", (dy, h, None, "swish")),
        ("h", (dy, h, None, "geglu")),
        ("dy", (dy[:3], h, None, "gelu")),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            operators.activation_backward(*arguments, False, False)
