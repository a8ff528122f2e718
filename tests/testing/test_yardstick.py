"""A yardstick recomputes certain operators with fixed orders of sums, and no other operators."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastbert import ops
from fastbert.testing import yardstick as yardsticks
from fastbert.testing.yardstick import (
    CHAIN,
    ORDERS,
    Yardstick,
    each,
    fixed_order_product,
    fixed_order_sums,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def products(monkeypatch) -> list[torch.Size]:
    """Return a list that collects the shapes of products that are computed in a fixed order."""
    shapes: list[torch.Size] = []

    def spy(a, b, order):
        result = fixed_order_product(a, b, order)
        shapes.append(result.shape)
        return result

    monkeypatch.setattr(yardsticks, "fixed_order_product", spy)
    return shapes


@pytest.mark.parametrize("depth", [0, 1, CHAIN, CHAIN + 1, 300])
def test_a_product_has_the_bits_of_the_stated_order(depth):
    a, b = torch.randn(2, depth), torch.randn(depth, 3)
    expected = np.zeros((2, 3), np.float32)
    for i, j in np.ndindex(2, 3):
        for first in range(0, depth, CHAIN):
            chain = np.float32(0.0)
            for k in range(first, min(first + CHAIN, depth)):
                chain += a[i, k].numpy() * b[k, j].numpy()
            expected[i, j] += chain
    assert np.array_equal(fixed_order_product(a, b).numpy(), expected)


def test_other_orders_round_the_same_sum_in_another_way():
    a, b = torch.randn(20, 300), torch.randn(300, 20)
    sums = [fixed_order_product(a, b, order) for order in range(ORDERS)]
    assert len({tuple(x.flatten().tolist()) for x in sums}) == ORDERS
    exact, bound = a.double() @ b.double(), 1e-5 * (a.abs() @ b.abs())
    assert all(((x - exact).abs() <= bound).all() for x in sums)


def test_a_batch_has_the_bits_of_its_parts():
    a, b = torch.randn(2, 3, 5, 70), torch.randn(2, 3, 70, 4)
    whole = fixed_order_product(a, b, 3)
    assert torch.equal(whole[1, 2], fixed_order_product(a[1, 2], b[1, 2], 3))


_SEED = torch.Generator().manual_seed(0)
X, W, C, V = (torch.randn(*n, generator=_SEED) for n in ((2, 5, 160), (8, 160), (8,), (160,)))
FORMS = {
    "linear": (lambda x, w, c, v: F.linear(x, w, c), 1),
    "linear without a bias": (lambda x, w, c, v: F.linear(x, w), 1),
    "matmul": (lambda x, w, c, v: x @ w.mT, 1),
    "einsum": (lambda x, w, c, v: torch.einsum("bik,jk->bij", x, w), 1),
    "bmm": (lambda x, w, c, v: torch.bmm(x, x.mT), 1),
    "baddbmm": (lambda x, w, c, v: torch.baddbmm(x @ x.mT, x, x.mT, beta=0.5, alpha=2.0), 2),
    "a vector": (lambda x, w, c, v: w @ v, 1),
    "two vectors": (lambda x, w, c, v: v @ v, 1),
    "attention": (lambda x, w, c, v: F.scaled_dot_product_attention(x, x, x), 2),
    "sum": (lambda x, w, c, v: x.sum(), 1),
    "sum of columns": (lambda x, w, c, v: x.sum((0, -1), keepdim=True), 1),
    "mean": (lambda x, w, c, v: x.mean(), 1),
    "mean of rows": (lambda x, w, c, v: x.mean(-1, dtype=torch.float32), 1),
    "our attention": (lambda x, w, c, v: ops.attention(*3 * [x[None]], backend="reference"), 2),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_product_has_a_fixed_order(products, form, dtype, mode):
    function, count = FORMS[form]
    given = [x.to(dtype) for x in (X, W, C, V)]
    with mode(), fixed_order_sums():
        results = function(*given)
    assert len(products) == count
    assert results.dtype == function(*given).dtype
    exact = function(*(x.double() for x in given))
    # The limit allows for rounding the result, and for rounding the sums of these terms in fp32.
    terms = function(*(x.double().abs() for x in given)).abs().max()
    allowed = torch.finfo(dtype).eps * (1 + exact.abs().max()) + torch.finfo().eps * terms
    assert (results - exact).abs().max() <= 20 * allowed
    assert len(products) == count, "fixed orders end with their context"


def test_gradients_have_a_fixed_order_too(products):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with fixed_order_sums():
        F.linear(x, w).backward(torch.ones(2, 5, 8))
    assert sorted(map(tuple, products)) == [(8, 160), (10, 8), (10, 160)]


def test_float64_and_integers_are_left_alone(products):
    with fixed_order_sums():
        assert torch.equal(X.double() @ W.double().mT, F.linear(X.double(), W.double()))
        X.double().sum()
        torch.arange(3).sum()
    assert products == []


def test_parts_and_functions_of_a_yardstick_are_yardsticks():
    x, w = torch.randn(5, 200), torch.randn(7, 200)
    whole = Yardstick(lambda: {"pair": [x @ w.mT, 2 * x]})
    product, double = whole["pair"]
    total = product.map(torch.sum)
    assert torch.equal(total.library, (x @ w.mT).sum())
    results = list(product.in_fixed_orders())
    assert len(results) == ORDERS
    assert all(torch.equal(y, fixed_order_product(x, w.mT, i)) for i, y in enumerate(results))
    assert all(
        torch.equal(y, z.sum()) for y, z in zip(total.in_fixed_orders(), results, strict=True)
    )
    assert all(torch.equal(y, 2 * x) for y in double.in_fixed_orders())
    assert [type(side) for side in each(torch.sum, x, product)] == [torch.Tensor, Yardstick]


def test_results_in_fixed_orders_are_computed_once_and_only_on_demand():
    runs = []
    yardstick = Yardstick(lambda: [runs.append(1), X @ W.mT])
    assert len(runs) == 1
    for _ in range(2):
        list(yardstick[1].in_fixed_orders())
    assert len(runs) == 1 + ORDERS


def test_random_numbers_are_the_same_in_every_run_and_the_callers_go_on():
    torch.manual_seed(5)
    yardstick = Yardstick(lambda: torch.randn(3))
    after = torch.get_rng_state()
    assert all(torch.equal(run, yardstick.library) for run in yardstick.in_fixed_orders())
    assert torch.equal(torch.get_rng_state(), after)


def test_an_error_inside_leaves_the_products_as_they_were(products):
    with contextlib.suppress(RuntimeError), fixed_order_sums():
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert torch.equal(X @ W.mT, X @ W.mT)
    assert products == []
