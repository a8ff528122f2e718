"""On a machine without a GPU, nvcc compiles the CUDA kernels, and g++ compiles cuda_ops.cpp."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _machine_code
import pytest
import torch
from _nvcc import require_nvcc
from quick_cases import long_case
from torch.utils.cpp_extension import CUDA_HOME, include_paths

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import functions, loops, read
from fastbert.testing.ptx import nvcc

ROOT = Path(__file__).parents[2]
# test_attention_code.py compiles the sources of attention for all GPUs.
SOURCES = sorted(set((ROOT / "csrc" / "cuda").rglob("*.cu")) - set(_machine_code.SOURCES))
# setup.py builds for these architectures; "90a" adds instructions that only Hopper GPUs have.
ARCHITECTURES = ("80", "90a", long_case("100"))


def toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit, or None if there is no toolkit."""
    nvcc = shutil.which("nvcc")
    candidates = [CUDA_HOME, "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    return next((Path(c) for c in candidates if c and Path(c, "bin", "nvcc").exists()), None)


TOOLKIT = toolkit()
needs_toolkit = pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit (nvcc) on this machine")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request, tmp_path_factory):
    """Return the architecture, and for each source its machine code and the report of ptxas."""
    require_nvcc()
    folder = tmp_path_factory.mktemp("objects")
    with ThreadPoolExecutor(2) as pool:
        binaries = pool.map(lambda source: nvcc.assembled(source, folder, request.param), SOURCES)
        return request.param, dict(zip(SOURCES, binaries, strict=True))


@pytest.mark.every_case
def test_kernels_compile_without_spills(compiled):
    arch, assembled = compiled
    for source, (_, report) in assembled.items():
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
        print(f"{source.name} sm_{arch}: {len(registers)} kernels, registers {sorted(registers)}")
        assert registers or source.name in ("tensor_map.cu", "choice.cu")
        assert len(usage) == len(registers)
        assert set(usage) <= {("0", "0")}, (source.name, arch, report)
        # A message of ptxas with a number C75.. says that ptxas serialises wgmma or ignores
        # setmaxnreg. Only C7519 is harmless: ptxas adds a fence before a product.
        assert set(re.findall(r"\(C75\d\d\)", report)) <= {"(C7519)"}, (source.name, arch, report)


LAYER_NORM = re.compile(
    r"(forward|backward)_kernelI.*LayoutI(f|6__half|13__nv_bfloat16)Li\d+ELi\d+ELi(\d+)ELb1E"
)


# The loop over rows on sm_90a has at most these numbers of instructions, by direction and by
# elements per thread. The loops for 16-bit dtypes and for fp32 differ by less than 60 instructions.
LOOP_LIMITS = {
    ("forward", 16): 490, ("forward", 24): 660, ("forward", 32): 860,
    ("backward", 16): 690, ("backward", 24): 950,
}  # fmt: skip


@pytest.mark.every_case
def test_layer_norm_copies_a_row_ahead_of_the_one_that_it_computes(compiled):
    """The loop issues the copies of the next row before it computes, so memory is never idle."""
    pytest.importorskip("triton", reason="its wheel has cuobjdump")
    arch, assembled = compiled
    code = cuobjdump("--dump-sass", assembled[ROOT / "csrc" / "cuda" / "layer_norm.cu"][0])
    seen = 0
    for function, text in functions(code).items():
        kernel = LAYER_NORM.search(function)
        if kernel is None:
            continue
        seen += 1
        direction, dtype, elements = kernel.groups()
        rows = [body for body in loops(read(text)) if {"LDGSTS", "SHFL"} <= {x.name for x in body}]
        body = min(rows, key=len)
        names = [x.name for x in body]
        # The loop reads x and the residual once. In the backward, it also reads dy once.
        vectors = int(elements) // (4 if dtype == "f" else 8)
        assert names.count("LDGSTS") == vectors * (2 if direction == "forward" else 3), function
        assert names.index("SHFL") > max(i for i, name in enumerate(names) if name == "LDGSTS")
        # Only the backward loads to registers, namely the two statistics of the next row.
        assert names.count("LDG") == (0 if direction == "forward" else 2), function
        # All lanes take part in a reduction. If nvcc cannot prove this, it adds code for fewer
        # lanes.
        assert "WARPSYNC" not in names, function
        print(direction, dtype, elements, len(body))
        if arch == "90a":
            assert len(body) <= LOOP_LIMITS[direction, int(elements)], function
    # A kernel exists for three dtypes, four widths of rows and two directions.
    assert seen == 24


@needs_toolkit
def test_kernels_are_free_of_torch():
    shared = [ROOT / "csrc" / name for name in ("activations.h", "normal_tail.h")]
    for path in [*(ROOT / "csrc" / "cuda").rglob("*.cu*"), *shared]:
        includes = re.findall(r"#include [<\"](.*?)[>\"]", path.read_text(encoding="utf-8"))
        assert not [i for i in includes if i.startswith(("torch/", "ATen/", "c10/"))], path.name


@needs_toolkit
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_the_file_that_meets_torch_compiles(tmp_path):
    """cuda_ops.cpp compiles; a stub replaces the generated header that torch's CPU wheel lacks."""
    stubs = [] if torch.version.cuda else ["-I", ROOT / "tests" / "csrc" / "stubs"]
    headers = [*include_paths("cpu"), str(TOOLKIT / "include")]
    command = ["g++", "-std=c++20", "-fsyntax-only", *stubs]
    command += [flag for folder in headers for flag in ("-isystem", folder)]
    command.append(ROOT / "csrc" / "cuda" / "cuda_ops.cpp")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
