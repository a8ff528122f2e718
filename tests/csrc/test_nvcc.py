"""The CUDA sources without a GPU: nvcc compiles the kernels, and g++ compiles cuda_ops.cpp."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _machine_code
import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths

from fastbert.testing.ahead_of_time import cuobjdump
from fastbert.testing.machine_code import Instruction, functions, loops, read

ROOT = Path(__file__).parents[2]
# test_attention_code.py compiles the sources of attention for all GPUs.
SOURCES = sorted(set((ROOT / "csrc" / "cuda").rglob("*.cu")) - set(_machine_code.SOURCES))
# As in setup.py; "90a" is 90 with the instructions of Hopper alone.
ARCHITECTURES = ("80", "90a", pytest.param("100", marks=pytest.mark.every_case))


def toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit, or None."""
    nvcc = shutil.which("nvcc")
    candidates = [CUDA_HOME, "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    return next((Path(c) for c in candidates if c and Path(c, "bin", "nvcc").exists()), None)


TOOLKIT = toolkit()
needs_toolkit = pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit (nvcc) on this machine")


def compile_kernels(source: Path, architecture: str, folder: Path) -> str:
    command = [
        *(TOOLKIT / "bin" / "nvcc", "-c", "-O3", "-std=c++17", "-Xptxas", "-v"),
        *("-gencode", f"arch=compute_{architecture},code=sm_{architecture}", source),
        *("-o", folder / f"{source.parent.name}_{source.stem}_{architecture}.o"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request, tmp_path_factory):
    """The architecture, the folder of the objects, and the report of ptxas on each source."""
    if TOOLKIT is None:
        pytest.skip("no CUDA toolkit (nvcc) on this machine")
    folder = tmp_path_factory.mktemp("objects")
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda source: compile_kernels(source, request.param, folder), SOURCES)
        return request.param, folder, list(found)


def test_kernels_compile_without_spills(compiled):
    arch, _, reports = compiled
    for source, report in zip(SOURCES, reports, strict=True):
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
        print(f"{source.name} sm_{arch}: {len(registers)} kernels, registers {sorted(registers)}")
        assert registers or source.name in ("tensor_map.cu", "choice.cu")
        assert len(usage) == len(registers)
        assert set(usage) <= {("0", "0")}, (source.name, arch, report)
        # ptxas says in such messages that it serialises wgmma, or ignores setmaxnreg. C7519 only
        # says that it adds a fence before a product.
        assert set(re.findall(r"\(C75\d\d\)", report)) <= {"(C7519)"}, (source.name, arch, report)


LAYER_NORM = re.compile(
    r"(forward|backward)_kernelI.*LayoutI(f|6__half|13__nv_bfloat16)Li\d+ELi\d+ELi(\d+)ELb1E"
)


def test_layer_norm_loads_its_next_row_before_it_reduces_the_present_one(compiled):
    """A kernel that waits for its next row at once leaves memory idle while it computes.

    nvcc did that to rows of 16 bits that were kept as elements: the elements were taken apart in
    front of the first reduction.
    """
    pytest.importorskip("triton", reason="its wheel has cuobjdump")
    arch, folder, _ = compiled
    code = cuobjdump("--dump-sass", folder / f"cuda_layer_norm_{arch}.o")
    seen = 0
    for function, text in functions(code).items():
        kernel = LAYER_NORM.search(function)
        if kernel is None:
            continue
        seen += 1
        direction, dtype, elements = kernel.groups()
        rows = [body for body in loops(read(text)) if {"LDG", "SHFL"} <= {x.name for x in body}]
        body = min(rows, key=len)
        loads = [i for i, x in enumerate(body) if x.name == "LDG" and "128" in x.modifiers]
        reductions = [i for i, x in enumerate(body) if x.name == "SHFL"]
        # x and the residual, and dy in the backward, are read once.
        vectors = int(elements) // (4 if dtype == "f" else 8)
        assert len(loads) == vectors * (2 if direction == "forward" else 3), function
        assert max(loads) < reductions[0], function
        for i in loads:
            first = int(body[i].operands[0].removeprefix("R"))
            loaded = {f"R{first + n}" for n in range(4)}
            for other in body[i + 1 : reductions[-1]]:
                assert not loaded & registers_read(other), (function, body[i].text, other.text)
    # Three formats, and four widths of rows in both directions.
    assert seen == 24


def registers_read(instruction: Instruction) -> set[str]:
    """Return the registers that an instruction names as sources, of addresses too."""
    stores = instruction.name.startswith("ST")
    sources = instruction.operands if stores else instruction.operands[1:]
    return {name for operand in sources for name in re.findall(r"\bR\d+\b", operand)}


@needs_toolkit
def test_kernels_are_free_of_torch():
    shared = [ROOT / "csrc" / name for name in ("activations.h", "normal_tail.h")]
    for path in [*(ROOT / "csrc" / "cuda").rglob("*.cu*"), *shared]:
        includes = re.findall(r"#include [<\"](.*?)[>\"]", path.read_text())
        assert not [i for i in includes if i.startswith(("torch/", "ATen/", "c10/"))], path.name


@needs_toolkit
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_the_file_that_meets_torch_compiles(tmp_path):
    """torch's CPU wheel lacks one generated header; a stub in stubs/ replaces it."""
    stubs = [] if torch.version.cuda else ["-I", ROOT / "tests" / "csrc" / "stubs"]
    headers = [*include_paths("cpu"), str(TOOLKIT / "include")]
    command = ["g++", "-std=c++20", "-fsyntax-only", *stubs]
    command += [flag for folder in headers for flag in ("-isystem", folder)]
    command.append(ROOT / "csrc" / "cuda" / "cuda_ops.cpp")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
