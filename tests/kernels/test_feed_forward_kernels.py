"""The feed-forward launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, normal

from fastbert import reference
from fastbert.activations import ACTIVATIONS
from fastbert.kernels import tiles as block_sizes
from fastbert.kernels.feed_forward import activation_forward, linear_gelu_forward
from fastbert.kernels.feed_forward_backward import activation_backward, feed_forward_backward

PATHS = ("fused", "library")
# With these values of GEMM_TILES, 70 × 131 results have tiles of 128 × 128, 64 × 64 and 64 × 32.
TILES = (1, 4, 96)


def draw(rows, depth, columns, dtype, device, activation="gelu", has_bias=True, scale=1.0):
    """Return random x, w1, b1, w2 and dy; w1 maps `depth` to `columns`, and w2 maps back."""
    first = 2 * columns if ACTIVATIONS[activation].gated else columns
    return (
        normal(rows, depth, dtype=dtype, device=device, scale=scale),
        normal(first, depth, dtype=dtype, device=device, scale=max(depth, 1) ** -0.5),
        normal(first, dtype=dtype, device=device) if has_bias else None,
        normal(depth, columns, dtype=dtype, device=device, scale=max(columns, 1) ** -0.5),
        normal(rows, depth, dtype=dtype, device=device),
    )


def run(x, w1, b1, w2, dy, activation, path):
    """Return [y, dx, dw1, (db1), dw2]; torch computes the GEMMs without an activation."""
    form = {"activation": activation, "path": path}
    a, h = linear_gelu_forward(x, w1, b1, save=True, **form)
    dh, db1, again = feed_forward_backward(dy, w2, h, sum_rows=b1 is not None, **form)
    return [a @ w2.T, dh @ w1, dh.T @ x, *([] if db1 is None else [db1]), dy.T @ again]


def judge_feed_forward(actual, x, w1, b1, w2, dy, activation):
    def function(x, w1, b1, w2):
        return reference.feed_forward(x, w1, b1, w2, None, activation=activation)

    names = "y dx dw1 db1 dw2" if b1 is not None else "y dx dw1 dw2"
    judge(names, actual, function, [x, w1, b1, w2], dy)


@pytest.mark.each_value
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "has_bias", "scale"), [(SINGLE, True, 1.0), (HALF, False, 4.0), (BRAIN, True, 1.0)]
)
def test_against_oracle(dtype, has_bias, scale, activation, path, device):
    tensors = draw(70, 65, 131, dtype, device, activation, has_bias, scale)
    judge_feed_forward(run(*tensors, activation, path), *tensors, activation)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
@pytest.mark.parametrize("depth", [64, 200])
def test_every_tile_of_the_gemm(tiles, activation, depth, device, monkeypatch):
    """Every tile size is right, with and without a partial last step along the inner dimension."""
    monkeypatch.setattr(block_sizes, "GEMM_TILES", tiles)
    tensors = draw(70, depth, 131, HALF, device, activation)
    judge_feed_forward(run(*tensors, activation, "fused"), *tensors, activation)


def test_tiles_are_the_ones_that_the_tests_above_mean(monkeypatch):
    shapes = []
    for tiles in TILES:
        monkeypatch.setattr(block_sizes, "GEMM_TILES", tiles)
        shapes.append(block_sizes.gemm_tile(70, 131, HALF)[:2])
    assert shapes == [(128, 128), (64, 64), (64, 32)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [(1, 128, 96, SINGLE), (1, 33, 70, BRAIN), (33, 111, 1, SINGLE), (129, 16, 40, HALF)],
)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_odd_sizes(rows, depth, columns, dtype, activation, path, device):
    tensors = draw(rows, depth, columns, dtype, device, activation)
    judge_feed_forward(run(*tensors, activation, path), *tensors, activation)


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize(("activation", "dtype"), [("gelu", BRAIN), ("swiglu", SINGLE)])
def test_a_program_walks_its_tiles(programs, activation, dtype, device, monkeypatch):
    """The result does not depend on how many programs share the tiles."""
    tensors = draw(130, 32, 140, dtype, device, activation)
    expected = run(*tensors, activation, "fused")
    monkeypatch.setattr(block_sizes, "multiprocessors", lambda x: programs)
    actual = run(*tensors, activation, "fused")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_tile_position_visits_every_tile_once(device):
    """Each tile is visited exactly once, with one full and one partial group of row blocks."""
    x = normal(9 * 64 + 5, 16, dtype=SINGLE, device=device)
    weight = torch.eye(16, device=device).repeat(5, 1)
    y, _ = linear_gelu_forward(x, weight, None, activation="relu", save=False, path="fused")
    assert torch.equal(y, x.clamp(min=0.0).repeat(1, 5))


@pytest.mark.parametrize("path", PATHS)
def test_product_of_small_integers_is_exact(path, device):
    x = torch.randint(-3, 4, (70, 97)).to(device, HALF)
    weight = torch.randint(-3, 4, (65, 97)).to(device, HALF)
    bias = torch.randint(-3, 4, (65,)).to(device, HALF)
    _, h = linear_gelu_forward(x, weight, bias, activation="gelu", save=True, path=path)
    assert torch.equal(h.double(), x.double() @ weight.double().T + bias.double())


def times_one(x, activation):
    """Return x as the pre-activation; a gated activation also gets the factor 1."""
    return torch.cat([x, torch.ones_like(x)], dim=1) if ACTIVATIONS[activation].gated else x


def of_gate(dh, a, activation):
    """Return the gate's part of dh; the factor's part must be `a`, because dy is 1."""
    gate = dh[:, : a.shape[1]]
    if ACTIVATIONS[activation].gated:
        assert torch.equal(dh[:, a.shape[1] :], a)
    return gate


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_large_values(activation, dtype, path, device):
    """For large |x|, act(x) is exactly x or 0, and its derivative is exactly 1 or 0."""
    x = torch.tensor([[-65504.0, 65504.0, -120.0, 120.0, 0.0]], device=device).to(dtype)
    form = {"activation": activation, "path": path}
    one = torch.ones(1, 1, dtype=dtype, device=device)
    weight, bias = one, None
    if ACTIVATIONS[activation].gated:
        weight, bias = torch.cat([one, 0 * one]), torch.cat([0 * one[0], one[0]])
    y, _ = linear_gelu_forward(x.T, weight, bias, save=False, **form)
    assert torch.equal(y.T, x.clamp(min=0.0))
    h = times_one(x, activation)
    dh, _, a = feed_forward_backward(one, torch.ones_like(x), h, **form)
    slope_at_zero = 0.0 if activation == "relu" else 0.5
    assert of_gate(dh, a, activation).tolist() == [[0.0, 1.0, 0.0, 1.0, slope_at_zero]]
    assert torch.equal(a, y.T)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_whose_square_overflows(activation, device):
    x = torch.tensor([[-1e30, 1e30]], device=device)
    h = times_one(x, activation)
    dh, _, a = activation_backward(torch.ones_like(x), h, activation=activation, activated=True)
    assert torch.equal(a, x.clamp(min=0.0))
    assert of_gate(dh, a, activation).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_fp16_number(activation, device):
    """All 63,488 finite fp16 numbers are right in fp32, where no rounding to fp16 hides errors."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(HALF)
    x = x[x.isfinite()].view(-1, 62).float().to(device)
    h, da = times_one(x, activation), torch.ones_like(x)
    form = {"activation": activation}
    dh, _, a = activation_backward(da, h, sum_rows=False, activated=True, **form)
    assert torch.equal(a, activation_forward(h, **form))
    dx = of_gate(dh, a, activation)
    judge("y dh", [a, dx], ACTIVATIONS[activation].function, [x], da)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_is_not_hidden(activation, device):
    h = torch.full((1, 4), float("nan"), device=device)
    assert activation_forward(h, activation=activation).isnan().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_strided_and_offset_inputs(activation, path, device):
    x, w1, b1, w2, dy = draw(37, 50, 40, SINGLE, device, activation)
    dy = dy[:1].expand(37, 50)
    dense = run(x, w1, b1, w2, dy.contiguous(), activation, path)
    wide = torch.zeros(37, 201, device=device)
    wide[:, 1:101:2] = x
    views = run(
        wide[:, 1:101:2], w1.T.contiguous().T, b1, w2.T.contiguous().T, dy, activation, path
    )
    # On the path "fused", torch computes no GEMM that db1 depends on.
    if path == "fused":
        assert torch.equal(dense[3], views[3])
    judge_feed_forward(views, x, w1, b1, w2, dy, activation)


def test_strided_gradient_and_preactivation(device):
    da, h = (normal(37, 60, dtype=BRAIN, device=device) for _ in range(2))
    dense = activation_backward(da[:, ::2].contiguous(), h, activation="swiglu")
    views = activation_backward(da[:, ::2], h.T.contiguous().T, activation="swiglu")
    assert all(torch.equal(a, b) for a, b in zip(dense[:2], views[:2], strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_gives_only_what_is_asked_for(path, device):
    x, w1, _, w2, dy = draw(8, 16, 24, SINGLE, device)
    assert linear_gelu_forward(x, w1, None, activation="gelu", save=False, path=path)[1] is None
    h = x @ w1.T
    form = {"activation": "gelu", "sum_rows": False}
    assert feed_forward_backward(dy, w2, h, path=path, **form)[1] is None
    assert activation_backward(h, h, **form)[1:] == (None, None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_reruns_agree_bitwise(activation, path, device):
    tensors = draw(150, 32, 48, BRAIN, device, activation)
    first, second = (run(*tensors, activation, path) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 8, 4), (5, 0, 4), (5, 8, 0)])
def test_empty_sizes(rows, depth, columns, activation, path, device):
    x, w1, b1, w2, dy = draw(rows, depth, columns, SINGLE, device, activation)
    y, dx, dw1, db1, dw2 = run(x, w1, b1, w2, dy, activation, path)
    shapes = [tuple(t.shape) for t in (y, dx, dw1, db1, dw2)]
    assert shapes == [tuple(t.shape) for t in (dy, x, w1, b1, w2)]
    assert all(torch.isfinite(t).all() for t in (y, dx, dw1, db1, dw2))
    if rows == 0:
        assert torch.count_nonzero(db1) == 0


def test_gradient_of_a_bias_over_many_rows(device):
    """Every block of rows is summed exactly once, and rows after the last row are not summed."""
    h, ones = torch.full((300, 3), 200.0, device=device), torch.ones(300, 3, device=device)
    _, elementwise, _ = activation_backward(ones, h, activation="gelu")
    identity = torch.eye(3, device=device)
    _, fused, _ = feed_forward_backward(ones, identity, h, activation="gelu", path="fused")
    assert elementwise.tolist() == fused.tolist() == [300.0] * 3


def test_path_of_a_product():
    for dtype in (SINGLE, HALF, BRAIN):
        for rows in (1, 64, 4096):
            for depth in (384, 768, 4096):
                path = block_sizes.gemm_path(rows, 3072, depth, dtype, 80)
                assert path.name in PATHS
                assert "not measured" in path.reason
    assert block_sizes.gemm_path(4096, 3072, 768, SINGLE, 80).name == "library"
    assert block_sizes.gemm_path(4096, 3072, 768, BRAIN, 80).name == "fused"
    assert block_sizes.gemm_path(4096, 3072, 4096, BRAIN, 80).name == "library"
    measured = block_sizes.gemm_path(4096, 3072, 768, BRAIN, 90)
    assert measured == ("library", "the library's GEMM is faster (measured on an H200)")
    assert block_sizes.gemm_path(512, 3072, 768, BRAIN, 90).name == "fused"


def test_errors_name_the_argument(device):
    x = normal(4, 4, dtype=SINGLE, device=device)
    for path in PATHS:
        for bad in ("sigmoid", "swish", "none"):
            with pytest.raises(ValueError, match=f"activation: got '{bad}', allowed: gelu, "):
                linear_gelu_forward(x, x, None, activation=bad, save=False, path=path)
    with pytest.raises(ValueError, match="path: got 'cutlass'"):
        linear_gelu_forward(x, x, None, activation="gelu", save=False, path="cutlass")
    with pytest.raises(ValueError, match="path: got 'cutlass'"):
        feed_forward_backward(x, x, x, activation="gelu", path="cutlass")
