"""setup.py finds nvcc, the CUDA headers and the CUDA library before it builds CUDA code.

The tests use small fake toolkits, so that the result does not depend on this machine's nvcc.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))
toolkit = importlib.import_module("toolkit")
sys.path.pop(0)

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler on this machine"
)

# This fake nvcc prints its version and folders, compiles nothing, and exits with a chosen status.
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --dryrun) printf '%s\\n' '#$ INCLUDES="-I{own}/include"  ' '#$ LIBRARIES=  "-L{own}/lib"' >&2 ;;
  *) echo "{says}" >&2; exit {status} ;;
esac
"""


def make_nvcc(folder: Path, own: Path, release="13.0", says="", status=0) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(own=own, release=release, says=says, status=status))
    nvcc.chmod(0o755)
    return nvcc


def make_runtime(folder: Path, major: int = 13) -> Path:
    """Write the headers of a CUDA runtime package, which does not contain the folder crt."""
    folder.mkdir(parents=True)
    (folder / "cuda.h").write_text("")
    (folder / "cuda_runtime.h").write_text('#include "crt/host_config.h"\n#include "version.h"\n')
    (folder / "version.h").write_text(f"#define CUDART_VERSION {major}020\n")
    return folder


def make_crt(folder: Path) -> Path:
    (folder / "crt").mkdir(parents=True)
    (folder / "crt" / "host_config.h").write_text("")
    return folder


def make_library(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    empty = ("c++", "-shared", "-x", "c++", "/dev/null", "-o", path)
    subprocess.run(empty, check=True)
    return path


def make_toolkit(folder: Path) -> Path:
    make_crt(make_runtime(folder / "include"))
    make_library(folder / "lib" / "libcudart.so")
    return folder


@pytest.fixture
def look_up(tmp_path, monkeypatch):
    """Return a function that runs setup.py's look-up with the fake nvcc in tmp_path/home."""
    for name in ("CXX", "CC", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)

    def call(cuda: str = "13.2", *roots: Path, **made):
        home = tmp_path / "home"
        nvcc = make_nvcc(home, made.pop("own", tmp_path / "nowhere"), **made)
        return toolkit.find(cuda, nvcc, [str(home / "include")], [str(home / "lib64")], roots)

    return call


def test_the_headers_beside_nvcc_come_first(look_up, tmp_path):
    make_crt(make_runtime(tmp_path / "home" / "include"))
    make_library(tmp_path / "home" / "lib64" / "libcudart.so")
    make_toolkit(tmp_path / "nowhere")
    assert look_up() == toolkit.Toolkit([], [], "cudart")


def test_an_nvcc_that_is_a_script_elsewhere_names_its_own_folders(look_up, tmp_path):
    own = make_toolkit(tmp_path / "cuda-13.0")
    folders = look_up(own=own)
    assert folders == toolkit.Toolkit([f"{own}/include"], [f"{own}/lib"], "cudart")


def test_torchs_packages_of_cuda_13(look_up, tmp_path):
    cuda = tmp_path / "site" / "nvidia" / "cu13"
    make_crt(make_runtime(cuda / "include"))
    make_library(cuda / "lib" / "libcudart.so.13")
    folders = look_up("13.2", cuda.parent)
    assert folders == toolkit.Toolkit([f"{cuda}/include"], [f"{cuda}/lib"], ":libcudart.so.13")


def test_torchs_packages_of_cuda_12(look_up, tmp_path):
    site = tmp_path / "site" / "nvidia"
    make_runtime(site / "cuda_runtime" / "include", major=12)
    make_crt(site / "cuda_nvcc" / "include")
    make_library(site / "cuda_runtime" / "lib" / "libcudart.so.12")
    folders = look_up("12.6", site, release="12.9")
    assert folders.include_dirs == [f"{site}/cuda_runtime/include", f"{site}/cuda_nvcc/include"]
    assert folders.library_dirs == [f"{site}/cuda_runtime/lib"]
    assert folders.runtime == ":libcudart.so.12"


def test_nvcc_completes_the_packages_of_torch(look_up, tmp_path):
    """torch 2.15's packages lack crt/host_config.h, so the header beside nvcc is used."""
    own, cuda = tmp_path / "own", tmp_path / "site" / "nvidia" / "cu13"
    make_crt(own / "include")
    make_runtime(cuda / "include")
    make_library(cuda / "lib" / "libcudart.so.13")
    folders = look_up("13.2", cuda.parent, own=own)
    assert folders.include_dirs == [f"{own}/include", f"{cuda}/include"]


def test_a_package_without_crt_is_not_enough(look_up, tmp_path):
    make_runtime(tmp_path / "nvidia" / "cu13" / "include")
    with pytest.raises(toolkit.Lacking, match=r"crt/host_config\.h: No such file"):
        look_up("13.2", tmp_path / "nvidia")


def test_headers_of_another_cuda_are_not_taken(look_up, tmp_path):
    make_crt(make_runtime(tmp_path / "nvidia" / "cuda_runtime" / "include", major=12))
    with pytest.raises(toolkit.Lacking, match="these headers are not those of CUDA 13"):
        look_up("13.2", tmp_path / "nvidia")


def test_missing_headers_are_named_with_the_folders(look_up, tmp_path):
    packages = tmp_path / "nvidia" / "cu13" / "include"
    packages.mkdir(parents=True)
    with pytest.raises(toolkit.Lacking) as caught:
        look_up("13.2", tmp_path / "nvidia")
    assert str(caught.value) == (
        "c++ cannot include the headers of CUDA (cuda.h: No such file or directory); folders "
        f"searched: {tmp_path}/home/include (beside nvcc), none (nvcc --dryrun), {packages} "
        "(packages of torch)"
    )


def test_a_missing_library_is_named_with_the_folders(look_up, tmp_path):
    own = make_toolkit(tmp_path / "own")
    shutil.rmtree(own / "lib")
    with pytest.raises(toolkit.Lacking) as caught:
        look_up(own=own)
    assert str(caught.value) == (
        "the linker does not find libcudart; folders searched: "
        f"{tmp_path}/home/lib64 (beside nvcc), none (nvcc --dryrun), none (packages of torch)"
    )


def test_an_nvcc_of_another_cuda_is_refused(look_up, tmp_path):
    make_toolkit(tmp_path / "nowhere")
    with pytest.raises(toolkit.Lacking, match=r"nvcc is of CUDA 12\.8 and torch of CUDA 13\.2"):
        look_up("13.2", release="12.8")


def test_an_nvcc_that_refuses_the_host_compiler_is_refused(look_up, tmp_path):
    own = make_toolkit(tmp_path / "own")
    says = "host_config.h:139:2: error: #error -- unsupported GNU version!"
    with pytest.raises(toolkit.Lacking, match=r"nvcc cannot compile .*#error -- unsupported GNU"):
        look_up(own=own, says=says, status=1)


def test_an_nvcc_that_does_not_run_is_refused(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/nowhere/sh\n")
    nvcc.chmod(0o755)
    with pytest.raises(toolkit.Lacking, match=r"nvcc --version fails \(.*No such file"):
        toolkit.find("13.2", nvcc, [], [], ())


def test_the_packages_are_found_on_the_path_of_python(tmp_path, monkeypatch):
    (tmp_path / "nvidia").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert tmp_path / "nvidia" in toolkit.package_roots()


def test_the_trial_includes_the_headers_that_the_kernels_include():
    kinds = (".cu", ".cuh", ".cpp")
    files = [path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in kinds]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert set(re.findall(r"#include <(cu\w+\.h)>", toolkit.KERNEL)) == set(
        re.findall(r"#include <(cu\w+\.h)>", text)
    )
