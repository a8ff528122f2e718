"""``pool`` agrees with PyTorch operations on each sequence separately."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastbert.modules import pool
from fastbert.modules.pooling import POOLINGS
from fastbert.testing.compare import assert_close

LENGTHS = (5, 1, 0, 17, 0, 3)
HIDDEN = 19


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def plain(rows: Tensor, pooling: str, lengths: tuple[int, ...] = LENGTHS, skip: int = 0) -> Tensor:
    def one(part: Tensor) -> Tensor:
        wide = torch.promote_types(part.dtype, torch.float32)
        weights = torch.arange(1, len(part) + 1, dtype=wide)[skip:, None]
        part = part[skip:]
        if part.shape[0] == 0:
            return part.sum(0)
        if pooling == "weightedmean":
            return ((part.to(wide) * weights).sum(0) / weights.sum()).to(part.dtype)
        kinds = {"cls": part[0], "last": part[-1], "mean": part.mean(0), "max": part.amax(0)}
        kinds["mean_sqrt_len_tokens"] = part.mean(0) * math.sqrt(len(part))
        return kinds[pooling]

    return torch.stack([one(part) for part in rows.split(lengths)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_values_and_gradients(pooling, dtype) -> None:
    rows = torch.randn(sum(LENGTHS), HIDDEN, dtype=dtype)
    upstream = torch.randn(len(LENGTHS), HIDDEN, dtype=dtype)
    sides = []
    for side, kind in ((pool, dtype), (plain, torch.float64), (plain, dtype)):
        leaf = rows.detach().to(kind).requires_grad_()
        out = side(leaf, bounds(*LENGTHS), pooling) if side is pool else side(leaf, pooling)
        out.backward(upstream.to(kind))
        sides.append((out, leaf.grad))
    for name, *runs in zip(("pooled", "gradient"), *sides, strict=True):
        assert_close(f"{name} of {pooling}", *runs)
    assert sides[0][0].dtype == dtype
    assert not sides[0][0][[2, 4]].any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_of_a_prompt_are_left_out(pooling) -> None:
    rows = torch.randn(sum(LENGTHS) + 2, HIDDEN)
    rows[-2:] = math.nan
    for skip in (1, 3, 20):
        actual = pool(rows, bounds(*LENGTHS), pooling, skip=skip)
        sides = [
            plain(rows[:-2].to(kind), pooling, skip=skip) for kind in (torch.float64, torch.float32)
        ]
        assert_close(f"{pooling} without {skip}", actual, *sides)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_mean_is_summed_in_single_precision(dtype) -> None:
    rows = torch.full((5000, 2), 0.99609375, dtype=dtype)
    assert torch.equal(pool(rows, bounds(5000), "mean"), rows[:1])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_sequence_is_not_touched_by_the_others(pooling) -> None:
    rows = torch.randn(9, HIDDEN)
    alone = pool(rows[2:6], bounds(4), pooling)
    for fill in (math.nan, math.inf):
        around = rows.clone()
        around[:2] = around[6:] = fill
        around.requires_grad_()
        # The last two rows belong to no sequence.
        out = pool(around, bounds(2, 4, 1), pooling)
        assert torch.equal(out[1:2], alone)
        out[1].sum().backward()
        assert not around.grad[:2].any()
        assert not around.grad[6:].any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_by_finite_differences(pooling) -> None:
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pool(x, bounds(2, 0, 3), pooling), rows)


def test_equal_largest_rows_share_the_gradient() -> None:
    equal = torch.ones(4, 1, requires_grad=True)
    pool(equal, bounds(4), "max").backward(torch.ones(1, 1))
    assert equal.grad.flatten().tolist() == [0.25] * 4


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nothing_to_pool(pooling) -> None:
    assert torch.equal(pool(torch.empty(0, 3), bounds(0, 0), pooling), torch.zeros(2, 3))
    assert pool(torch.empty(0, 3), bounds(), pooling).shape == (0, 3)
    # One empty sequence is before the first row, and another is after the last row.
    rows = torch.randn(2, 3)
    assert not pool(rows, bounds(0, 2, 0), pooling)[[0, 2]].any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_whole_graph(pooling) -> None:
    rows = torch.randn(sum(LENGTHS), HIDDEN)
    compiled = torch.compile(pool, backend="aot_eager", fullgraph=True)
    expected = pool(rows, bounds(*LENGTHS), pooling)
    assert torch.equal(compiled(rows, bounds(*LENGTHS), pooling), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pooling": "sum"}, ValueError, "pooling: got 'sum', allowed: cls, mean, max, last"),
        ({"skip": -1}, ValueError, "skip: got -1, allowed: an integer >= 0"),
        ({"rows": torch.ones(4, 2).long()}, TypeError, "rows: got torch.int64, allowed: a float"),
        ({"rows": torch.ones(1, 4, 2)}, ValueError, r"rows: got shape \(1, 4, 2\), allowed: \(T,"),
        ({"cu_seqlens": bounds(4).long()}, TypeError, "cu_seqlens: got torch.int64, allowed: int"),
        ({"cu_seqlens": bounds(4)[None]}, ValueError, r"cu_seqlens: got shape \(1, 2\), allowed"),
        ({"cu_seqlens": bounds(4)[:0]}, ValueError, r"cu_seqlens: got shape \(0,\), allowed"),
        ({"cu_seqlens": bounds(5)}, ValueError, r"cu_seqlens: got \[0, 5\], allowed: .* at most 4"),
        ({"cu_seqlens": bounds(3, -1)}, ValueError, r"cu_seqlens: got \[0, 3, 2\], allowed: from"),
        ({"cu_seqlens": bounds(4)[1:]}, ValueError, r"cu_seqlens: got \[4\], allowed: from 0"),
        ({"cu_seqlens": bounds(4).to("meta")}, ValueError, "cu_seqlens: got device meta, allowed"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message) -> None:
    arguments = {"rows": torch.ones(4, 2), "cu_seqlens": bounds(4), "pooling": "cls"}
    with pytest.raises(error, match=f"^{message}"):
        pool(**arguments | changes)
