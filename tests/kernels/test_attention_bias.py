"""The gradient of an additive bias is within tolerance in every form that broadcasts."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, normal, seed_tensor
from quick_cases import long_case

from fastbert import ops, reference
from fastbert.kernels import attention_bias
from fastbert.kernels.attention import attention_backward, attention_forward

pytestmark = pytest.mark.usefixtures("general_path")


def gradients(function, tensors, dout, **options):
    """Return [out, dq, dk, dv, dbias] of the public `function` on the Triton backend."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves[:3], bias=leaves[3], backend="triton", **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("bias_shape", "dtype", "options"),
    [
        ((2, 2, 33, 70), HALF, {"dropout_p": 0.1}),
        long_case((1, 2, 33, 70), BRAIN, {"mask": "pairs"}),
        long_case((2, 1, 33, 70), HALF, {"window": (20, 5)}),
        ((1, 1, 33, 70), SINGLE, {"causal": True}),
        ((1, 2, 1, 70), HALF, {"mask": "keys", "dropout_p": 0.2}),
        long_case((2, 1, 33, 1), SINGLE, {"mask": "keys"}),
        ((70,), BRAIN, {}),
        ((2, 2, 1, 1), BRAIN, {"mask": "pairs"}),
        ((1, 1, 1, 1), HALF, {"window": (9, 40)}),
    ],
)
def test_dense_in_every_broadcast_form(bias_shape, dtype, options, device):
    q, dout = (normal(2, 2, 33, 16, dtype=dtype, device=device) for _ in range(2))
    k, v = (normal(2, 2, 70, 16, dtype=dtype, device=device) for _ in range(2))
    bias = normal(*bias_shape, dtype=dtype, device=device)
    if "mask" in options:
        mask = torch.rand((2, 70) if options["mask"] == "keys" else (2, 2, 33, 70)) > 0.3
        options = {**options, "mask": mask.to(device)}
        # Masked keys must not affect the gradient of the bias either.
        if mask.dim() == 2:
            v = v.masked_fill(~mask.to(device)[:, None, :, None], math.nan)
    seed = seed_tensor(device)
    actual = gradients(ops.attention, [q, k, v, bias], dout, dropout_seed=seed, **options)
    plain = {key: x.cpu() if torch.is_tensor(x) else x for key, x in options.items()}

    def function(q, k, v, bias):
        return reference.attention(q, k, v, bias=bias, dropout_seed=seed.cpu(), **plain)

    judge("out dq dk dv dbias", actual, function, [q, k, v, bias], dout)


@pytest.mark.parametrize(
    ("bias_shape", "dtype", "options"),
    [((1, 2, 40, 40), HALF, {"dropout_p": 0.1}), ((3, 1, 1, 40), SINGLE, {"window": (9, 3)})],
)
def test_varlen_bias_is_indexed_by_positions_in_the_sequence(bias_shape, dtype, options, device):
    cu_seqlens = torch.tensor([0, 40, 40, 57], dtype=torch.int32, device=device)
    q, k, v, dout = (normal(62, 2, 16, dtype=dtype, device=device) for _ in range(4))
    for tensor in (q, k, v, dout):
        tensor[57:] = math.nan
    bias, seed = normal(*bias_shape, dtype=dtype, device=device), seed_tensor(device)
    actual = gradients(
        lambda *x, **kw: ops.attention_varlen(*x, cu_seqlens, **kw),
        [q, k, v, bias], dout, dropout_seed=seed, **options,
    )  # fmt: skip
    actual[:4] = [x[:57] for x in actual[:4]]

    def function(q, k, v, bias):
        lengths = cu_seqlens.cpu()
        seeded = {"dropout_seed": seed.cpu(), **options}
        return reference.attention_varlen(q, k, v, lengths, bias=bias, **seeded)

    judge("out dq dk dv dbias", actual, function, [q[:57], k[:57], v[:57], bias], dout[:57])


def test_shares_of_the_combinations_add_up(device, monkeypatch):
    """The gradient is right for any number of programs per tile, and reruns have the same bits."""
    q, k, v, dout = (normal(3, 1, 20, 16, dtype=HALF, device=device) for _ in range(4))
    bias = normal(1, 1, 1, 20, dtype=HALF, device=device)
    drawn = []
    for programs in (1, 2, 2, 1000):
        monkeypatch.setattr(attention_bias, "PROGRAMS", programs)
        drawn.append(gradients(ops.attention, [q, k, v, bias], dout))
        judge(
            "out dq dk dv dbias",
            drawn[-1],
            lambda q, k, v, bias: reference.attention(q, k, v, bias=bias),
            [q, k, v, bias],
            dout,
        )
    assert torch.equal(drawn[1][4], drawn[2][4])


def test_its_dtype_and_that_of_q_may_differ(device):
    q = normal(1, 2, 20, 16, dtype=HALF, device=device)
    bias = torch.randn(1, 2, 20, 20, device=device, requires_grad=True)
    out = ops.attention(q, q, q, bias=bias, backend="triton")
    (gradient,) = torch.autograd.grad(out.float().square().sum(), bias)
    assert gradient.dtype == torch.float32
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_empty_sizes_give_a_gradient_of_zeros(shape, device):
    batch, heads, queries, keys = shape
    q, dout = (normal(batch, heads, queries, 16, dtype=SINGLE, device=device) for _ in range(2))
    k = normal(batch, heads, keys, 16, dtype=SINGLE, device=device)
    for bias_shape in ((1, heads, 1, 1), (1, 1, queries, keys)):
        bias = normal(*bias_shape, dtype=SINGLE, device=device)
        dbias = gradients(ops.attention, [q, k, k, bias], dout)[4]
        assert dbias.shape == bias_shape
        assert torch.count_nonzero(dbias) == 0


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_a_row_that_finfo_min_hides_altogether_attends_all_alike(dtype, device):
    """A row whose bias is finfo.min has weights 1 / Lk, although lse in fp32 loses log(Lk)."""
    q, k, v, dout = (normal(1, 2, 40, 16, dtype=dtype, device=device) for _ in range(4))
    bias = torch.zeros(1, 1, 40, 40, dtype=SINGLE, device=device)
    bias[..., :10, :] = torch.finfo(SINGLE).min
    scale = 0.25
    expanded = bias.expand(1, 2, 40, 40)
    out, lse = attention_forward(q, k, v, bias=expanded, scale=scale)
    dbias = torch.empty_like(bias)
    actual = attention_backward(dout, q, k, v, out, lse, bias=expanded, scale=scale, dbias=dbias)

    def function(q, k, v):
        # All keys of a masked row have the same weight, so the output of the row is the mean of v.
        rows = reference.attention(q[:, :, 10:], k, v, scale=scale)
        alike = v.mean(dim=2, keepdim=True).expand(1, 2, 10, 16)
        return torch.cat([alike, rows], dim=2)

    hidden = actual[0][:, :, :10]
    judge(
        "out dv",
        [out, actual[2]],
        lambda v: function(q.cpu().to(v.dtype), k.cpu().to(v.dtype), v),
        [v],
        dout,
    )
    assert torch.isfinite(hidden).all()
