"""Build fastbert._C, the only part of the package that needs a compiler; see pyproject.toml.

FASTBERT_CUDA=0|1 excludes or requires CUDA code, and TORCH_CUDA_ARCH_LIST sets its architectures.
FASTBERT_CXXFLAGS adds flags for the C++ compiler after all others.
"""

import json
import os
import re
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

sys.path.insert(0, str(Path(__file__).parent / "csrc" / "cuda"))
import toolkit

CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wno-maybe-uninitialized"]  # The AVX-512 header of GCC 12 causes this warning.
# With these flags, messages name the sources from the checkout, and the headers of torch from the
# folder of packages. So no path of the machine is in the extension, and builds in two folders have
# the same bytes. A path with characters that ninja would read otherwise is left as it is.
for folder, name in ((Path(__file__).parent, "."), (Path(torch.__file__).parents[1], "packages")):
    if re.fullmatch(r"[\w/.+ -]+", str(folder.resolve())):
        CXX_FLAGS.append(f"-ffile-prefix-map={folder.resolve()}={name}")
# CUDA toolkits before 12.8 do not support compute capability 10.0.
# Instructions that only Hopper GPUs have need code for 9.0a, which runs only on GPUs of compute
# capability 9.0.
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
ARCHITECTURES = "8.0;9.0a;10.0+PTX"
ARCHITECTURES_BEFORE_12_8 = "8.0+PTX;9.0a"


def cuda_toolkit() -> toolkit.Toolkit | str:
    """Return the toolkit for the CUDA code, or the reason why no CUDA code is compiled.

    CUDA code needs a CUDA build of torch and a CUDA toolkit, but no GPU.
    """
    request = os.environ.get("FASTBERT_CUDA", "")
    if request not in ("", "0", "1"):
        sys.exit(f"fastbert: FASTBERT_CUDA: got {request!r}, allowed: 0, 1 or unset")
    if request == "0":
        return "FASTBERT_CUDA=0 excludes them"
    try:
        return found_toolkit()
    except toolkit.Lacking as lacking:
        if request == "1":
            sys.exit(f"fastbert: FASTBERT_CUDA=1, but {lacking}")
        return str(lacking)


def found_toolkit() -> toolkit.Toolkit:
    if torch.version.cuda is None:
        raise toolkit.Lacking(f"torch {torch.__version__} is not a CUDA build")
    nvcc = Path(cpp_extension.CUDA_HOME or "", "bin", "nvcc")
    if not cpp_extension.CUDA_HOME or not nvcc.exists():
        raise toolkit.Lacking("no CUDA toolkit was found (nvcc on PATH, or CUDA_HOME)")
    headers = cpp_extension.include_paths("cuda", torch_include_dirs=False)
    libraries = cpp_extension.library_paths("cuda", torch_include_dirs=False)
    return toolkit.find(torch.version.cuda, nvcc, headers, libraries, toolkit.package_roots())


def extension(cuda: toolkit.Toolkit | str) -> Extension:
    """Return the extension, with CUDA code unless `cuda` is the reason why there is none."""
    # The sources that take longest to compile come first, so that no core is idle at the end.
    sources = [*sorted(glob("csrc/cpu/isa/level_*.cpp"), reverse=True), *sorted(glob("csrc/*.cpp"))]
    sources += sorted(set(glob("csrc/cpu/**/*.cpp", recursive=True)) - set(sources))
    flags, links = list(CXX_FLAGS), []
    if sys.platform == "linux":
        flags, links = [*flags, "-fopenmp"], ["-fopenmp"]
    flags += shlex.split(os.environ.get("FASTBERT_CXXFLAGS", ""))
    folders: dict[str, list[str]] = {}
    if isinstance(cuda, str):
        # `fastbert info` shows the reason. JSON and C++ escape a string in the same way.
        flags.append(f"-DFASTBERT_WITHOUT_CUDA={json.dumps(cuda)}")
        kind = cpp_extension.CppExtension
        options = {"cxx": flags}
    else:
        archs = architectures()
        kind = cpp_extension.CUDAExtension
        kernels = glob("csrc/cuda/**/*.cu", recursive=True)
        sources = sorted(kernels + glob("csrc/cuda/*.cpp")) + sources
        hopper = ["-DFASTBERT_SM90A"] if has_hopper(archs) else []
        options = {
            "cxx": [*flags, f'-DFASTBERT_CUDA_ARCHS="{archs}"'],
            "nvcc": ["-O3", *hopper],
        }
        folders = {"include_dirs": cuda.include_dirs, "library_dirs": cuda.library_dirs}
    # ninja compiles a file again if its command has changed, so the commands name torch's version.
    macros = [("FASTBERT_TORCH", torch.__version__)]
    built = kind(
        "fastbert._C",
        sources,
        define_macros=macros,
        extra_compile_args=options,
        extra_link_args=links,
        **folders,
    )
    if isinstance(cuda, toolkit.Toolkit):
        built.libraries[built.libraries.index("cudart")] = cuda.runtime
    return built


def missing_tool() -> str | None:
    """Return why this machine cannot compile any C++ code, or None if it can.

    Without a tool, the package is installed without the extension. An error in a source of fastbert
    is no such reason, and still makes the installation fail.
    """
    if shutil.which(os.environ["CXX"].split()[0]) is None:
        return f"no C++ compiler was found ({os.environ['CXX']}; set CXX to another)"
    headers = sysconfig.get_paths()["include"]
    return None if Path(headers, "Python.h").exists() else f"Python.h is missing in {headers}"


def architectures() -> str:
    """Return the architectures of the CUDA code, separated by semicolons, and print them.

    The architectures are those of the variable TORCH_CUDA_ARCH_LIST, or the default. The variable
    may contain spaces, commas and the names of GPU generations that torch knows. This function sets
    the variable to its result, because torch reads the variable again when it compiles. An unknown
    architecture, or a list without 9.0a on a machine with a Hopper GPU, ends the build.
    """
    old = tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 8)
    given = os.environ.get(ARCH_LIST) or (ARCHITECTURES_BEFORE_12_8 if old else ARCHITECTURES)
    os.environ[ARCH_LIST] = ";".join(re.findall(r"[^\s;,]+", given))
    try:
        # A flag ends in code=sm_90a for machine code, and in code=compute_90a for PTX.
        flags = " ".join(cpp_extension._get_cuda_arch_flags())
    except (ValueError, IndexError) as error:
        allowed = "architectures that torch knows, such as 8.0;9.0a;10.0+PTX"
        sys.exit(f"fastbert: {ARCH_LIST}: got {given!r}, allowed: {allowed} ({error})")
    codes = re.findall(r"code=sm_(\d+)(\d)([af]?)", flags)
    codes.sort(key=lambda code: (int(code[0]), int(code[1])))
    names = (
        f"{major}.{minor}{kind}" + "+PTX" * f"{flags} ".count(f"code=compute_{major}{minor}{kind} ")
        for major, minor, kind in codes
    )
    archs = os.environ[ARCH_LIST] = ";".join(names)
    kernels = "with" if has_hopper(archs) else "without"
    if kernels == "without" and sees_hopper():
        sys.exit(
            f"fastbert: {ARCH_LIST}: got {given!r}, allowed on a GPU of compute capability 9.0: a "
            "list with 9.0a, such as 8.0;9.0a;10.0+PTX, because the kernels of Hopper GPUs exist "
            "in code for 9.0a alone; without the variable, the default has them"
        )
    print(
        f"fastbert: CUDA code for {archs}, {kernels} the kernels of Hopper GPUs (9.0a)",
        file=sys.stderr,
    )
    return archs


def has_hopper(archs: str) -> bool:
    return "9.0a" in [name.removesuffix("+PTX") for name in archs.split(";")]


def sees_hopper() -> bool:
    """Tell whether a GPU of this machine has compute capability 9.0."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return any(torch.cuda.get_device_capability(i) == (9, 0) for i in range(count))


def in_units(sources: list[str], folder: Path) -> list[str]:
    """Return the sources, in which two files in ``folder`` replace the small CPU sources.

    The small CPU sources are all but those named ``level_*`` or ``operators*``. Each of the two
    files includes half of them. Compiling a small source takes three seconds, two of which are
    spent on torch's headers. With two files, the headers are read twice instead of once per source.
    """
    apart = ("level_", "operators")
    cpu = [Path(source) for source in sources if "cpu" in Path(source).parts]
    small = [source for source in cpu if not source.name.startswith(apart)]
    folder.mkdir(parents=True, exist_ok=True)
    # A relative path has no special character of the checkout's path, such as a quotation mark.
    included = [Path(os.path.relpath(path.resolve(), folder.resolve())) for path in small]
    units = []
    for number in range(min(2, len(small))):
        unit = folder / f"unit_{number}.cpp"
        text = "".join(f'#include "{path.as_posix()}"\n' for path in included[number::2])
        # ninja compiles a file again after it was written, so a file with the right text is kept.
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
    # torch compiles and setuptools links with the compiler in CXX, even if another compiler built
    # this Python.
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    os.environ.setdefault("CXX", found[0] if found else "c++")
    cuda = cuda_toolkit()
    done = setup(ext_modules=[extension(cuda)], cmdclass={"build_ext": Build})
    # This message is printed after all commands of `setup`, so that it is the last output.
    if isinstance(cuda, str) and done.have_run.get("build_ext") and missing_tool() is None:
        print(f"fastbert: built without the CUDA C++ kernels: {cuda}.", file=sys.stderr)
