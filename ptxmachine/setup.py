"""Build ptxmachine._machine, which needs a C++17 compiler and pybind11; see pyproject.toml."""

import os
import shlex
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# The machine rounds each product and sum as the PTX instruction says, so the compiler must not fuse
# a product and a sum.
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-Wno-maybe-uninitialized"]
FLAGS += shlex.split(os.environ.get("PTXMACHINE_CXXFLAGS", ""))
HEADERS = sorted(glob("csrc/*.h"))


def changed(compiled: str, source: str) -> bool:
    """Return whether the object file is missing, or older than its source or any header."""
    if not os.path.exists(compiled):
        return True
    return any(os.path.getmtime(p) > os.path.getmtime(compiled) for p in (source, *HEADERS))


class Build(build_ext):
    """Keeps object files in the build folder, so that a later build compiles only changed files."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Without this setting, an editable install compiles in a temporary folder.
        base = self.get_finalized_command("build").build_base
        self.build_temp = f"{base}/temp.{self.plat_name}-{sys.implementation.cache_tag}"


if __name__ == "__main__":
    machine = Pybind11Extension(
        "ptxmachine._machine",
        sorted(glob("csrc/*.cpp")),
        cxx_std=17,
        extra_compile_args=FLAGS,
        depends=HEADERS,
    )
    with ParallelCompile("MAX_JOBS", default=0, needs_recompile=changed):
        setup(ext_modules=[machine], cmdclass={"build_ext": Build})
