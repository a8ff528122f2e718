"""Attention bugs of other libraries do not occur in the CUDA C++ kernels of both architectures.

A number in a test's name is the number of the bug in tests/ops/test_regressions.py, which tests the
backends of this machine. Here the PTX machine runs the kernels instead of a GPU.
test_cuda_attention.py, test_hopper_attention.py and test_hopper_backward.py test the other bugs.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from _nvcc import require_nvcc
from quick_cases import long_case
from torch import Tensor

from fastbert import ops
from fastbert.testing.ptx.cuda_operators import CompiledOperators, serving_cuda

FAR = 2**31
# Python 3.11 has no constant for this mmap flag of Linux.
MAP_NORESERVE = 0x4000


@pytest.fixture(scope="module", params=[long_case(80, id="sm_80"), pytest.param(90, id="sm_90")])
def compiled(request, tmp_path_factory):
    require_nvcc()
    return CompiledOperators(tmp_path_factory.mktemp("cuda"), request.param)


@pytest.fixture(autouse=True)
def operators(compiled):
    with serving_cuda(compiled):
        yield


def drawn(queries: int = 40, keys: int = 70, dim: int = 64) -> list[Tensor]:
    """Return random q, k and v, and a random gradient dout of the output."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 2, length, dim, generator=generator).bfloat16()
        for length in (queries, keys, keys, queries)
    ]


def solve(tensors: list[Tensor], **options) -> list[Tensor]:
    """Return the output and the gradients dq, dk and dv."""
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = ops.attention(*leaves, backend="cuda", **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def spread(x: Tensor, dim: int) -> Tensor:
    """Copy `x` to a memory mapping whose pages occupy memory only after a write.

    The last slice along `dim` begins at least 2³¹ elements after the first slice.
    """
    stride = FAR // (x.shape[dim] - 1) // 64 * 64 + 64
    strides = list(torch.empty(x.select(dim, 0).shape, device="meta").stride())
    strides.insert(dim, stride)
    elements = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, elements * x.element_size(), flags=flags)
    return torch.frombuffer(pages, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("number", [0, *map(long_case, (1, 2, 3))], ids=["q", "k", "v", "dout"])
@pytest.mark.parametrize("dim", [0, 2], ids=["sequences", "rows"])
@pytest.mark.every_case
def test_09_offsets_beyond_2_to_the_31(compiled, monkeypatch, number, dim):
    # The check for races would record every byte of the mapping, including the bytes between rows.
    monkeypatch.setattr(compiled, "options", {"races": False})
    tensors = drawn(3, 3)
    near = solve(tensors)
    tensors[number] = spread(tensors[number], dim)
    for one, other in zip(solve(tensors), near, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dim", [64, 128])
def test_16_dropout_of_everything_and_of_nearly_everything(dim):
    tensors = drawn(dim=dim)
    seed = torch.tensor([7])
    for result in solve(tensors, dropout_p=1.0, dropout_seed=seed):
        assert (result == 0).all()
    # Dropout keeps an element with probability 2⁻²⁰, and multiplies a kept element by 2²⁰.
    for result in solve(tensors, dropout_p=1.0 - 2.0**-20, dropout_seed=seed):
        assert torch.isfinite(result).all()


def test_16_a_probability_of_0_draws_nothing():
    tensors = drawn()
    with_seed = solve(tensors, dropout_p=0.0, dropout_seed=torch.tensor([7]))
    for one, other in zip(with_seed, solve(tensors), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_28_logits_of_ten_thousand(dim):
    q, k, v, dout = drawn(dim=dim)
    results = solve([1e4 * q, k, v, dout])
    assert all(torch.isfinite(x).all() for x in results)
    # For nearly every query, the key with the largest logit gets the weight 1.
    largest = (q.float() @ k.float().transpose(2, 3)).argmax(-1)
    expected = torch.take_along_dim(v, largest[..., None], dim=2)
    same = (results[0] == expected).all(-1)
    assert same.float().mean() > 0.9


def test_28_equal_logits_far_from_0():
    """With equal logits of any size, the output equals the mean of the values exactly."""
    q, k, v, dout = drawn()
    v = v.sign()
    v[:, :, 64:] = 0
    for size in (1e4, -1e4):
        ones = torch.ones_like(q)
        out = solve([ones, torch.full_like(k, size / 8), v, dout])[0].float()
        expected = v.float().mean(2, keepdim=True).expand_as(out)
        assert torch.equal(out, expected.bfloat16().float())
