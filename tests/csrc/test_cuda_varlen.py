"""The CUDA kernel that finds the indices of real tokens is right on the PTX machine."""

from __future__ import annotations

from ctypes import byref
from pathlib import Path
from typing import Any

import pytest
import torch
from _broken_ptx import Fault, kernel_in, replaced
from _nvcc import require_nvcc
from quick_cases import long_case
from torch import Tensor

from fastbert import reference
from fastbert.ops import varlen
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.cuda_operators import CUDA, Operators, serving_cuda
from ptxmachine import PtxFault

FRONT = """
#include "varlen.cuh"
using namespace fastbert::cuda;
extern "C" int run_mask_places(MaskPlaces* p) { return mask_places(*p, nullptr); }
"""


class Places(Operators):
    """The single operator ``mask_places``, compiled by nvcc."""

    def __init__(self, folder: Path, arch: int) -> None:
        front = folder / "front.cu"
        front.write_text(FRONT, encoding="utf-8")
        sources = [CUDA / "varlen.cu", front]
        self.compiled = CudaLibrary(sources, folder, str(arch), ["-I", str(CUDA)])
        [self.ptx] = folder.glob("*-varlen-*/*.ptx")
        self.options: dict[str, Any] = {}
        super().__init__(self.compiled.functions)

    def _call(self, name: str, params: Any) -> int:
        return self.compiled.call(name, byref(params), memory=self.tensors, **self.options)


@pytest.fixture(scope="module", params=[long_case(80, id="sm_80"), pytest.param(90, id="sm_90")])
def places(request, tmp_path_factory):
    require_nvcc()
    return Places(tmp_path_factory.mktemp("varlen"), request.param)


def drawn(batch: int, length: int, dtype: torch.dtype = torch.bool, share: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    mask = torch.rand(batch, length, generator=generator) < share
    # A mask of integers marks a real token by any value other than 0, here by the smallest integer.
    return mask if dtype == torch.bool else mask.to(dtype) * torch.iinfo(dtype).min


def check(places: Places, mask: Tensor) -> None:
    """Check the operator, with and without indices of padding, against the reference."""
    expected = reference.unpad(mask, mask)
    tokens = expected.indices.shape[0]
    padding = (mask.reshape(-1) == 0).nonzero().flatten()
    for with_padding in (False, True):
        indices, rows, cu_seqlens, totals = places.mask_places(mask, with_padding)
        assert totals.tolist() == [tokens, expected.max_seqlen]
        assert torch.equal(cu_seqlens, expected.cu_seqlens)
        assert torch.equal(indices[:tokens], expected.indices)
        if with_padding:
            assert torch.equal(indices[tokens:], padding)
            assert torch.equal(indices[rows], torch.arange(mask.numel()))
        else:
            assert (indices[tokens:] == -(1 << 30)).all()


# The kernel has 512 threads in a block, and at most 16 blocks in a grid.
@pytest.mark.parametrize(
    ("batch", "length"), [(1, 1), (1, 513), (3, 7), (16, 33), (17, 1), (33, 40), (2, 700)]
)
def test_any_shape(places, batch, length):
    check(places, drawn(batch, length))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers(places, dtype):
    check(places, drawn(5, 67, dtype))


def test_sequences_without_tokens(places):
    mask = drawn(7, 40)
    mask[[0, 3, 6]] = False
    check(places, mask)
    check(places, torch.zeros(3, 5, dtype=torch.bool))
    check(places, torch.ones(3, 5, dtype=torch.bool))


def test_any_strides(places):
    whole = drawn(40, 33, torch.int64)
    for mask in (whole.t(), whole[::3, 1::2], whole[:1].expand(4, 33), whole[:, :1].expand(40, 9)):
        check(places, mask)


def test_any_order_of_warps(places):
    try:
        for seed in range(6):
            places.options = {"seed": seed}
            check(places, drawn(18, 70))
    finally:
        places.options = {}


BARRIER = r"bar\.sync\s+0;"
BALLOT = r"vote\.sync\.ballot\.b32 (\s*%r\d+), [^;]*;"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("no barrier after the counts", BARRIER, "", (0,)),
        Fault("no barrier in a turn", BARRIER, "", (1,)),
        Fault("a sum is a maximum", r"redux\.sync\.add\.s32", "redux.sync.max.s32"),
        Fault("a ballot of one lane", BALLOT, r"mov.u32 \1, 1;"),
    ],
    ids=lambda fault: fault.name,
)
def test_a_fault_is_found(places, fault):
    broken = fault.broken(kernel_in(places.ptx, "kernelIh"))
    with replaced(places.compiled, broken), pytest.raises((AssertionError, PtxFault)):
        check(places, drawn(3, 600))


def test_a_bad_shape_is_refused(places):
    with pytest.raises(RuntimeError, match="run_mask_places: the launcher returned"):
        places.mask_places(torch.zeros(2, 0, dtype=torch.bool), False)


def test_unpad_takes_the_kernel(places, monkeypatch):
    """`unpad` uses the CUDA kernel if the CPU operator, which is the first choice, is disabled."""
    monkeypatch.setattr(varlen, "_by_extension", lambda index: False)
    for mask in (drawn(4, 9), drawn(4, 9, torch.int64), drawn(4, 9).float(), drawn(4, 9)[:, :0]):
        before = len(places.compiled.reports)
        with serving_cuda(places):
            indices, cu_seqlens, longest = varlen.unpad_indices(mask)
        expected = reference.unpad(mask, mask)
        assert torch.equal(indices, expected.indices)
        assert torch.equal(cu_seqlens, expected.cu_seqlens)
        assert longest == expected.max_seqlen
        assert len(places.compiled.reports) - before == (mask.numel() > 0)


def test_tokens_first_is_the_same_with_and_without_the_kernel(places):
    for mask in (drawn(5, 13), torch.zeros(2, 3, dtype=torch.bool)):
        expected = varlen.tokens_first(mask)
        with serving_cuda(places):
            got = varlen.tokens_first(mask)
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
