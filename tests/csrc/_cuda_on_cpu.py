"""The kernels of csrc/cuda, built for the CPU by g++ (see shim/)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from fastbert.testing.ptx.cuda_operators import CUDA

HERE = Path(__file__).parent


def build(folder: Path) -> ctypes.CDLL:
    """Compile the kernels with g++; undefined behaviour, such as a misaligned access, traps."""
    sources = folder / "sources" / "cuda"
    shutil.copytree(CUDA, sources, ignore=shutil.ignore_patterns("*.cpp"))
    for header in ("activations.h", "normal_tail.h"):
        shutil.copy(CUDA.parent / header, sources.parent)
    shutil.copy(HERE / "shim" / "launch.cuh", sources)
    library = folder / "libkernels.so"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-o", library]
    command += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command += ["-Wno-unknown-pragmas", "-I", HERE / "shim", "-I", sources, "-x", "c++"]
    command += [*sorted(sources.glob("*.cu")), HERE / "shim" / "shim.cpp"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))
