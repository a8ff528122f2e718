"""The rms_norm launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, normal

from fastbert import reference
from fastbert.kernels.rms_norm import rms_norm_backward, rms_norm_forward

EPS = 1e-6


def run(x, weight, dy, *, residual=None):
    """Return [y, dx, dweight, (dresidual)] of the launchers."""
    y, rstd = rms_norm_forward(x, weight, residual=residual, eps=EPS)
    dsum, dweight = rms_norm_backward(dy, x, weight, rstd, residual=residual)
    return [y, dsum, dweight, *([] if residual is None else [dsum])]


def check(rows, columns, dtype, device, *, fused=True, mean=0.0):
    x = normal(rows, columns, dtype=dtype, device=device) + mean
    dy = normal(rows, columns, dtype=dtype, device=device)
    weight = normal(columns, dtype=dtype, device=device)
    residual = normal(rows, columns, dtype=dtype, device=device) if fused else None
    actual = run(x, weight, dy, residual=residual)

    def function(x, weight, residual):
        return reference.rms_norm(x, weight, residual=residual, eps=EPS)

    names = "y dx dweight dresidual" if fused else "y dx dweight"
    judge(names, actual, function, [x, weight, residual], dy)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "fused"),
    [
        (5, 1023, SINGLE, True),
        (33, 111, SINGLE, False),
        (9, 768, SINGLE, True),
        (70, 40, HALF, True),
        (9, 768, HALF, False),
        (4, 3584, BRAIN, True),
        (37, 384, BRAIN, True),
        (100, 16, BRAIN, False),
        (1, 4097, SINGLE, False),
    ],
)
def test_against_oracle(rows, columns, dtype, fused, device):
    check(rows, columns, dtype, device, fused=fused)


def test_mean_far_from_zero(device):
    check(9, 768, SINGLE, device, mean=1e4)


def test_constant_and_huge_rows_stay_finite(device):
    x = torch.stack([torch.full((768,), value) for value in (3.3, -1e4, 0.0, 1e30)])
    x = torch.cat([x, torch.randn(2, 768) * 1e30]).to(device)
    dy, weight = torch.randn(6, 768, device=device), torch.ones(768, device=device)
    assert all(torch.isfinite(t).all() for t in run(x, weight, dy))
    assert (rms_norm_forward(x, weight, eps=EPS)[0][2] == 0).all()


def test_parameters_of_another_dtype(device):
    x, dy = (normal(6, 48, dtype=BRAIN, device=device) for _ in range(2))
    y, dx, dweight = run(x, normal(48, dtype=SINGLE, device=device), dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (BRAIN, BRAIN, SINGLE)


def test_strided_and_offset_rows(device):
    """Strided rows, unaligned data pointers and gradients with any strides give right results.

    The bits may differ, because on a GPU each alignment has its own layout and order of summation.
    """
    x, residual, dy = (normal(7, 111, dtype=SINGLE, device=device) for _ in range(3))
    weight = normal(111, dtype=SINGLE, device=device)
    wide = torch.zeros(7, 250, device=device)
    wide[:, 1:112] = x
    narrow = torch.zeros(7 * 111 + 1, device=device)
    narrow[1:] = residual.flatten()
    views = (wide[:, 1:112], narrow[1:].view(7, 111))

    def function(x, weight, residual):
        return reference.rms_norm(x, weight, residual=residual, eps=EPS)

    for gradient in (dy.t().contiguous().t(), dy[:1].expand(7, 111), dy[:1, :1].expand(7, 111)):
        actual = run(views[0], weight, gradient, residual=views[1])
        judge("y dx dweight dresidual", actual, function, [x, weight, residual], gradient)


def test_reruns_agree_bitwise(device):
    x, dy = (normal(30, 48, dtype=BRAIN, device=device) for _ in range(2))
    weight = normal(48, dtype=BRAIN, device=device)
    first, second = (run(x, weight, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(0, 16), (3, 1)])
def test_degenerate_sizes(rows, columns, device):
    x, dy = (normal(rows, columns, dtype=SINGLE, device=device) for _ in range(2))
    y, dx, dweight = run(x, torch.ones(columns, device=device), dy)
    assert (y.shape, dx.shape, dweight.shape) == (x.shape, x.shape, (columns,))
    assert all(torch.isfinite(t).all() for t in (y, dx, dweight))
    assert rows > 0 or torch.count_nonzero(dweight) == 0


def test_errors_name_the_argument(device):
    x = normal(4, 32, dtype=SINGLE, device=device)
    row = torch.ones(32, device=device)
    with pytest.raises(ValueError, match="x: got last stride"):
        rms_norm_forward(x.T.contiguous().T, row, eps=EPS)
    with pytest.raises(ValueError, match="columns: got 9000"):
        rms_norm_forward(x.new_ones(1, 9000), row, eps=EPS)
