"""The C++ layer norm agrees with float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch
from _layer_norm import EPS, Problem, problem

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 59, 111, 768, 1023, 3584)


def check(case: Problem, operators) -> None:
    oracle = case.gradients(torch.float64)
    yardstick = Yardstick(lambda: case.gradients(case.x.dtype))
    for name, actual in case.run(operators).items():
        assert_close(f"layer_norm {name}", actual, oracle[name], yardstick[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_agrees_with_float64(isa, operators, columns, dtype):
    check(problem(37, columns, dtype), operators)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
def test_dropout_agrees_with_float64(isa, operators, dropout_p, dtype):
    check(problem(37, 111, dtype, dropout_p=dropout_p), operators)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("x_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_optional_operands(isa, operators, bias, residual, x_bias, dropout_p):
    operands = {"bias": bias, "residual": residual, "x_bias": x_bias}
    check(problem(9, 768, torch.float32, **operands, dropout_p=dropout_p), operators)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_bias", [False, True])
def test_no_bias_is_a_bias_of_zeros(isa, operators, x_bias, dtype):
    case = problem(37, 111, dtype, bias=False, x_bias=x_bias)
    actual = case.run(operators)
    case.bias = torch.zeros_like(case.weight)
    expected = case.run(operators)
    assert expected.pop("dbias").any()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_many_rows_in_several_chunks(isa, operators):
    check(problem(1500, 59, torch.float32, dropout_p=0.1), operators)


def test_dropout_mask_is_the_definitions_bit_for_bit(isa, operators):
    """With bias 0 and residual 0, the gradient of x is 0 exactly where the element was dropped."""
    rows, columns, p = 19, 203, 0.3
    case = problem(rows, columns, torch.float32, x_bias=False, dropout_p=p)
    kept = reference.dropout_keep(case.seed, p, (rows, columns))
    dx = case.run(operators)["dx"]
    assert torch.equal(dx != 0, kept)
    other = operators.layer_norm_forward(
        case.x, case.weight, case.bias, None, None, case.seed + 1, p, EPS
    )
    assert not torch.equal(case.forward(operators)[0], other[0])


def test_p_zero_is_no_dropout_and_p_one_drops_everything(isa, operators):
    case = problem(5, 111, torch.float32)
    y = case.forward(operators)[0]
    case.seed = case.seed + 7
    assert torch.equal(case.forward(operators)[0], y)
    case.dropout_p = 1.0
    case.x[0] = torch.inf
    y = case.forward(operators)[0]
    expected = operators.layer_norm_forward(
        case.residual, case.weight, case.bias, None, None, None, 0.0, EPS
    )
    assert torch.equal(y, expected[0])
    assert not case.run(operators)["dx"].any()


def test_row_strides_and_odd_addresses(isa, operators):
    for dtype in DTYPES:
        case = problem(13, 59, dtype, dropout_p=0.1)
        expected = case.run(operators)
        for name in ("x", "residual", "dy"):
            wide = torch.full((13, 211), torch.nan, dtype=dtype)
            wide[:, 1:60] = getattr(case, name)
            setattr(case, name, wide[:, 1:60])
        for name, actual in case.run(operators).items():
            assert torch.equal(actual, expected[name]), name


def test_transposed_and_expanded_operands(isa, operators):
    case = problem(8, 111, torch.float32)
    case.dy = case.dy[:1].expand(8, 111)
    expected = case.run(operators)
    case.x = case.x.t().contiguous().t()
    case.dy = case.dy.contiguous()
    for name, actual in case.run(operators).items():
        assert torch.equal(actual, expected[name]), name


def test_gaps_in_the_parameters(isa, operators):
    case = problem(8, 111, torch.float32)
    expected = case.run(operators)
    for name in ("weight", "bias", "x_bias"):
        wide = torch.full((111, 3), torch.nan)
        wide[:, 1] = getattr(case, name)
        setattr(case, name, wide[:, 1])
    for name, actual in case.run(operators).items():
        assert torch.equal(actual, expected[name]), name


def test_no_rows(isa, operators):
    results = problem(0, 111, torch.float32, dropout_p=0.1).run(operators)
    assert results["y"].shape == results["dx"].shape == (0, 111)
    for name in ("dweight", "dbias", "dx_bias"):
        assert torch.equal(results[name], torch.zeros(111))


def test_parameters_keep_their_dtypes(isa, operators):
    case = problem(4, 111, torch.bfloat16)
    case.weight, case.bias = case.weight.float(), case.bias.float()
    case.x_bias = case.x_bias.double()
    results = case.run(operators)
    assert results["y"].dtype == torch.bfloat16
    assert results["dweight"].dtype == results["dbias"].dtype == torch.float32
    assert results["dx_bias"].dtype == torch.float64


def test_mean_far_from_zero_and_constant_rows(isa, operators):
    case = problem(16, 768, torch.float32, residual=False, x_bias=False)
    case.x += 1e4
    oracle = case.gradients(torch.float64)
    yardstick = Yardstick(lambda: case.gradients(torch.float32))
    y = case.forward(operators)[0]
    assert_close("y", y, oracle["y"], yardstick["y"])
    case.x[:] = 0.1
    assert torch.equal(case.forward(operators)[0], case.bias.expand(16, 768))


def test_huge_rows_stay_right(isa, operators):
    """Rows near 1e30, whose squares overflow fp32, have results as accurate as rows near 1."""
    case = problem(4, 111, torch.float32, residual=False, x_bias=False)
    case.x *= 1e30
    y = case.forward(operators)[0]
    oracle = case.gradients(torch.float64)["y"]
    case.x *= 2.0**-100
    assert_close("y", y, oracle, Yardstick(lambda: case.gradients(torch.float32)["y"]))


def test_nan_stays_in_its_row(isa, operators):
    case = problem(3, 59, torch.float32)
    case.x[1, 3] = torch.nan
    y = case.forward(operators)[0]
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_reruns_and_thread_counts_agree_bitwise(isa, operators):
    case = problem(1200, 111, torch.float32, dropout_p=0.1)
    expected = case.run(operators)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, actual in case.run(operators).items():
                assert torch.equal(actual, expected[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_same_bits(isa, operators, dtype):
    case = problem(37, 768, dtype)
    expected = case.run(operators)
    for name in ("x", "residual", "dy"):
        setattr(case, name, getattr(case, name)[7:8])
    alone = case.run(operators)
    assert torch.equal(alone["y"], expected["y"][7:8])
    assert torch.equal(alone["dx"], expected["dx"][7:8])
