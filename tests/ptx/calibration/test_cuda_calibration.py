"""Primitives of the CUDA toolkit, compiled by nvcc, give exact results on the PTX machine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from _nvcc import require_nvcc
from torch import Tensor

from fastbert.testing.ptx.cuda_library import CudaLibrary

THREADS, ITEMS = 128, 4
COUNT = THREADS * ITEMS


pytestmark = [pytest.mark.every_case, pytest.mark.parametrize("seed", range(3))]


@pytest.fixture(scope="module", params=["80", "90"])
def library(request, tmp_path_factory) -> CudaLibrary:
    require_nvcc()
    source = Path(__file__).parent / "cuda" / "primitives.cu"
    return CudaLibrary([source], tmp_path_factory.mktemp("primitives"), request.param, ["-w"])


def run(library: CudaLibrary, name: str, tensors: list[Tensor], seed: int) -> None:
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    assert library.call(f"run_{name}", *pointers, memory=tensors, seed=seed) == 0


def outputs(library: CudaLibrary, name: str, x: Tensor, size: int, seed: int) -> Tensor:
    out = torch.full((size,), -7, dtype=torch.int32)
    run(library, name, [x, out], seed)
    return out


def test_block_reductions(library, seed):
    x = torch.randint(-(2**20), 2**20, (COUNT,)).int()
    out = outputs(library, "reduce", x, 4, seed)
    assert out.tolist() == [int(x.sum())] * 3 + [int(x.max())]


def test_block_scans(library, seed):
    x = torch.randint(-(2**20), 2**20, (COUNT,)).int()
    before = (x.cumsum(0) - x).int()
    expected = torch.cat([before, before, x.cummax(0).values])
    assert torch.equal(outputs(library, "scan", x, 3 * COUNT, seed), expected)


def test_block_sorts(library, seed):
    x = torch.randint(-50, 50, (COUNT,)).int()
    ordered, places = x.sort(stable=True)
    expected = torch.cat([ordered, places.int(), ordered.flip(0)])
    assert torch.equal(outputs(library, "sort", x, 3 * COUNT, seed), expected)


def test_block_histograms(library, seed):
    x = torch.randint(0, 64, (COUNT,)).int()
    counts = torch.bincount(x, minlength=64).int()
    assert torch.equal(outputs(library, "histogram", x, 128, seed), torch.cat([counts, counts]))


def test_warp_primitives(library, seed):
    x = torch.randint(-(2**20), 2**20, (THREADS,)).int()
    out = outputs(library, "warps", x, 5 * THREADS, seed).view(5, THREADS)
    warps = x.view(-1, 32)
    assert torch.equal(out[0, ::32], warps.sum(1).int())
    assert torch.equal(out[1, ::16], x.view(-1, 16).sum(1).int())
    assert torch.equal(out[2].view(-1, 32), (warps.cumsum(1) - warps).int())
    assert torch.equal(out[3], warps.sum(1).int().repeat_interleave(32))
    assert torch.equal(out[4].view(-1, 32), warps.sort(1).values)


def test_cooperative_groups(library, seed):
    x = torch.randint(-(2**20), 2**20, (THREADS,)).int()
    out = outputs(library, "groups", x, 7 * THREADS, seed).view(7, THREADS)
    values = x.tolist()
    for t, value in enumerate(values):
        in8, in16, in32 = t % 8, t % 16, t % 32
        eight, warp = values[t - in8 : t - in8 + 8], values[t - in32 : t - in32 + 32]
        sixteen = values[t - in16 : t - in16 + 16]
        ballot = sum((v & 1) << n for n, v in enumerate(eight))
        odd = [n for n, v in enumerate(warp) if v & 1]
        expected = [
            sum(eight),
            max(warp),
            sum(sixteen[: in16 + 1]),
            sum(v for v in warp if v & 3 == value & 3),
            eight[in8 ^ 3] - sixteen[in16 + 5 if in16 + 5 < 16 else in16],
            ballot ^ sixteen[in16 - 2 if in16 >= 2 else in16],
            odd.index(in32) * 100 + len(odd) if value & 1 else -1,
        ]
        assert out[:, t].tolist() == expected, t


def test_asynchronous_copies(library, seed):
    x = torch.randint(-(2**20), 2**20, (COUNT,)).int()
    out = outputs(library, "copies", x, 2 * COUNT + THREADS, seed)
    assert torch.equal(out[:COUNT].view(ITEMS, -1), 2 * x.view(ITEMS, -1).flip(1))
    assert torch.equal(out[COUNT : 2 * COUNT], x.flip(0))
    assert torch.equal(out[2 * COUNT :].view(-1, 2), x[:THREADS].view(-1, 2).flip(1))


def test_fragments_of_wmma(library, seed):
    a, b = torch.randint(-8, 9, (16, 32)).half(), torch.randint(-8, 9, (16, 32)).half()
    c, d = torch.randint(-8, 9, (16, 16)).float(), torch.zeros(16, 16)
    run(library, "fragments", [a, b, c, d], seed)
    assert torch.equal(d, a.float() @ b.float().T + c)
