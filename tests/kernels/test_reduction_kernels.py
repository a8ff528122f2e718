"""Sums over rows are exact for small integers, whose sums do not depend on the order."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE

from fastbert.kernels.reduction import ROWS_PER_PARTIAL, sum_partials, sum_planes, sum_rows


def integers(*shape, dtype, device):
    return torch.randint(-3, 4, shape, device=device).to(dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(1, 1, SINGLE), (70, 130, HALF), (128, 16, BRAIN), (300, 129, SINGLE), (129, 59, HALF)],
)
def test_rows_within_a_larger_tensor(rows, columns, dtype, device):
    """The sum does not include elements of the larger tensor outside the rows and columns."""
    x = integers(rows + ROWS_PER_PARTIAL, columns + 3, dtype=dtype, device=device)
    for view in (x[:rows, :columns], x[:rows].mT.contiguous().mT[:, 3:]):
        total = sum_rows(view, SINGLE)
        assert torch.equal(total.double(), view.double().sum(dim=0))


@pytest.mark.parametrize("count", [1, 2, 128, 129, 257])
def test_partial_sums(count, device):
    partials = integers(3, count, 40, dtype=SINGLE, device=device)
    expected = partials.double().sum(dim=1)
    sums = sum_planes(partials, SINGLE, HALF, BRAIN)
    assert [x.dtype for x in sums] == [SINGLE, HALF, BRAIN]
    for total, exact in zip(sums, expected, strict=True):
        assert torch.equal(total.double(), exact.to(total.dtype).double())
    assert torch.equal(sum_partials(partials[1], SINGLE).double(), expected[1])


def test_many_partial_sums_lose_nothing(device):
    """The sum is exact; adding partial sums one by one in fp32 would lose each 1 next to 2**25."""
    partials = torch.ones(1025, 8, device=device)
    partials[0] = 2.0**25
    assert torch.equal(sum_partials(partials, SINGLE), torch.full((8,), 2.0**25 + 1024.0))


def test_no_row(device):
    assert torch.count_nonzero(sum_rows(torch.empty(0, 5, device=device), SINGLE)) == 0
