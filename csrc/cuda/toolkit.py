"""Find the headers and the library that CUDA code needs, before setup.py compiles CUDA code.

torch adds the folders next to the nvcc on PATH to every command. If that nvcc is a link to a
toolkit in another folder, or a script that starts another nvcc, there are no headers next to it.
nvcc still compiles the kernels, but the build fails at its end, in the only CUDA file that the C++
compiler compiles. Therefore this module compiles and links a small program with each set of
folders. It does not search for a list of files, because toolkits spread the headers over several
packages in different ways.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# The folders of NVIDIA's pip packages for CUDA 12. The packages for CUDA 13 share the folder cu13.
OLD_PACKAGES = ("cuda_runtime", "cuda_nvcc", "cuda_cccl")
HOST = """\
#include <cuda.h>
#include <cuda_runtime.h>
#if CUDART_VERSION / 1000 != {major}
#error these headers are not those of CUDA {major}
#endif
"""
KERNEL = """\
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
__global__ void kernel(float* x) { *x = __bfloat162float(__float2bfloat16(*x)); }
"""


class Lacking(Exception):
    """CUDA code cannot be compiled or linked; the message says what is missing or fails."""


class Toolkit(NamedTuple):
    """The folders that a build needs besides torch's, and the name of libcudart for option -l."""

    include_dirs: list[str]
    library_dirs: list[str]
    runtime: str


def find(
    cuda: str,
    nvcc: Path,
    include_dirs: list[str],
    library_dirs: list[str],
    roots: Iterable[Path],
) -> Toolkit:
    """Return the folders with which this machine compiles and links CUDA code.

    Args:
        cuda: The CUDA version of torch, such as "13.2".
        nvcc: The compiler.
        include_dirs: The folders of CUDA headers that torch adds to every command.
        library_dirs: The folders of CUDA libraries that torch adds to every command.
        roots: The folders in which NVIDIA's pip packages are installed.

    Raises:
        Lacking: If a compiler, a header or the runtime library is missing, if a compiler fails, or
            if nvcc has another major version than `cuda`.
    """
    require_release(nvcc, cuda)
    major = cuda.split(".")[0]
    packages = [root / name for root in roots for name in (f"cu{major}", *OLD_PACKAGES)]
    own_headers, own_libraries = folders_of(nvcc)
    package_headers = existing(package / "include" for package in packages)
    searched = places(include_dirs, own_headers, package_headers)
    with tempfile.TemporaryDirectory() as folder:
        # nvcc's headers come first, because the packages can be of another minor version.
        for added in ([], own_headers, own_headers + package_headers):
            error = refusal(nvcc, include_dirs + added, major, Path(folder))
            if error is None:
                break
        else:
            raise Lacking(f"{error}; folders searched: {searched}")
        for dirs, name in runtimes(own_libraries, packages, major):
            if links(library_dirs + dirs, name, Path(folder)):
                return Toolkit(added, dirs, name)
    package_libraries = existing(package / "lib" for package in packages)
    searched = places(library_dirs, own_libraries, package_libraries)
    raise Lacking(f"the linker does not find libcudart; folders searched: {searched}")


def package_roots() -> list[Path]:
    """Return the folders ``nvidia`` on Python's path, in which pip installs NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def require_release(nvcc: Path, cuda: str) -> None:
    """Raise Lacking unless nvcc runs and has the major version of torch's CUDA."""
    result = execute(nvcc, "--version")
    if result.returncode:
        raise Lacking(f"{nvcc} --version fails ({complaint(result)})")
    release = re.search(r"release (\d+)\.\d+", result.stdout)
    if release and release[1] != cuda.split(".")[0]:
        number = release[0].removeprefix("release ")
        raise Lacking(
            f"{nvcc} is of CUDA {number} and torch of CUDA {cuda}, whose major versions differ"
        )


def folders_of(nvcc: Path) -> tuple[list[str], list[str]]:
    """Return the folders of headers and of libraries that nvcc itself uses."""
    said = execute(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull).stderr
    values = re.findall(r"^#\$ (?:INCLUDES|LIBRARIES)=(.*)$", said, re.MULTILINE)
    words = [word for value in values for word in shlex.split(value)]
    headers = (Path(word[2:]).resolve() for word in words if word.startswith("-I"))
    libraries = (Path(word[2:]).resolve() for word in words if word.startswith("-L"))
    return existing(headers), existing(libraries)


def refusal(nvcc: Path, include_dirs: list[str], major: str, folder: Path) -> str | None:
    """Return why the C++ compiler or nvcc fails with `include_dirs`, or None if both succeed."""
    folders = [f"-I{path}" for path in include_dirs]
    host, kernel = folder / "host.cpp", folder / "kernel.cu"
    host.write_text(HOST.format(major=major), encoding="utf-8")
    kernel.write_text(KERNEL, encoding="utf-8")
    compiler = [*cxx(), *environment("CPPFLAGS", "CFLAGS", "FASTBERT_CXXFLAGS")]
    result = execute(*compiler, *folders, "-E", host, "-o", os.devnull)
    if result.returncode:
        return f"{compiler[0]} cannot include the headers of CUDA ({complaint(result)})"
    # torch's build makes CC the host compiler of nvcc, too.
    chosen = ["-ccbin", os.environ["CC"]] if "CC" in os.environ else []
    result = execute(nvcc, *chosen, *folders, "-c", kernel, "-o", folder / "kernel.o")
    return f"{nvcc} cannot compile a kernel ({complaint(result)})" if result.returncode else None


def runtimes(own: list[str], packages: list[Path], major: str) -> Iterator[tuple[list[str], str]]:
    """Yield pairs of folders to search and a name of libcudart for -l, the preferred pair first.

    NVIDIA's packages have no libcudart.so, which -lcudart needs. Therefore the full name of the
    file in the package is given, after a colon.
    """
    yield [], "cudart"
    yield own, "cudart"
    for package in packages:
        for path in sorted((package / "lib").glob(f"libcudart.so.{major}*")):
            yield [str(path.parent)], f":{path.name}"


def links(library_dirs: list[str], name: str, folder: Path) -> bool:
    """Return whether the linker finds the library `name` in `library_dirs` or its own folders."""
    flags = [*environment("LDFLAGS"), *(f"-L{path}" for path in library_dirs), f"-l{name}"]
    empty = ("-shared", "-x", "c++", os.devnull, "-x", "none", "-o", folder / "empty.so")
    return execute(*cxx(), *empty, *flags).returncode == 0


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def environment(*names: str) -> list[str]:
    """Return the flags in the environment variables `names`, in the order of the names."""
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def execute(*command: object) -> subprocess.CompletedProcess[str]:
    words, env = [str(word) for word in command], os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", env=env)
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]}: {error.strerror}")


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """Return the first error in the output of a compiler, or the last line if there is no error.

    If there is no output, return the exit status.
    """
    lines = (result.stdout + result.stderr).strip().splitlines()
    if not lines:
        return f"exit status {result.returncode}"
    first = next((line for line in lines if "error: " in line), lines[-1])
    return first.rpartition("error: ")[2].strip()


def existing(folders: Iterable[Path]) -> list[str]:
    return [str(folder) for folder in folders if folder.is_dir()]


def places(beside: list[str], own: list[str], packages: list[str]) -> str:
    kinds = {"beside nvcc": beside, "nvcc --dryrun": own, "packages of torch": packages}
    return ", ".join(f"{', '.join(dirs) or 'none'} ({kind})" for kind, dirs in kinds.items())
