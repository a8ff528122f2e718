"""Compile the levels with 64-byte registers or tiles for a processor that has neither.

The compiler splits the vectors of ``csrc/cpu`` for narrower registers. With ``FASTBERT_EMULATE``
defined, standard C++ replaces the intrinsics of 64 bytes and the tile instructions. Every machine
with AVX2 can therefore test these levels, slowly, with the same results as on a processor that has
them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import _table

ISA = Path(__file__).parents[1] / "csrc" / "cpu" / "isa"
LEVELS = ("avx512", "avx512_bf16", "amx")
FLAGS = ("-std=c++17", "-O1", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wno-psabi")
TARGET = ("-mavx2", "-mfma", "-mf16c", "-DFASTBERT_EMULATE")


def lacking(extension) -> str | None:
    """Return the reason why this machine cannot emulate the levels, or None."""
    if "avx2" not in extension.build_info()["cpu_isas_supported"]:
        return "emulation needs AVX2"
    if shutil.which("g++") is None:
        return "emulation needs g++"
    reason = _table.lacking(extension)
    return reason and f"emulation needs {reason}"


def compile_library(folder: Path, levels: list[str]) -> Path:
    """Return the library of this test session; the first process builds it, the others wait."""
    library = folder / "emulated.so"
    with open(folder / "emulated.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        # The other levels share kernels with the level avx512, so this level is always built.
        levels = sorted({"avx512", *levels})
        objects = [folder / f"{level}.o" for level in levels]
        compilers = [
            subprocess.Popen(
                ["g++", *FLAGS, *TARGET, "-c", "-o", out, ISA / f"level_{level}.cpp"],
                stderr=subprocess.PIPE,
                text=True,
            )
            for level, out in zip(levels, objects, strict=True)
        ]
        for compiler in compilers:
            messages = compiler.communicate()[1]
            assert compiler.returncode == 0, messages
        unfinished = library.with_suffix(".unfinished")
        subprocess.run(["g++", "-shared", "-Wl,-Bsymbolic", "-o", unfinished, *objects], check=True)
        os.rename(unfinished, library)
    return library


class Emulated:
    """The kernel tables in a library from `compile_library`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.symbols = _table.symbols(str(library))

    def use(self, extension, level: str) -> None:
        symbol = _table.of(level)
        address = ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))
        _table.use(extension, address, self.symbols[symbol][1])
