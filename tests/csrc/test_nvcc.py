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


@needs_toolkit
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda source: compile_kernels(source, arch, tmp_path), SOURCES)
    for source, report in zip(SOURCES, reports, strict=True):
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
        print(f"{source.name} sm_{arch}: {len(registers)} kernels, registers {sorted(registers)}")
        assert registers or source.name in ("tensor_map.cu", "choice.cu")
        assert len(usage) == len(registers)
        assert set(usage) <= {("0", "0")}, (source.name, arch, report)
        # ptxas says in such messages that it serialises wgmma, or ignores setmaxnreg.
        assert "(C75" not in report, (source.name, arch, report)


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
