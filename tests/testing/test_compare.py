"""The tolerance rule passes what a good kernel makes and catches what a wrong one makes."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.cases import find
from fastbert.testing.compare import assert_close, compare
from fastbert.testing.parity import oracle_and_yardstick


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def attention_out(request):
    (case,) = find("attention", "plain")
    oracle, yardstick = oracle_and_yardstick(case, request.param)
    return case, oracle["out"], yardstick["out"].library


def test_the_oracle_rounded_once_passes(attention_out):
    _, oracle, yardstick = attention_out
    assert_close("rounded", oracle.to(yardstick.dtype), oracle, yardstick)


def test_a_dropped_key_is_caught(attention_out):
    case, oracle, yardstick = attention_out
    inputs = case.inputs(yardstick.dtype)
    mask = torch.ones(case.shape[0], case.shape[3], dtype=torch.bool)
    mask[:, -1] = False
    wrong = reference.attention(*inputs.positional.values(), mask=mask)
    assert not compare("dropped key", wrong, oracle, yardstick).passed


def test_a_scale_off_by_a_thousandth_is_caught_in_fp32():
    (case,) = find("layer_norm", "residual")
    oracle, yardstick = oracle_and_yardstick(case, torch.float32)
    actual = yardstick["out"].library * 1.001
    result = compare("scaled", actual, oracle["out"], yardstick["out"])
    assert not result.passed


def test_a_small_bias_that_the_maximum_misses_is_caught_by_the_rms():
    oracle = torch.randn(10_000, dtype=torch.float64)
    yardstick = oracle.float() + torch.randn(10_000) * 1e-3
    wrong = oracle.float() + 2.5e-3
    result = compare("bias", wrong, oracle, yardstick)
    assert result.error <= result.allowed
    assert result.rms_error > result.rms_allowed
    assert not result.passed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_element_that_is_not_finite_fails_even_where_the_oracle_is_not_either(value):
    oracle = torch.zeros(100, dtype=torch.float64)
    actual = torch.zeros(100)
    actual[3] = oracle[3] = value
    result = compare("poison", actual, oracle, actual)
    assert not result.passed
    assert "not finite" in str(result)


def test_a_loss_is_judged_by_the_dtype_it_was_computed_in():
    """One lucky yardstick decides nothing there, and one percent is still too much."""
    oracle = torch.tensor([4.6], dtype=torch.float64)
    yardstick, close, wrong = ((oracle + e).float() for e in (1e-5, 4e-4, 0.046))
    assert not compare("loss", close, oracle, yardstick).passed
    assert compare("loss", close, oracle, yardstick, tested=torch.float16).passed
    assert not compare("loss", wrong, oracle, yardstick, tested=torch.float16).passed


def test_wrong_shape_and_dtype_fail():
    oracle = torch.zeros(4, dtype=torch.float64)
    assert "shape" in str(compare("x", torch.zeros(5), oracle, torch.zeros(4)))
    assert "dtype" in str(compare("x", torch.zeros(4).half(), oracle, torch.zeros(4)))


def test_a_looser_factor_needs_a_reason_and_stops_at_three():
    zeros = torch.zeros(4)
    with pytest.raises(ValueError, match="factor"):
        compare("x", zeros, zeros.double(), zeros, factor=3.0)
    with pytest.raises(ValueError, match="factor"):
        compare("x", zeros, zeros.double(), zeros, factor=4.0, reason="because")
    assert compare("x", zeros, zeros.double(), zeros, factor=3.0, reason="atomics").passed


def test_cases_are_the_same_on_every_call_and_differ_between_seeds():
    (case,) = find("layer_norm", "dropout")
    first, again = case.inputs(torch.float32), case.inputs(torch.float32)
    other = case.inputs(torch.float32, seed=1)
    assert torch.equal(first.positional["x"], again.positional["x"])
    assert not torch.equal(first.positional["x"], other.positional["x"])
    assert torch.equal(first.keyword["dropout_seed"], again.keyword["dropout_seed"])


def test_an_unknown_case_names_the_known_ones():
    with pytest.raises(ValueError, match="residual"):
        find("layer_norm", "nonsense")
    with pytest.raises(ValueError, match="attention_varlen"):
        find("softmax")
