"""Build fastbert._C, the only part of the package that needs a compiler; see pyproject.toml.

FASTBERT_CUDA=0|1 excludes or requires CUDA code, and TORCH_CUDA_ARCH_LIST sets its architectures.
FASTBERT_CXXFLAGS adds flags for the C++ compiler after all others.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"fastbert: torch cannot be imported in the environment that builds the package ({error}). "
        "Install torch first, then fastbert with: pip install --no-build-isolation ."
    )

CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wno-maybe-uninitialized"]  # The AVX-512 header of GCC 12 causes this warning.
# CUDA toolkits before 12.8 do not know compute capability 10.0.
# The instructions of Hopper alone exist in code for 9.0a, which runs on 9.0 and on no other GPU.
ARCHITECTURES = "8.0;9.0a;10.0+PTX"
ARCHITECTURES_BEFORE_12_8 = "8.0+PTX;9.0a"


def wants_cuda() -> bool:
    """Return whether to compile CUDA code; this needs a CUDA torch and a toolkit, but no GPU."""
    request = os.environ.get("FASTBERT_CUDA", "")
    if request not in ("", "0", "1"):
        sys.exit(f"fastbert: FASTBERT_CUDA: got {request!r}, allowed: 0, 1 or unset")
    lacking = None
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} is not a CUDA build"
    elif not cpp_extension.CUDA_HOME or not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists():
        lacking = "no CUDA toolkit was found (nvcc on PATH, or CUDA_HOME)"
    if request == "1" and lacking:
        sys.exit(f"fastbert: FASTBERT_CUDA=1, but {lacking}")
    return request != "0" and lacking is None


def extension() -> Extension:
    # The slowest sources come first, so that no core is idle at the end.
    sources = [*sorted(glob("csrc/cpu/isa/level_*.cpp"), reverse=True), *sorted(glob("csrc/*.cpp"))]
    sources += sorted(set(glob("csrc/cpu/**/*.cpp", recursive=True)) - set(sources))
    sources += sorted(glob("csrc/ptx/*.cpp"))
    flags, links = list(CXX_FLAGS), []
    if sys.platform == "linux":
        flags, links = [*flags, "-fopenmp"], ["-fopenmp"]
    flags += shlex.split(os.environ.get("FASTBERT_CXXFLAGS", ""))
    if not wants_cuda():
        kind = cpp_extension.CppExtension
        options = {"cxx": flags}
    else:
        old = tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 8)
        archs = os.environ.setdefault(
            "TORCH_CUDA_ARCH_LIST", ARCHITECTURES_BEFORE_12_8 if old else ARCHITECTURES
        )
        kind = cpp_extension.CUDAExtension
        kernels = glob("csrc/cuda/**/*.cu", recursive=True)
        sources = sorted(kernels + glob("csrc/cuda/*.cpp")) + sources
        hopper = ["-DFASTBERT_SM90A"] if "9.0a" in archs.split(";") else []
        options = {
            "cxx": [*flags, f'-DFASTBERT_CUDA_ARCHS="{archs}"'],
            "nvcc": ["-O3", *hopper],
        }
    # ninja compiles a file again if its command has changed, so the commands name torch's version.
    macros = [("FASTBERT_TORCH", torch.__version__)]
    return kind(
        "fastbert._C",
        sources,
        define_macros=macros,
        extra_compile_args=options,
        extra_link_args=links,
    )


def missing_tool() -> str | None:
    """Return why this machine cannot compile any C++ code, or None.

    This check does not hide an error in a source of fastbert.
    """
    if shutil.which(os.environ["CXX"].split()[0]) is None:
        return f"no C++ compiler was found ({os.environ['CXX']}; set CXX to another)"
    headers = sysconfig.get_paths()["include"]
    return None if Path(headers, "Python.h").exists() else f"Python.h is missing in {headers}"


def in_units(sources: list[str], folder: Path) -> list[str]:
    """Return the sources, in which two files in ``folder`` replace the small CPU sources.

    Each of the two files includes half of the small sources. Reading torch's headers takes two of
    the three seconds of a small source; they are then read twice instead of once per source.
    """
    apart = ("level_", "operators")
    cpu = [Path(source) for source in sources if "cpu" in Path(source).parts]
    small = [source for source in cpu if not source.name.startswith(apart)]
    folder.mkdir(parents=True, exist_ok=True)
    # A relative path has no character of the checkout's own path, such as a quotation mark.
    included = [Path(os.path.relpath(path.resolve(), folder.resolve())) for path in small]
    units = []
    for number in range(min(2, len(small))):
        unit = folder / f"unit_{number}.cpp"
        text = "".join(f'#include "{path.as_posix()}"\n' for path in included[number::2])
        # Writing a file causes its compilation.
        if not unit.exists() or unit.read_text(encoding="utf-8") != text:
            unit.write_text(text, encoding="utf-8")
        units.append(str(unit))
    return [source for source in sources if Path(source) not in small] + units


class Build(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # pip builds an editable install in a temporary folder. In a permanent folder, ninja finds
        # the objects of the last build and compiles only the changed files.
        base = self.get_finalized_command("build").build_base
        self.build_temp = f"{base}/temp.{self.plat_name}-{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        lacking = missing_tool()
        if lacking is None:
            for built in self.extensions:
                built.sources = in_units(built.sources, Path(self.build_temp))
            return super().build_extensions()
        self.extensions = []
        line = "*" * 80
        print(
            f"{line}\nfastbert: {lacking}.\n"
            "Installing WITHOUT fastbert._C: the C++ operators for CPU and CUDA are missing, so\n"
            f"only the reference and Triton backends work. `fastbert info` shows this.\n{line}",
            file=sys.stderr,
        )
        return None


if __name__ == "__main__":
    # torch compiles and setuptools links with this compiler, whichever compiler built this Python.
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    os.environ.setdefault("CXX", found[0] if found else "c++")
    setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
