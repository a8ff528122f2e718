"""The tolerance rule accepts results of right kernels and rejects results of wrong kernels."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close, compare
from fastbert.testing.parity import oracle_and_yardstick
from fastbert.testing.selection import find
from fastbert.testing.yardstick import Yardstick, fixed_order_product


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


# Tests of yardsticks that recompute sums in fixed orders


def beside(library: torch.Tensor, run) -> Yardstick:
    """Return the yardstick of ``run``, with ``library`` in place of torch's own result."""
    yardstick = Yardstick(run)
    yardstick.library = library
    return yardstick


def in_one_chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a bᵀ in fp32, where each sum adds its terms one after another."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[:, k]
    return total


@pytest.fixture
def product():
    """Return operands, their float64 product, and fp32 products of an exact and a plain library."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 111, generator=generator) for rows in (7, 59))
    oracle = a.double() @ b.double().mT
    return a, b, oracle, {"exact": oracle.float(), "plain": in_one_chain(a, b)}


def test_a_product_in_a_fixed_order_passes_beside_every_library(product):
    a, b, oracle, libraries = product
    right = fixed_order_product(a, b.mT, 100)
    assert not compare("alone", right, oracle, libraries["exact"]).passed
    for library in libraries.values():
        assert_close("product", right, oracle, beside(library, lambda: a @ b.mT))


def test_a_correctly_rounded_result_passes_beside_an_exact_yardstick(product):
    a, b, oracle, libraries = product
    yardstick = beside(libraries["exact"], lambda: a @ b.mT)
    assert_close("rounded", oracle.float(), oracle, yardstick)
    assert_close("rounded", oracle.float(), oracle, libraries["exact"])


@pytest.mark.parametrize("library", ["exact", "plain"])
def test_a_wrong_product_fails_beside_every_library(product, library):
    a, b, oracle, libraries = product
    yardstick, right = beside(libraries[library], lambda: a @ b.mT), oracle.float()
    short = in_one_chain(a[:, :-1], b[:, :-1])
    narrow = a.bfloat16().float() @ b.bfloat16().float().mT
    for wrong in (short, narrow, right * 1.001, right * 1.000005, right + 5e-6):
        result = compare("wrong", wrong, oracle, yardstick)
        assert not result.passed, str(result)


def test_a_dropped_key_is_caught_beside_fixed_orders(attention_out):
    case, oracle, library = attention_out
    inputs = case.inputs(library.dtype)
    mask = torch.ones(case.shape[0], case.shape[3], dtype=torch.bool)
    mask[:, -1] = False
    arguments = inputs.positional.values()
    wrong = reference.attention(*arguments, mask=mask)
    yardstick = Yardstick(lambda: reference.attention(*arguments))
    assert not compare("dropped key", wrong, oracle, yardstick).passed


def test_one_dominant_element_is_judged_by_several_orders():
    """With several orders of sums, a yardstick is fair if a few elements have all of the error."""
    lucky = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k = (40 * torch.randn(rows, 64, generator=generator) for rows in (30, 97))
        oracle = (q.double() @ k.double().mT / 8).softmax(-1)

        def weights(logits: torch.Tensor) -> torch.Tensor:
            return (logits / 8).double().softmax(-1).float()

        right, alone = (weights(fixed_order_product(q, k.mT, order)) for order in (100, 200))
        yardstick = beside(alone, lambda q=q, k=k, weights=weights: weights(q @ k.mT))
        assert_close(f"seed {seed}", right, oracle, yardstick)
        lucky += not compare("alone", right, oracle, alone).passed
    assert lucky > 0


def test_an_overflow_in_fixed_orders_allows_nothing():
    a = torch.full((1, 2), 300.0, dtype=torch.float16)
    oracle = torch.full((8, 8), 3.0, dtype=torch.float64)
    yardstick = beside(oracle.half(), lambda: (a @ a.mT).expand(8, 8))
    assert not compare("overflow", oracle.half() + 1.0, oracle, yardstick).passed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_element_that_is_not_finite_fails_even_where_the_oracle_is_not_either(value):
    oracle = torch.zeros(100, dtype=torch.float64)
    actual = torch.zeros(100)
    actual[3] = oracle[3] = value
    result = compare("poison", actual, oracle, actual)
    assert not result.passed
    assert "not finite" in str(result)


def test_a_loss_is_judged_by_the_dtype_it_was_computed_in():
    """With a yardstick exact by chance, a loss of fp16 may have fp16's error, but not 1 %."""
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
