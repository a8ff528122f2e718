"""The C++ rotary embedding agrees with float64, at every instruction-set level."""

from __future__ import annotations

import pytest
import torch

from fastbert import reference
from fastbert.testing.compare import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(tokens, total, head_dim, dtype):
    angles = torch.rand(tokens, head_dim // 2) * 2 * torch.pi
    return torch.randn(tokens, total, head_dim).to(dtype), angles.cos(), angles.sin()


def check(operators, x, cos, sin, heads):
    for inverse in (False, True):
        signed = -sin if inverse else sin
        exact = reference.rotary(x.double(), cos.double(), signed.double(), heads=heads)
        yardstick = reference.rotary(x, cos, signed, heads=heads)
        actual = operators.rotary(x, cos, sin, heads, inverse)
        assert_close(f"rotary inverse={inverse}", actual, exact, yardstick)
        assert torch.equal(actual[:, heads:], x[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 54, 64, 96, 256])
def test_agrees_with_float64(isa, operators, head_dim, dtype):
    check(operators, *draw(37, 9, head_dim, dtype), 6)


@pytest.mark.parametrize("heads", [0, 1, 6])
def test_no_head_one_and_every(isa, operators, heads):
    check(operators, *draw(5, 6, 40, torch.bfloat16), heads)


def test_strides_rows_alone_and_threads_change_no_bit(isa, operators):
    x, cos, sin = draw(1200, 6, 38, torch.float32)
    expected = operators.rotary(x, cos, sin, 4, False)
    wide = torch.full((1200, 9, 51), torch.nan)
    wide[:, 2:8, 3:41] = x
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for view in (wide[:, 2:8, 3:41], x.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
            assert torch.equal(operators.rotary(view, cos, sin, 4, False), expected)
    finally:
        torch.set_num_threads(threads)
    alone = operators.rotary(x[7:8], cos[7:8], sin[7:8], 4, False)
    assert torch.equal(alone, expected[7:8])


@pytest.mark.parametrize(("tokens", "total"), [(0, 6), (3, 0)])
def test_no_rows_and_no_heads(isa, operators, tokens, total):
    x, cos, sin = draw(tokens, total, 16, torch.float32)
    assert operators.rotary(x, cos, sin, 0, False).shape == x.shape


def test_bad_input_names_the_argument(operators):
    x, cos, sin = draw(4, 6, 8, torch.float32)
    for name, arguments in [
        ("x", (x[..., :7], cos, sin, 4)),
        ("x", (x[0], cos, sin, 4)),
        ("cos", (x, cos[:3], sin, 4)),
        ("sin", (x, cos, sin[:, :3], 4)),
        ("heads", (x, cos, sin, 7)),
        ("heads", (x, cos, sin, -1)),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            operators.rotary(*arguments, False)
    with pytest.raises(TypeError, match=r"^cos: got .*allowed"):
        operators.rotary(x, cos.double(), sin, 4, False)
