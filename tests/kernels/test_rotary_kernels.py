"""The rotary launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, normal

from fastbert import reference
from fastbert.kernels.rotary import rotary_backward, rotary_forward


def turns(tokens, head_dim, device):
    angles = torch.rand(tokens, head_dim // 2) * 2 * torch.pi
    return angles.cos().to(device), angles.sin().to(device)


def run(x, cos, sin, dy, heads):
    """Return [y, dx] of the launchers."""
    return [f(t, cos, sin, heads=heads) for f, t in ((rotary_forward, x), (rotary_backward, dy))]


@pytest.mark.parametrize(
    ("tokens", "total", "head_dim", "heads", "dtype"),
    [
        (7, 9, 64, 6, SINGLE),
        (5, 6, 96, 4, HALF),
        (9, 6, 64, 4, BRAIN),
        (3, 70, 54, 65, BRAIN),
        (2, 20, 256, 13, SINGLE),
        (3, 2, 514, 1, HALF),
        (33, 3, 2, 2, SINGLE),
    ],
)
def test_against_oracle(tokens, total, head_dim, heads, dtype, device):
    x, dy = (normal(tokens, total, head_dim, dtype=dtype, device=device) for _ in range(2))
    cos, sin = turns(tokens, head_dim, device)
    actual = run(x, cos, sin, dy, heads)

    def function(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return reference.rotary(x, cos.cpu().to(wide), sin.cpu().to(wide), heads=heads)

    judge("y dx", actual, function, [x], dy)
    assert torch.equal(actual[0][:, heads:], x[:, heads:])


def test_copied_heads_keep_what_arithmetic_would_not(device):
    x = torch.tensor([torch.inf, -0.0, 1e-45, 3.0], device=device).repeat(2, 3, 1)
    cos, sin = turns(2, 4, device)
    y = rotary_forward(x, cos, sin, heads=1)
    assert torch.equal(y[:, 1:].view(torch.int32), x[:, 1:].view(torch.int32))


def test_any_strides_give_the_same_bits(device):
    x = normal(5, 4, 24, dtype=SINGLE, device=device)
    cos, sin = turns(5, 24, device)
    wide = torch.full((5, 7, 40), torch.nan, device=device)
    wide[:, 2:6, 3:27] = x
    views = [wide[:, 2:6, 3:27], x.permute(2, 1, 0).contiguous().permute(2, 1, 0)]
    for view in views:
        for got, expected in zip(run(view, cos, sin, view, 3), run(x, cos, sin, x, 3), strict=True):
            assert torch.equal(got, expected)
            assert got.is_contiguous()
    expanded = x[:1, :1, :1].expand(5, 4, 24)
    got = rotary_backward(expanded, cos, sin, heads=4)
    assert torch.equal(got, rotary_backward(expanded.contiguous(), cos, sin, heads=4))


@pytest.mark.parametrize(("tokens", "total"), [(0, 6), (3, 0), (1, 1)])
def test_degenerate_sizes(tokens, total, device):
    x = normal(tokens, total, 8, dtype=SINGLE, device=device)
    for result in run(x, *turns(tokens, 8, device), x, min(total, 1)):
        assert result.shape == x.shape
        assert torch.isfinite(result).all()
