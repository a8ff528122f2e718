"""The linear_gelu launchers against the reference, by the one tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, normal

from fastbert import reference
from fastbert.kernels.feed_forward import gelu_backward, linear_gelu_forward


def run(x, weight, bias, dy, approximate):
    """[y, dx, dweight, (dbias)]; the two GEMMs of the backward are torch's own."""
    y, h = linear_gelu_forward(x, weight, bias, approximate=approximate, save=True)
    dh, dbias = gelu_backward(dy, h, bias, approximate=approximate)
    return [y, dh @ weight, dh.T @ x, *([] if dbias is None else [dbias])]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "has_bias", "scale"),
    [
        (70, 65, 131, SINGLE, True, 1.0),
        (70, 64, 40, SINGLE, True, 6.0),
        (33, 111, 1, SINGLE, False, 1.0),
        (70, 64, 40, HALF, True, 4.0),
        (3, 128, 130, HALF, False, 1.0),
        (70, 65, 131, BRAIN, True, 1.0),
        (130, 16, 40, BRAIN, False, 4.0),
    ],
)
def test_against_oracle(rows, depth, columns, dtype, has_bias, scale, approximate, device):
    x = normal(rows, depth, dtype=dtype, device=device, scale=scale)
    weight = normal(columns, depth, dtype=dtype, device=device, scale=depth**-0.5)
    bias = normal(columns, dtype=dtype, device=device) if has_bias else None
    dy = normal(rows, columns, dtype=dtype, device=device)

    def function(x, weight, bias):
        return reference.linear_gelu(x, weight, bias, approximate=approximate)

    names = "y dx dweight dbias" if has_bias else "y dx dweight"
    judge(names, run(x, weight, bias, dy, approximate), function, [x, weight, bias], dy)


def test_product_of_small_integers_is_exact(device):
    x = torch.randint(-3, 4, (70, 97)).to(device, HALF)
    weight = torch.randint(-3, 4, (65, 97)).to(device, HALF)
    _, h = linear_gelu_forward(x, weight, None, approximate="none", save=True)
    assert torch.equal(h.double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_large_values(approximate, dtype, device):
    """The tails are exact: gelu(x) = x or 0, slope 1 or 0."""
    h = torch.tensor([[-65504.0, 65504.0, -30.0, 30.0, 0.0]], device=device).to(dtype)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    y, _ = linear_gelu_forward(h.T, one, None, approximate=approximate, save=False)
    assert torch.equal(y.T, h.clamp(min=0.0))
    dh, _ = gelu_backward(torch.ones_like(h), h, None, approximate=approximate)
    assert dh.tolist() == [[0.0, 1.0, 0.0, 1.0, 0.5]]


def test_strided_and_offset_inputs(device):
    x, dy = (normal(37, n, dtype=SINGLE, device=device) for n in (50, 40))
    weight = normal(40, 50, dtype=SINGLE, device=device)
    bias = normal(40, dtype=SINGLE, device=device)
    dense = run(x, weight, bias, dy[:1].expand(37, 40).contiguous(), "none")
    wide = torch.zeros(37, 201, device=device)
    wide[:, 1:101:2] = x
    views = run(wide[:, 1:101:2], weight.T.contiguous().T, bias, dy[:1].expand(37, 40), "none")
    assert all(
        torch.equal(a, b) for a, b in zip(dense[:1] + dense[3:], views[:1] + views[3:], strict=True)
    )


def test_saves_only_when_asked(device):
    x, weight = (normal(8, 16, dtype=SINGLE, device=device) for _ in range(2))
    assert linear_gelu_forward(x, weight, None, approximate="none", save=False)[1] is None


def test_reruns_agree_bitwise(device):
    x, dy = (normal(150, n, dtype=BRAIN, device=device) for n in (32, 48))
    weight = normal(48, 32, dtype=BRAIN, device=device)
    bias = normal(48, dtype=BRAIN, device=device)
    first, second = (run(x, weight, bias, dy, "none") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 8, 4), (5, 0, 4), (5, 8, 0)])
def test_empty_sizes(rows, depth, columns, device):
    x = normal(rows, depth, dtype=SINGLE, device=device)
    weight = normal(columns, depth, dtype=SINGLE, device=device)
    bias = normal(columns, dtype=SINGLE, device=device)
    dy = normal(rows, columns, dtype=SINGLE, device=device)
    y, dx, dweight, dbias = run(x, weight, bias, dy, "none")
    assert (y.shape, dx.shape, dweight.shape) == (dy.shape, x.shape, weight.shape)
    assert all(torch.isfinite(t).all() for t in (y, dx, dweight, dbias))
    if rows == 0:
        assert torch.count_nonzero(dbias) == 0


def test_errors_name_the_argument(device):
    x = normal(4, 4, dtype=SINGLE, device=device)
    with pytest.raises(ValueError, match="approximate: got 'sigmoid'"):
        linear_gelu_forward(x, x, None, approximate="sigmoid", save=False)
