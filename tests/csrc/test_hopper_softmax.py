"""The exponentials of attention for Hopper GPUs, compiled by nvcc, against exact numbers."""

from __future__ import annotations

import math
from ctypes import c_int, c_void_p
from decimal import Decimal, getcontext

import pytest
import torch
from _nvcc import require_nvcc

from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA

SOURCE = """
#include "hopper/softmax.cuh"
namespace fastbert::cuda {
__global__ void exponentials(const float* x, float* y, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) y[i] = exp2_polynomial(x[i]);
}
}  // namespace fastbert::cuda
extern "C" int run(const float* x, float* y, int count) {
  fastbert::cuda::exponentials<<<(count + 127) / 128, 128>>>(x, y, count);
  return 0;
}
"""
# softmax.cuh documents this bound of the relative error.
LARGEST = 3.1e-6


@pytest.fixture(scope="module")
def exponentials(tmp_path_factory):
    """Return a function that runs `exp2_polynomial` on a tensor."""
    require_nvcc()
    folder = tmp_path_factory.mktemp("exponentials")
    source = folder / "exponentials.cu"
    source.write_text(SOURCE, encoding="utf-8")
    library = CudaLibrary([source], folder, "90a", ["-I", str(CUDA)])

    def run(x):
        y = torch.full_like(x, torch.nan)
        arguments = c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), c_int(x.numel())
        assert library.call("run", *arguments, memory=[x, y]) == 0
        return y

    return run


def exact(x):
    """Return 2^x to 40 digits."""
    getcontext().prec = 40
    return (Decimal(float(x)) * Decimal(2).ln()).exp()


def test_the_error_is_the_stated_one(exponentials):
    generator = torch.Generator().manual_seed(0)
    near_0 = -torch.rand(500, generator=generator)
    x = torch.cat([
        -126 * torch.rand(500, generator=generator),
        near_0, near_0 * 1e-3, near_0 * 1e-6,
        # The error of the polynomial is largest at the ends of its interval, at -n + 1/2.
        *(torch.arange(-125.5, 0) + shift for shift in (0.0, 1e-5, -1e-5)),
        torch.arange(-126.0, 1.0),
    ])  # fmt: skip
    errors = [
        abs(float((Decimal(float(y)) - exact(value)) / exact(value)))
        for value, y in zip(x, exponentials(x), strict=True)
    ]
    assert 2.5e-6 < max(errors) <= LARGEST


def test_powers_of_2_are_exact(exponentials):
    x = torch.arange(-126.0, 1.0)
    assert torch.equal(exponentials(x), torch.exp2(x.double()).float())


def test_hidden_scores_have_weight_0(exponentials):
    x = torch.tensor([-127.0, -127.5, -1e4, -3e38, -math.inf])
    assert torch.equal(exponentials(x), torch.zeros(5))
    # If the exact result is between 0 and the smallest normal number, so is the computed result.
    x = -126 - torch.rand(200, generator=torch.Generator().manual_seed(0))
    y = exponentials(x)
    assert (y >= 0).all()
    assert (y <= 2.0**-126).all()
