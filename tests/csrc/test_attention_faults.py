"""The PTX machine catches mistakes that tests insert into the attention kernels for sm_80."""

from __future__ import annotations

from ctypes import byref

import pytest
import torch
from _attention_faults import FAULTS
from _broken_ptx import LONGEST, kernel_in, outcome, replaced
from _nvcc import require_nvcc
from quick_cases import first_of_each

from fastbert.testing.ptx.cuda_attention import AttentionOperators
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA

# nvcc needs a minute to compile these kernels for sm_80.
pytestmark = pytest.mark.every_case

FRONT = """
#include "attention.cuh"
using namespace fastbert::cuda;
extern "C" {
int run_attention_forward(AttentionForward* p) { return attention_forward(*p, nullptr); }
int run_attention_backward(AttentionBackward* p) { return attention_backward(*p, nullptr); }
int64_t attention_forward_pair_words(AttentionForward* p) { return attention_pair_words(*p); }
int64_t attention_backward_pair_words(AttentionBackward* p) { return attention_pair_words(*p); }
}
"""
# These bf16 kernels of head dim 64 have a mask of keys, or dropout and a mask of (query, key)
# pairs.
VARIANTS = {"": "bfloat16Li64ELb0ELb0E", "pairs": "bfloat16Li64ELb1ELb1E"}
SEED = torch.tensor([7])


class Attention(AttentionOperators):
    """The attention kernels, called like ``torch.ops.fastbert_C.flash_attention_*``."""

    def __init__(self, folder):
        front = folder / "front.cu"
        front.write_text(FRONT)
        sources = [CUDA / f"attention_{name}.cu" for name in ("forward", "backward")]
        # The launcher first looks for a kernel for Hopper GPUs, so it needs the sources of these
        # kernels.
        hopper = sorted((CUDA / "hopper").glob("*.cu"))
        flags = ["-I", str(CUDA)]
        self.compiled = CudaLibrary([*sources, *hopper, front], folder, "80", flags)
        self.options = {}
        self.folder = folder
        super().__init__(self.compiled.functions)

    def _call(self, name, params):
        return self.compiled.call(name, byref(params), memory=self.tensors, **self.options)

    def ptx(self, kernel):
        """Return the PTX of the kernel with the name `kernel` in `FAULTS`."""
        name, _, variant = kernel.partition(" ")
        [path] = self.folder.glob(f"cuda-attention_{name}-80/*.ptx")
        return kernel_in(path, VARIANTS[variant])


class Problems:
    """Inputs of small calls whose results every inserted mistake changes, and the right results."""

    def __init__(self, attention):
        self.attention = attention
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape):
            return torch.randn(shape, generator=generator).bfloat16()

        # With five tiles of keys, the ring of three stages reuses stages. The backward has two
        # blocks of keys. The mask hides all keys of the first tile, and hidden keys are NaN.
        self.queries, self.keys, self.values = drawn(1, 1, 70, 64), *drawn(2, 1, 1, 140, 64)
        self.queries[..., :16] *= 3
        self.dout = drawn(1, 1, 70, 64)
        self.mask = torch.rand(1, 1, 1, 140, generator=generator) > 0.3
        self.mask[..., :34] = False
        self.pairs = self.mask & (torch.rand(1, 1, 70, 140, generator=generator) > 0.3)
        for x in (self.keys, self.values):
            x.masked_fill_(~self.mask.transpose(2, 3), torch.nan)
        # A sequence has part of a tile, no row, or one row. The score of one of the single rows is
        # far below 0. Rows that belong to no sequence are NaN.
        self.starts = torch.tensor([0, 20, 20, 21, 22, 57], dtype=torch.int32)
        self.packed = drawn(4, 66, 1, 64)
        self.packed[0, 20], self.packed[1, 20] = 1.0, -20.0
        self.packed[:, 57:] = torch.nan
        self.single = drawn(2, 1, 1, 1, 64)
        self.expected = {name: self.run(name, seed=1) for name in FAULTS}

    def run(self, kernel, seed):
        """Return the results of one kernel for all inputs; `seed` sets the order of its warps."""
        self.attention.options = {"seed": seed, "limit": LONGEST, "threads": 1}
        name, _, variant = kernel.partition(" ")
        options = (self.mask, None, None, None, 70, 140, 0.0, 0.125)
        if variant:
            options = (self.pairs, None, None, SEED, 70, 140, 0.2, 0.125)
        problems = self.one(name, (self.queries, self.keys, self.values, self.dout), options)
        if not variant:
            options = (None, self.starts, self.starts, None, 37, 37, 0.0, 0.125)
            problems += self.one(name, self.packed.unbind(), options)
            # The softmax of a single key is constant, so the score of this key has the gradient 0.
            tensors = (self.queries, *self.single, self.dout)
            options = (None, None, None, None, 70, 1, 0.0, 0.125)
            problems += self.one(name, tensors, options)
            # Without queries, a block continues with its next block of keys without any product.
            keys = torch.ones(1, 1, 300, 64, dtype=torch.bfloat16)
            options = (None, None, None, None, 0, 300, 0.0, 0.125)
            problems += self.one(name, (keys[:, :, :0], keys, keys, keys[:, :, :0]), options)
        return problems

    def one(self, name, tensors, options):
        *inputs, dout = tensors
        if name == "forward":
            return self.attention.flash_attention_forward(*inputs, *options)
        # The results of the forward are right, because the inserted mistake is in the backward.
        out, lse = self.attention.flash_attention_forward(*inputs, *options)
        gradients = [torch.full_like(x, torch.nan) for x in inputs]
        self.attention.flash_attention_backward(*gradients, dout, *inputs, out, lse, *options)
        return tuple(gradients)

    def outcome(self, kernel, fault):
        """Return the kind of error that `fault` causes in `kernel`, or "" if results are right."""
        with replaced(self.attention.compiled, fault.broken(self.attention.ptx(kernel))):
            return outcome(lambda seed: self.run(kernel, seed), self.expected[kernel], seeds=3)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    require_nvcc()
    return Problems(Attention(tmp_path_factory.mktemp("attention")))


def test_without_a_fault(problems):
    for kernel, expected in problems.expected.items():
        assert not any(x.isnan().any() for x in expected), kernel
        for seed in range(3):
            assert all(map(torch.equal, problems.run(kernel, seed), expected)), kernel


@pytest.mark.parametrize(
    ("kernel", "fault"),
    first_of_each(
        [(kernel, fault) for kernel, faults in FAULTS.items() for fault in faults],
        lambda kernel, fault: kernel,
        lambda kernel, fault: f"{kernel}-{fault.name}",
    ),
)
def test_a_fault_is_caught(problems, kernel, fault):
    assert problems.outcome(kernel, fault)
