"""torch.func and forward-mode AD run PyTorch code; other backends refuse and give the reason."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import forward_ad

from fastbert import ops, reference
from fastbert.ops import backend as backends

X, W, B = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8)
TABLES = torch.randn(3, 15, 2, 4)
OPERANDS = {"linear": (W, B), "linear_gelu": (W, B), "feed_forward": (W, B, W.t(), B)}
each_op = pytest.mark.parametrize("op", [*OPERANDS, "rotary", "relative_attention"])


def both(op, **options):
    """Yield the operation `op` and its reference, both as functions of x only."""
    for module, extra in ((ops, options), (reference, {})):
        function = functools.partial(getattr(module, op), **extra)
        if op in FUNCTIONS:
            yield lambda x, function=function, op=op: FUNCTIONS[op](x, function)
        else:
            yield lambda x, function=function: function(x, *OPERANDS[op])


def turned(x, rotary):
    """View each row of x as two heads of size 4, and rotate only the first head."""
    angles = torch.arange(2.0 * x.shape[0]).view(-1, 2)
    return rotary(x.view(-1, 2, 4), angles.cos(), angles.sin(), heads=1).reshape(x.shape)


def attended(x, relative_attention):
    """View each row of x as two heads of size 4, and let the rows attend to each other."""
    heads, index = x.view(1, -1, 2, 4).transpose(1, 2), torch.arange(15, dtype=torch.int32)
    terms = {
        "position_keys": TABLES[0],
        "position_queries": TABLES[1],
        "position_bias": TABLES[2, ..., 0],
        "segments": (torch.arange(x.shape[0])[None] % 2,) * 2,
        "segment_scores": heads[..., 0],
    }
    out = relative_attention(heads, heads, heads, index, **terms)
    return out.transpose(1, 2).reshape(x.shape)


FUNCTIONS = {"rotary": turned, "relative_attention": attended}


@each_op
def test_torch_func(op):
    ours, plain = both(op)
    got, expected = (torch.func.grad(lambda x, f=f: f(x).sum())(X) for f in (ours, plain))
    assert torch.equal(got, expected)
    got, expected = (torch.func.jvp(f, (X,), (X.flip(0),))[1] for f in (ours, plain))
    assert torch.equal(got, expected)
    got, expected = (torch.func.vmap(f)(X[:, None]) for f in (ours, plain))
    assert torch.equal(got, expected)
    got, expected = (torch.func.hessian(lambda x, f=f: f(x).sum())(X[:1]) for f in (ours, plain))
    assert torch.equal(got, expected)


@each_op
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode(op, mode):
    tangents = []
    with forward_ad.dual_level(), mode():
        for function in both(op):
            y = function(forward_ad.make_dual(X, X.flip(0)))
            tangents.append(forward_ad.unpack_dual(y).tangent)
    assert torch.equal(*tangents)


@each_op
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_another_backend_says_why_it_cannot(op, backend):
    if backends.refusal(op, backend, backends.Request("cpu", torch.float32)) is not None:
        pytest.skip(f"{backend} cannot run here")
    ours, _ = both(op, backend=backend)
    with pytest.raises(ValueError, match=r"cannot serve .* need plain PyTorch, the reference"):
        torch.func.vmap(ours)(X[:, None])
    request = backends.Request("cpu", torch.float32, transformed=True)
    choice = backends.resolve(op, None, request)
    assert choice.backend == "reference"
    assert "torch.func" in choice.reason or "not built" in choice.reason
