"""The layer_norm launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, kept, normal, seed_tensor

from fastbert import ops, reference
from fastbert.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from fastbert.kernels.tiles import LARGEST_ROW
from fastbert.ops import backend as backends

EPS = 1e-12


def run(x, weight, bias, dy, *, residual=None, x_bias=None, p=0.0, seed=None):
    """Return [y, dx, dweight, (dbias), (dresidual), (dx_bias)] of the launchers."""
    options = {"residual": residual, "x_bias": x_bias, "dropout_p": p, "seed": seed}
    y, mean, rstd = layer_norm_forward(x, weight, bias, eps=EPS, **options)
    dsum, dx, dweight, dbias, dx_bias = layer_norm_backward(
        dy, x, weight, mean, rstd, has_bias=bias is not None, **options
    )
    assert (dx is None) == (p == 0.0)
    assert (dbias is None) == (bias is None)
    gradients = [dsum if dx is None else dx, dweight, *([] if dbias is None else [dbias])]
    gradients += [] if residual is None else [dsum]
    return [y, *gradients, *([] if dx_bias is None else [dx_bias])]


def check(rows, columns, dtype, device, *, biased=True, fused=True, p=0.0, mean=0.0):
    x = normal(rows, columns, dtype=dtype, device=device) + mean
    dy = normal(rows, columns, dtype=dtype, device=device)
    weight, bias, x_bias = (normal(columns, dtype=dtype, device=device) for _ in range(3))
    residual = normal(rows, columns, dtype=dtype, device=device) if fused else None
    x_bias = x_bias if fused else None
    bias = bias if biased else None
    seed = seed_tensor(device)
    actual = run(x, weight, bias, dy, residual=residual, x_bias=x_bias, p=p, seed=seed)

    def function(x, weight, bias, residual, x_bias):
        return reference.layer_norm(
            x, weight, bias, residual=residual, x_bias=x_bias, dropout_p=p, eps=EPS,
            dropout_seed=seed.cpu(),
        )  # fmt: skip

    names = "y dx dweight" + " dbias" * biased + " dresidual dx_bias" * fused
    judge(names, actual, function, [x, weight, bias, residual, x_bias], dy)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "fused", "p"),
    [
        (5, 1023, SINGLE, True, 0.1),
        (33, 111, SINGLE, False, 0.0),
        (9, 768, SINGLE, True, 0.5),
        (70, 40, HALF, True, 0.1),
        (9, 768, HALF, False, 0.0),
        (2, 3584, BRAIN, False, 0.1),
        (17, 384, BRAIN, True, 0.0),
        (100, 16, BRAIN, False, 0.3),
    ],
)
def test_against_oracle(rows, columns, dtype, fused, p, device):
    check(rows, columns, dtype, device, fused=fused, p=p)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "p"), [(33, 111, SINGLE, 0.3), (9, 768, HALF, 0.0)]
)
def test_without_a_bias(rows, columns, dtype, fused, p, device):
    check(rows, columns, dtype, device, biased=False, fused=fused, p=p)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_x_bias_of_rows_too_wide_for_a_third_sum(p, biased, device, monkeypatch):
    """The gradient of x_bias is right for wide rows, where a separate pass sums it from dx."""
    monkeypatch.setattr("fastbert.kernels.layer_norm.WIDEST_WITH_X_BIAS", 32)
    check(9, 48, SINGLE, device, biased=biased, p=p)


def test_mean_far_from_zero(device):
    check(9, 768, SINGLE, device, fused=False, mean=1e4)


def test_a_mean_far_from_zero_costs_no_accuracy(device):
    """The result for integer rows plus 2**14 is within the tolerance for the integer rows alone."""
    x = torch.randint(-8, 9, (5, 768)).float().to(device)
    dy = normal(5, 768, dtype=SINGLE, device=device)
    weight, bias = (normal(768, dtype=SINGLE, device=device) for _ in range(2))

    def function(x, weight, bias):
        return reference.layer_norm(x, weight, bias, eps=EPS)

    judge("y dx dweight dbias", run(x + 2**14, weight, bias, dy), function, [x, weight, bias], dy)


def test_constant_and_huge_rows_stay_finite(device):
    x = torch.stack([torch.full((768,), value) for value in (3.3, -1e4, 1e30)])
    x = torch.cat([x, torch.randn(2, 768) * 1e30]).to(device)
    weight, bias, dy = torch.ones(768), torch.randn(768), torch.randn(5, 768)
    outputs = run(x, weight.to(device), bias.to(device), dy.to(device))
    assert all(torch.isfinite(t).all() for t in outputs)


def test_parameters_of_another_dtype(device):
    x, dy = (normal(6, 48, dtype=BRAIN, device=device) for _ in range(2))
    weight, bias = (normal(48, dtype=SINGLE, device=device) for _ in range(2))
    y, _, dweight, dbias = run(x, weight, bias, dy)
    assert (y.dtype, dweight.dtype, dbias.dtype) == (BRAIN, SINGLE, SINGLE)


def test_strided_and_offset_rows(device):
    """Strided rows, unaligned data pointers and gradients with any strides give right results.

    The bits may differ, because on a GPU each alignment has its own layout and order of summation.
    """
    x, residual, dy = (normal(7, 111, dtype=SINGLE, device=device) for _ in range(3))
    weight, bias = (normal(111, dtype=SINGLE, device=device) for _ in range(2))
    wide = torch.zeros(7, 250, device=device)
    wide[:, 1:112] = x
    narrow = torch.zeros(7 * 111 + 1, device=device)
    narrow[1:] = residual.flatten()
    views = (wide[:, 1:112], narrow[1:].view(7, 111))

    def function(x, weight, bias, residual):
        return reference.layer_norm(x, weight, bias, residual=residual, eps=EPS)

    for gradient in (dy.t().contiguous().t(), dy[:1].expand(7, 111), dy[:1, :1].expand(7, 111)):
        actual = run(views[0], weight, bias, gradient, residual=views[1])
        given = [x, weight, bias, residual]
        judge("y dx dweight dbias dresidual", actual, function, given, gradient)


def test_dropout_is_the_defined_philox(device):
    rows, columns, p = 21, 70, 0.3
    x, dy = (normal(rows, columns, dtype=SINGLE, device=device) for _ in range(2))
    ones = torch.ones(columns, device=device)
    _, dx, _, _ = run(x, ones, ones, dy, p=p, seed=seed_tensor(device, -12345678901234567))
    expected = kept(-12345678901234567, p, (1, 1, rows, columns))[0, 0]
    assert torch.equal((dx != 0).cpu(), expected)


def test_dropout_of_everything_and_of_nothing(device):
    x, residual, dy = (normal(5, 64, dtype=SINGLE, device=device) for _ in range(3))
    ones = torch.ones(64, device=device)
    seed = seed_tensor(device)
    _, dx, *_ = run(x, ones, ones, dy, residual=residual, p=1.0, seed=seed)
    assert torch.count_nonzero(dx) == 0
    alone = run(residual, ones, ones, dy)
    dropped = run(x, ones, ones, dy, residual=residual, p=1.0, seed=seed)
    assert torch.equal(alone[0], dropped[0])
    assert torch.equal(run(x, ones, ones, dy, p=0.0, seed=seed)[0], run(x, ones, ones, dy)[0])


def test_reruns_agree_bitwise(device):
    x, dy = (normal(30, 48, dtype=BRAIN, device=device) for _ in range(2))
    weight, bias = (normal(48, dtype=BRAIN, device=device) for _ in range(2))
    options = {"p": 0.2, "seed": seed_tensor(device)}
    first, second = (run(x, weight, bias, dy, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(0, 16), (3, 1)])
def test_degenerate_sizes(rows, columns, device):
    x, dy = (normal(rows, columns, dtype=SINGLE, device=device) for _ in range(2))
    weight, bias = (normal(columns, dtype=SINGLE, device=device) for _ in range(2))
    y, dx, dweight, dbias = run(x, weight, bias, dy)
    assert torch.equal(y, bias.expand(rows, columns))
    assert torch.count_nonzero(dx) == 0
    assert torch.count_nonzero(dweight) == 0
    assert torch.allclose(dbias, dy.sum(0))


def test_errors_name_the_argument(device):
    x = normal(4, 32, dtype=SINGLE, device=device)
    row = torch.ones(32, device=device)
    with pytest.raises(ValueError, match="x: got last stride"):
        layer_norm_forward(x.T.contiguous().T, row, row, eps=EPS)
    with pytest.raises(ValueError, match="seed: got None"):
        layer_norm_forward(x, row, row, dropout_p=0.5, eps=EPS)
    with pytest.raises(ValueError, match=r"dropout_p: got 1\.5"):
        layer_norm_forward(x, row, row, dropout_p=1.5, seed=seed_tensor(device), eps=EPS)
    with pytest.raises(ValueError, match="columns: got 70000"):
        layer_norm_forward(x.new_ones(1, 70000), row, row, eps=EPS)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_wider_than_the_registers_are_refused_in_words(op, device):
    assert backends.LARGEST_TRITON_ROW == LARGEST_ROW
    x = torch.ones(1, LARGEST_ROW + 1, device=device)
    parameters = [x[0]] * (2 if op == "layer_norm" else 1)
    with pytest.raises(ValueError, match="rows have 8193 elements, allowed: up to 8192"):
        getattr(ops, op)(x, *parameters, backend="triton")
    assert torch.isfinite(getattr(ops, op)(x, *parameters, eps=1.0)).all()
