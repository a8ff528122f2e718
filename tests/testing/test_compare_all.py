"""`compare_all` gives the same results as `compare`, and `InFloat64` gives exact results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.testing.compare import HOPELESS, compare, compare_all
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import ORDERS, Yardstick

X, W = torch.randn(40, 300), torch.randn(50, 300)
ORACLE = X.double() @ W.double().T


def shifted(share: float) -> dict[str, Tensor]:
    """Return a right product, and one with an element that is off by `share` times the limit."""
    stock = X @ W.T
    limit = compare("y", stock, ORACLE, Yardstick(lambda: X @ W.T)).allowed
    wrong = stock.clone()
    wrong[0, 0] += share * limit
    return {"right": stock, "wrong": wrong}


@pytest.mark.parametrize("share", [0.1, 2.0, 1000.0])
def test_the_comparisons_are_those_of_compare(share: float) -> None:
    actual = shifted(share)
    oracle = dict.fromkeys(actual, ORACLE)
    joint = compare_all(actual, oracle, Yardstick(lambda: dict.fromkeys(actual, X @ W.T)))
    single = [compare(n, x, ORACLE, Yardstick(lambda: X @ W.T)) for n, x in actual.items()]
    assert [each.name for each in joint] == ["right", "wrong"]
    assert [each.passed for each in joint] == [each.passed for each in single]
    assert [each.error for each in joint] == [each.error for each in single]
    assert [each.passed for each in joint] == [True, share == 0.1]


@pytest.mark.parametrize(("share", "runs"), [(0.1, 1), (1.9, 1 + ORDERS), (20 * HOPELESS, 2)])
def test_a_hopeless_result_is_not_judged_again(share: float, runs: int) -> None:
    seen: list[int] = []

    def run() -> dict[str, Tensor]:
        seen.append(1)
        return dict.fromkeys(("right", "wrong"), X @ W.T)

    actual = shifted(share)
    results = compare_all(actual, dict.fromkeys(actual, ORACLE), Yardstick(run, keep=False))
    assert results[1].passed == (runs == 1)
    assert len(seen) == runs


def test_names_and_dtypes_are_checked() -> None:
    y = {"y": X @ W.T}
    yardstick = Yardstick(lambda: y)
    with pytest.raises(ValueError, match="actual: got"):
        compare_all({"z": y["y"]}, {"y": ORACLE}, yardstick)
    with pytest.raises(ValueError, match=r"oracle: got torch\.float32"):
        compare_all(y, y, yardstick)
    with pytest.raises(ValueError, match="factor: got 3"):
        compare_all(y, {"y": ORACLE}, yardstick, factor=3.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x + torch.zeros(2, dtype=torch.float32),
    ],
)
def test_a_request_for_fp32_is_one_for_float64(function: Any) -> None:
    x = torch.randn(2, dtype=torch.float64)
    with InFloat64():
        result = function(x)
    assert result.dtype == torch.float64
