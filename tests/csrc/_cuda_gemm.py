"""Linear layers with GELU in the epilogue, run on the PTX machine with original or changed PTX."""

from __future__ import annotations

import torch
from _broken_ptx import kernel_in
from _nvcc import require_nvcc

from fastbert import reference
from fastbert.testing.ptx.cuda_gemm import GemmOperators
from fastbert.testing.yardstick import Yardstick

# The names of the matrix product kernels, by architecture (80 is sm_80, 90 is sm_90a).
KERNELS = {80: "gemm_kernel", 90: "persistent_gemm_kernel"}
FILES = {80: "cuda-gemm-80", 90: "hopper-gemm-90a"}


def compiled_in(folder, arch: int) -> Breakable:
    """Return the compiled kernels, or skip the test if nvcc is missing."""
    require_nvcc()
    return Breakable(folder, arch)


class Breakable(GemmOperators):
    """The product kernels, and the PTX that nvcc made of them."""

    def __init__(self, folder, arch: int) -> None:
        self.folder, self.arch = folder, arch
        super().__init__(folder, arch)

    def ptx(self, *parts: str) -> str:
        """Return the PTX of the only kernel whose mangled name contains all `parts`."""
        [path] = self.folder.glob(f"{FILES[self.arch]}/*.ptx")
        return kernel_in(path, *parts)


class Problem:
    """Inputs of a forward and a backward product, whose results kernels or PyTorch compute.

    x and dy have the shape (rows, depth). All results but dbias have the shape (rows, columns).
    """

    def __init__(self, rows, depth, columns, dtype, activation="gelu", with_bias=True, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=generator)).to(dtype)

        self.dtype, self.activation = dtype, activation
        self.x, self.dy = drawn(rows, depth), drawn(rows, depth)
        self.weight = drawn(columns, depth, scale=depth**-0.5)
        self.w2 = drawn(depth, columns, scale=depth**-0.5)
        self.bias = drawn(columns) if with_bias else None

    def run(self, operators):
        """Return y, the pre-activation h, dh, dbias, and the backward's activation a."""
        y, h = operators.linear_gelu_forward(self.x, self.weight, self.bias, self.activation, True)
        return y, h, *self.backward(operators, h)

    def backward(self, operators, h):
        return operators.linear_gelu_gradient(self.dy, self.w2, h, self.activation, True)

    def solved(self, dtype, saved=None):
        """Return PyTorch's results in `dtype`.

        The backward takes the pre-activation from `saved`, or from the forward if `saved` is None.
        """
        x, weight, dy, w2 = (t.to(dtype) for t in (self.x, self.weight, self.dy, self.w2))
        bias = None if self.bias is None else self.bias.to(dtype)
        h = torch.nn.functional.linear(x, weight, bias)
        y = reference.activate(h, self.activation)
        at = (h if saved is None else saved.to(dtype)).detach().requires_grad_()
        a = reference.activate(at, self.activation)
        (dh,) = torch.autograd.grad(a, at, dy @ w2)
        return y, h, dh, dh.sum(0), a.detach()

    def oracle(self, saved):
        return self.solved(torch.float64, saved)

    def yardstick(self, saved):
        return Yardstick(lambda: list(self.solved(self.dtype, saved)))
