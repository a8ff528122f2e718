"""Rank correlations agree with scipy, and distances of distributions with values from formulas."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.analysis import jensen_shannon, kendall, spearman, total_variation

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlations_equal_those_of_scipy(ties):
    torch.manual_seed(3)
    for count in (2, 3, 10, 41):
        x, y = torch.randn(2, count)
        if ties:
            x, y = (x * 2).round(), (y * 2).round()
        pairs = ((spearman, stats.spearmanr), (kendall, stats.kendalltau))
        for ours, stock in pairs:
            expected = float(stock(x.numpy(), y.numpy()).statistic)
            actual = ours(x, y)
            if math.isnan(expected):
                assert math.isnan(actual)
            else:
                assert math.isclose(actual, expected, abs_tol=1e-12)


def test_a_constant_side_has_no_correlation_and_other_shapes_are_refused():
    x, y = torch.ones(4), torch.arange(4.0)
    assert math.isnan(spearman(x, y))
    assert math.isnan(kendall(x, y))
    with pytest.raises(ValueError, match=r"x and y: got the shapes \(4,\) and \(3,\)"):
        spearman(x, y[:3])


def test_distances_of_distributions():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).double()
    q = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0]]).double()
    assert total_variation(p, q).tolist() == [0.5, 1.0]
    middle = 0.5 * (p + q)
    by_hand = 0.0
    for side in (p, q):
        by_hand += 0.5 * sum(
            float(a) * math.log(float(a) / float(m))
            for a, m in zip(side[0], middle[0], strict=True)
            if a > 0
        )
    result = jensen_shannon(p, q)
    assert math.isclose(float(result[0]), by_hand, rel_tol=1e-12)
    assert math.isclose(float(result[1]), math.log(2), rel_tol=1e-12)


def test_the_gradient_at_zero_is_finite():
    p = torch.tensor([0.0, 1.0], requires_grad=True)
    jensen_shannon(p, torch.tensor([0.0, 1.0])).backward()
    assert p.grad.isfinite().all()
