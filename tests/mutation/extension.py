"""Build the extensions for mutate.py: first without a fault, and then one source with a fault.

The flags are those of setup.py, but without CUDA and with -O1 instead of -O3, so that a source
compiles in seconds. The objects stay in build/mutation, where ninja updates them. The extensions
are fastbert._C and ptxmachine._machine.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path("build", "mutation")  # ninja runs in ROOT, so the path is relative
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MACHINE = "ptxmachine/csrc"


def compiler() -> str:
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    return os.environ.get("CXX") or (compilers[0] if compilers else "c++")


def compile_command() -> list[str]:
    flags = runpy.run_path(str(ROOT / "setup.py"))["CXX_FLAGS"]
    flags = ["-O1" if flag == "-O3" else flag for flag in flags]
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags += [part for path in headers for part in ("-isystem", path)]
    flags += ["-std=c++17", "-fPIC", "-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    return [*shlex.split(compiler()), *flags, *openmp()]


def link_command(objects: list[str], library: str) -> list[str]:
    paths = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    # If two objects define a function, the linker uses the first definition, which has the fault.
    flags = ["-shared", "-Wl,-z,muldefs", *openmp()]
    torch_libraries = [] if Path(library).name.startswith("_machine") else [*paths, *libraries]
    return [*shlex.split(compiler()), *flags, *objects, *torch_libraries, "-o", library]


def openmp() -> list[str]:
    return ["-fopenmp"] if sys.platform == "linux" else []


def machine_sources() -> list[str]:
    """Return the source files of ptxmachine._machine."""
    return _under(MACHINE)


def sources() -> list[str]:
    """Return the source files of fastbert._C."""
    own = ["csrc/bindings.cpp", "csrc/unchanged.cpp"]
    return [*own, *_under("csrc/cpu")]


def _under(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{folder}/**/*.cpp"))


def object_of(source: str) -> Path:
    return BUILD / f"{'-'.join(Path(source).with_suffix('').parts)}.o"


def compile_all(names: list[str], workers: int) -> None:
    """Compile sources without a fault, except sources whose objects are up to date."""
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    rules = [
        f"builddir = {BUILD}",
        "rule compile",
        f"  command = {shlex.join(compile_command())} -MD -MF $out.d -c $in -o $out",
        "  description = $out",
        "  depfile = $out.d",
        "  deps = gcc",
        *(f"build {object_of(source)}: compile {source}" for source in names),
    ]
    file = BUILD / "build.ninja"
    (ROOT / file).write_text("\n".join(rules) + "\n", encoding="utf-8")
    ninja = [sys.executable, "-m", "ninja", "-f", str(file), "-j", str(workers)]
    subprocess.run(ninja, cwd=ROOT, check=True)


class Unit(NamedTuple):
    """A source to compile with a fault; the source of a level includes only one kernel header."""

    source: str
    kernels: str = ""

    @property
    def linked(self) -> list[str]:
        """Return the sources of the extension that contains the unit."""
        return machine_sources() if self.source.startswith(MACHINE) else sources()

    @property
    def library(self) -> str:
        """Return the path, relative to a tree, of the extension that contains the unit."""
        machine = self.source.startswith(MACHINE)
        return ("ptxmachine/src/ptxmachine/_machine" if machine else "fastbert/_C") + SUFFIX


def text_of(tree: Path, unit: Unit) -> str:
    """Return the source of a unit in the copy `tree` of the repository.

    The source of an instruction-set level includes only the header ``kernels``, and references the
    functions of the kernel table that this header defines.
    """
    folder = tree / "csrc" / "cpu"
    text = (tree / unit.source).read_text(encoding="utf-8")
    if not unit.kernels:
        return text
    header = (folder / unit.kernels).read_text(encoding="utf-8")
    table = re.findall(
        r"^    (?:base::)?(\w+),$", (folder / "isa" / "level.h").read_text(encoding="utf-8"), re.M
    )
    kept = [name for name in dict.fromkeys(table) if re.search(rf"^[\w ]+ {name}\(", header, re.M)]
    functions = ", ".join(f"(const void*){name}" for name in kept)
    lines = [
        '#include "dispatch.h"',
        f'#include "../{unit.kernels}"',
        "namespace fastbert::cpu::FASTBERT_LEVEL {",
    ]
    lines += [f"extern const void* const kKept[] = {{{functions}}};", "}"]
    return text.replace('#include "level.h"', "\n".join(lines))


def compile_unit(tree: Path, unit: Unit) -> Path:
    """Compile ``unit`` in ``tree`` and return the path of the object.

    Raises:
        RuntimeError: If the unit does not compile.
    """
    source, compiled = Path(unit.source).with_name("unit.cpp"), tree / "unit.o"
    (tree / source).write_text(text_of(tree, unit), encoding="utf-8")
    command = [*compile_command(), "-c", str(source), "-o", str(compiled)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{unit.source} does not compile:\n{run.stderr}")
    return compiled


def link_unit(compiled: Path, unit: Unit, library: Path) -> None:
    """Link an object of `compile_unit`, followed by the other objects of `compile_all`.

    Raises:
        RuntimeError: If a function is missing, because a test would then fail even without a fault.
    """
    names = [name for name in unit.linked if unit.kernels or name != unit.source]
    others = [str(ROOT / object_of(name)) for name in names]
    library.unlink(missing_ok=True)
    subprocess.run(link_command([str(compiled), *others], str(library)), check=True)
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    missing = [line for line in symbols.splitlines() if re.search(" (fastbert|ptxmachine)::", line)]
    if missing:
        raise RuntimeError(f"{unit.source}: missing after linking: {missing}")
