"""CUTLASS 3 collectives for sm_90 give exact products of small integers on the PTX machine."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from fastbert.testing.ptx.cuda_library import CudaLibrary

HERE = Path(__file__).parent
# `make calibrate` installs the package in this folder.
PACKAGE = HERE.parents[2] / ".venv" / "cutlass" / "cutlass_library" / "source"
BYTES = torch.float8_e4m3fn
# File → name of the function, dtypes of A, B and D, and whether A is column-major and B row-major.
PRODUCTS = {
    "pingpong": [("pingpong_half", torch.float16, torch.float16, torch.float16, False)],
    "cooperative": [
        ("cooperative_brain", torch.bfloat16, torch.bfloat16, torch.bfloat16, True),
    ],
    "clusters": [
        ("cluster_of_rows", torch.float16, torch.float16, torch.float16, False),
        ("cluster_of_rows_and_columns", torch.float16, torch.float16, torch.float16, False),
    ],
    "others": [
        ("specialized_tf32", torch.float32, torch.float32, torch.float32, False),
        ("specialized_tf32_other_majors", torch.float32, torch.float32, torch.float32, True),
        ("specialized_int8", torch.int8, torch.int8, torch.int32, False),
        ("specialized_fp8", BYTES, torch.float8_e5m2, torch.float16, False),
    ],
}


@pytest.fixture(scope="module", params=PRODUCTS)
def compiled(request, tmp_path_factory):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    if not PACKAGE.exists():
        pytest.skip("the headers of nvidia-cutlass are not installed; make calibrate installs them")
    flags = ["-w", "-DNDEBUG", "--expt-relaxed-constexpr"]
    flags += [f"-I{PACKAGE}/{folder}" for folder in ("include", "tools/util/include")]
    source = HERE / "cutlass" / f"{request.param}.cu"
    library = CudaLibrary([source], tmp_path_factory.mktemp(request.param), "90a", flags)
    return library, PRODUCTS[request.param]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_collective(compiled, seed):
    library, products = compiled
    m, n, k = 200, 264, 208
    for name, type_a, type_b, type_d, other_majors in products:
        a, b = (torch.randint(-3, 4, (rows, k)) for rows in (m, n))
        c = torch.randint(-3, 4, (m, n))
        kept = [a.T if other_majors else a, b.T if other_majors else b, c]
        types = (type_a, type_b, type_d)
        memory = [t.contiguous().to(kind) for t, kind in zip(kept, types, strict=True)]
        memory.append(torch.full((m, n), 99).to(type_d))
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in memory]
        assert library.call(name, *pointers, m, n, k, 4, memory=memory, seed=seed) == 0
        assert torch.equal(memory[3], (a @ b.T + c).to(type_d)), name
