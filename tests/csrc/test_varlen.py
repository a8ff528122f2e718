"""Tests of the operators that check the range of ids, find real tokens, and scatter rows."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("number", "outside"), [(-1, True), (0, False), (9, False), (10, True)])
def test_a_number_at_the_edge_of_the_range(operators, dtype, number, outside):
    index = torch.tensor([[3, 4, 5], [6, number, 7]], dtype=dtype)
    assert operators.any_outside(index, 10, None) == outside
    assert operators.any_outside(index.t(), 10, None) == outside


def test_only_the_ignored_number_may_lie_outside(operators):
    index = torch.tensor([3, -100, 9])
    assert operators.any_outside(index, 10, None)
    assert not operators.any_outside(index, 10, -100)
    assert operators.any_outside(index, 9, -100)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(3, 0, 5), (2, 6, 1), (0, 0), (7,), ()])
def test_the_tokens_of_a_mask(operators, dtype, lengths):
    mask = torch.zeros(len(lengths), 7, dtype=dtype)
    for row, length in zip(mask, lengths, strict=True):
        row[torch.randperm(7)[:length]] = 1
    indices, cu_seqlens, longest = operators.unpad_indices(mask)
    assert torch.equal(indices, mask.flatten().nonzero().flatten())
    assert cu_seqlens.dtype == torch.int32
    assert torch.equal(cu_seqlens, torch.tensor([0, *lengths]).cumsum(0).int())
    assert longest == max(lengths, default=0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("columns", [1, 30, 1000])
@pytest.mark.parametrize("places", [(0, 1, 4), (2, 3, 8), (0, 9), (9,), ()], ids=str)
def test_rows_go_back_and_the_others_are_zero(operators, places, columns, count):
    values, expected = torch.randn(len(places), columns, 2), torch.zeros(10, columns, 2)
    expected[list(places)] = values
    indices = torch.tensor(places, dtype=torch.int64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        assert torch.equal(operators.scatter_rows(values, indices, 10), expected)
    finally:
        torch.set_num_threads(threads)


def test_many_rows_on_several_threads(operators):
    kept = torch.rand(5000) < 0.7
    values, expected = torch.randn(int(kept.sum()), 40), torch.zeros(5000, 40)
    expected[kept] = values
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        indices = kept.nonzero().flatten()
        assert torch.equal(operators.scatter_rows(values, indices, 5000), expected)
    finally:
        torch.set_num_threads(threads)


def test_rows_in_any_order(operators):
    values, order = torch.randn(6, 5), torch.randperm(9)[:6]
    expected = torch.zeros(9, 5)
    expected[order] = values
    assert torch.equal(operators.scatter_rows(values, order, 9), expected)
    twice = operators.scatter_rows(values[:2], torch.tensor([4, 4]), 9)
    assert torch.equal(twice[4], values[1])
    assert not twice[[0, 1, 2, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("places", [(0, 9), (-1, 3), (9, 2)])
def test_a_row_out_of_range_is_an_error(operators, places):
    with pytest.raises((IndexError, ValueError)):
        operators.scatter_rows(torch.randn(2, 5), torch.tensor(places), 9)


def test_bad_input_names_the_argument(operators):
    for name, call in (
        ("index", lambda: operators.any_outside(torch.zeros(3), 9, None)),
        ("mask", lambda: operators.unpad_indices(torch.ones(3, 4))),
        ("indices", lambda: operators.scatter_rows(torch.ones(3, 4), torch.ones(3).int(), 9)),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: got .*allowed"):
            call()
    with pytest.raises(ValueError, match=r"^mask: got .*allowed"):
        operators.unpad_indices(torch.ones(3).bool())
    with pytest.raises(ValueError, match=r"^indices: got .*allowed"):
        operators.scatter_rows(torch.ones(3, 4), torch.arange(2), 9)
