"""The packages have the right contents, can be installed, and work beside another ``kernels``.

Hugging Face publishes a package with the import name ``kernels``, which transformers looks for.
fastbert's Triton kernels are in a folder of that name, without ``__init__.py``, and are packaged as
``fastbert.kernels`` through the symlink ``fastbert/kernels``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# A build takes two minutes on an idle machine.
pytestmark = pytest.mark.timeout(1500)
LEFT_BEHIND = (
    *(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "tests", "benchmarks"),
    "node_modules",
)


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FASTBERT_CUDA")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=1400,
    )


def python(code: str, cwd: Path, *search_path: Path) -> str:
    joined = os.pathsep.join(map(str, search_path))
    result = run(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=joined)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def checkout(folder: Path) -> Path:
    """Copy the sources, so that a build neither reads nor writes files of the working tree."""
    return shutil.copytree(
        ROOT, folder / "checkout", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND)
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """Return the folder with the sdist and the wheel that was built from this sdist.

    The code is compiled without optimization, which takes a third of the time. Other tests run the
    optimized code.
    """
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("packaging")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist")
    result = run(*command, checkout(folder), cwd=folder, FASTBERT_CXXFLAGS="-O0")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return folder / "dist"


@pytest.fixture(scope="session")
def installed(built, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target)
    result = run(*pip, wheel, cwd=target)
    assert result.returncode == 0, result.stderr
    return target


def kernel_files() -> set[str]:
    names = {f"fastbert/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert names, "no kernels to ship"
    return names


def package_files() -> set[str]:
    """Return the Python files and the data files that they read, such as the times of GPUs.

    The sources of the viewer's page are not packaged; the package reads the built ``page.html``.
    """
    kinds = ("py", "json", "jsonl", "html")
    files = (p for kind in kinds for p in (ROOT / "fastbert").rglob(f"*.{kind}"))
    listed = [p for p in files if "web" not in p.relative_to(ROOT).parts]
    data = {"gpu_times.json", "stock_digests.json", "senses.jsonl", "page.html"}
    assert data <= {p.name for p in listed}
    return {p.relative_to(ROOT).as_posix() for p in listed} | kernel_files()


@pytest.mark.every_case
def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert all(archive.getinfo(name).file_size for name in kernel_files())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastbert"}
    assert package_files() <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    if shutil.which("c++"):
        assert any(name.startswith("fastbert/_C.") for name in names)


@pytest.mark.every_case
def test_the_sdist_holds_all_that_a_build_needs(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {m.name.split("/", 1)[-1]: m for m in archive.getmembers()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert "csrc/cuda/toolkit.py" in sources
    for name in package_files() | sources | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}:
        assert name in members, name
        assert members[name].isreg(), name
    assert not [name for name in members if name.split("/")[0] in ("kernels", "tests")]


@pytest.mark.every_case
def test_the_installed_wheel_works_outside_the_repository(installed, tmp_path):
    code = (
        "import importlib, torch, fastbert, fastbert.ops\n"
        "spec = importlib.util.find_spec('fastbert.kernels.layer_norm')\n"
        "x = torch.randn(3, 8)\n"
        "y = fastbert.ops.layer_norm(x, torch.ones(8), torch.zeros(8))\n"
        "print(fastbert.__file__, spec.origin, float(y.var(correction=0)) > 0.99, sep='\\n')"
    )
    package, kernel, works = python(code, tmp_path, installed).splitlines()
    assert Path(package).parent == installed / "fastbert"
    assert Path(kernel) == installed / "fastbert" / "kernels" / "layer_norm.py"
    assert works == "True"


# Tests of the name ``kernels``

FIND = "import importlib.util; spec = importlib.util.find_spec('kernels'); "


@pytest.fixture
def hugging_face_kernels(tmp_path) -> Path:
    """Create a fake of Hugging Face's package, in a folder that is used like site-packages."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("MADE_BY = 'Hugging Face'\n")
    metadata = tmp_path / "kernels-0.15.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.15.2\n")
    return tmp_path


def test_the_folder_is_a_namespace_and_the_symlink_is_committed():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "fastbert" / "kernels").is_symlink()
    assert os.readlink(ROOT / "fastbert" / "kernels") == "../kernels"


def test_from_the_root_kernels_is_no_regular_package():
    assert python(FIND + "print(spec is None or spec.origin is None)", ROOT) == "True"


def test_from_the_root_hugging_faces_package_wins(hugging_face_kernels):
    code = "import kernels; print(kernels.MADE_BY)"
    assert python(code, ROOT, ROOT, hugging_face_kernels) == "Hugging Face"
    code = (
        "import importlib.util; print(importlib.util.find_spec('fastbert.kernels.common').origin)"
    )
    ours = python(code, ROOT, ROOT, hugging_face_kernels)
    assert Path(ours).resolve() == ROOT / "kernels" / "common.py"


def test_transformers_probe_is_right_with_and_without_it(hugging_face_kernels):
    pytest.importorskip("transformers")
    probe = "from transformers.utils import is_kernels_available as probe; print(probe('0.1', '9'))"
    real = "import importlib.metadata as m; print('kernels' in {d.name for d in m.distributions()})"
    assert python(probe, ROOT) == python(real, ROOT)
    assert python(probe, ROOT, ROOT, hugging_face_kernels) == "True"


# setup.py


def setup(*arguments: str, cwd: Path = ROOT, **environment: str):
    return run(sys.executable, "setup.py", *arguments, cwd=cwd, **environment)


@pytest.mark.every_case
def test_without_a_compiler_it_installs_and_says_so(tmp_path):
    source = checkout(tmp_path)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    )
    target = tmp_path / "target"
    result = run(*pip, "-v", "--target", target, source, cwd=tmp_path, CXX="/nonexistent/c++")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "no C++ compiler was found (/nonexistent/c++; set CXX to another)" in output
    assert "Installing WITHOUT fastbert._C" in output
    assert not list(target.rglob("_C*"))
    code = (
        "import sys\n"
        "# An editable install in this environment would lend its own extension.\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import fastbert.ops.backend as b; print(b.EXTENSION, b.EXTENSION_STATE)"
    )
    assert python(code, tmp_path, target).startswith("None the extension fastbert._C is missing")


@pytest.mark.every_case
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_a_compile_error_fails_the_build(tmp_path):
    source = checkout(tmp_path)
    for path in (source / "csrc" / "cpu").rglob("*.cpp"):
        path.unlink()
    (source / "csrc" / "bindings.cpp").write_text("#error broken on purpose\n")
    result = setup("build_ext", "--inplace", cwd=source)
    assert result.returncode != 0
    assert "broken on purpose" in result.stdout + result.stderr


SMALL_SOURCES = {
    "bindings.cpp": "int bindings() { return 1; }\n",
    "cpu/isa/level_plain.cpp": "int level() { return 1; }\n",
    "cpu/plain.cpp": "int plain() { return 1; }\n",
    "cpu/attention/including.cpp": '#include "../included.h"\nint including() { return kOne; }\n',
    "cpu/included.h": "constexpr int kOne = 1;\n",
}


def with_small_sources(source: Path) -> None:
    """Replace the C++ sources of a checkout by the small sources above."""
    for path in (source / "csrc").rglob("*"):
        if path.suffix in (".cpp", ".cu", ".cuh", ".h"):
            path.unlink()
    for name, text in SMALL_SOURCES.items():
        (source / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / "csrc" / name).write_text(text)


# The script installs a checkout seven times, and writes which objects each installation compiles.
INSTALL_AGAIN_AND_AGAIN = """
import pathlib
import torch
from setuptools import build_meta

compiled = {}

def install():
    before = dict(compiled)
    build_meta.build_editable("dist")
    for path in pathlib.Path("build").rglob("*.o"):
        compiled[path.stem] = path.stat().st_mtime_ns
    names = sorted(name for name, time in compiled.items() if before.get(name) != time)
    with open("compiled.txt", "a") as file:
        print(*names, file=file)

install()
pathlib.Path("pyproject.toml").touch()
install()
pathlib.Path("csrc/cpu/isa/level_plain.cpp").touch()
install()
pathlib.Path("csrc/cpu/plain.cpp").touch()
install()
pathlib.Path("csrc/cpu/included.h").touch()
install()
pathlib.Path("csrc/cpu/fresh.cpp").write_text("int fresh() { return 1; }")
install()
torch.__version__ = type(torch.__version__)("99.0")
install()
"""


@pytest.mark.every_case
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_an_editable_install_compiles_what_has_changed_and_nothing_else(tmp_path):
    source = checkout(tmp_path)
    with_small_sources(source)
    result = run(sys.executable, "-c", INSTALL_AGAIN_AND_AGAIN, cwd=source, FASTBERT_CUDA="0")
    assert result.returncode == 0, result.stderr
    lines = (source / "compiled.txt").read_text(encoding="utf-8").splitlines()
    first, new_metadata, new_level, new_source, new_header, one_more, new_torch = lines
    assert first == new_torch == "bindings level_plain unit_0 unit_1"
    assert new_metadata == ""
    assert new_level == "level_plain"
    assert new_source == "unit_1"
    assert new_header == "unit_0"
    assert one_more == "unit_0 unit_1"


# The names of checkout folders have special characters of shells, regular expressions or C++.
FOLDERS = ("plain", "two words ü", "quotes \" '", "a+b (1) $HOME [x] & *")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_build_names_each_compiled_file_in_a_checkout_of_any_name(tmp_path, folder):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (shorten,) = re.findall(r"^SHORT := (.*)$", makefile, re.MULTILINE)
    home, lines = tmp_path / folder / "fastbert", []
    for name in ("csrc/cpu/isa/level_amx.cpp", "build/temp/unit_0.cpp"):
        files = [home / f"{name}.d", home / name, home / "build" / "temp" / f"{name}.o"]
        depends, source, compiled = (shlex.quote(str(file)) for file in files)
        lines.append(f"[3/30] c++ -MMD -MF {depends} -fPIC -c -c {source} -o {compiled} -O3 -w\n")
    said = subprocess.run(
        ["bash", "-c", shorten],
        input="".join([*lines, "note: -c is in the way -o of nobody\n"]),
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert said.splitlines() == [
        "[3/30] compiled csrc/cpu/isa/level_amx.cpp",
        "[3/30] compiled build/temp/unit_0.cpp",
        "note: -c is in the way -o of nobody",
    ]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_the_units_include_their_sources_in_a_checkout_of_any_name(tmp_path):
    folder = tmp_path / "".join(FOLDERS)
    (folder / "csrc" / "cpu").mkdir(parents=True)
    names = [f"csrc/cpu/{name}.cpp" for name in ("one", "two", "three")]
    for number, name in enumerate(names):
        (folder / name).write_text(f"int function_{number}();", encoding="utf-8")
    code = f"import setup; print(*setup.in_units({names!r}, setup.Path('build')), sep='\\n')"
    made = python(code, folder, ROOT).splitlines()
    assert made == ["build/unit_0.cpp", "build/unit_1.cpp"]
    done = run("c++", "-fsyntax-only", *made, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.every_case
def test_fastbert_cuda_is_obeyed_or_refused_with_the_reason():
    assert "FASTBERT_CUDA: got '2', allowed: 0, 1 or unset" in setup("-V", FASTBERT_CUDA="2").stderr
    if torch.version.cuda is None:
        result = setup("-V", FASTBERT_CUDA="1")
        assert result.returncode != 0
        assert "FASTBERT_CUDA=1, but torch" in result.stderr
        assert "is not a CUDA build" in result.stderr


# The script runs setup.py as with a CUDA build of torch, and with an nvcc that has no headers.
WITH_A_CUDA_TORCH = """
import runpy, sys, torch
torch.version.cuda = "13.2"
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = sys.argv.pop(1)
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.fixture
def nvcc_alone(tmp_path) -> Path:
    nvcc = tmp_path / "home" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    # Python searches this folder before the packages of the environment.
    (tmp_path / "site" / "nvidia" / "cu13" / "include").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()
    return nvcc.parents[1]


def setup_with_nvcc(home: Path, *arguments: str, cwd: Path = ROOT, **environment: str):
    path = {"PYTHONPATH": str(home.parent / "site"), "CPATH": "", "CPLUS_INCLUDE_PATH": ""}
    command = (sys.executable, "-c", WITH_A_CUDA_TORCH, home, *arguments)
    return run(*command, cwd=cwd, **path, **environment)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_missing_headers_of_cuda_end_a_build_that_requires_cuda(nvcc_alone):
    result = setup_with_nvcc(nvcc_alone, "-V", FASTBERT_CUDA="1")
    assert result.returncode != 0
    assert "fastbert: FASTBERT_CUDA=1, but c++ cannot include the headers of CUDA" in result.stderr
    assert "cuda.h: No such file or directory" in result.stderr
    site = nvcc_alone.parent / "site" / "nvidia" / "cu13" / "include"
    assert f"{nvcc_alone}/include (beside nvcc)" in result.stderr
    assert f"{site} (packages of torch)" in result.stderr


@pytest.mark.every_case
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_missing_headers_of_cuda_exclude_the_cuda_code_and_the_last_line_says_so(
    nvcc_alone, tmp_path
):
    source = checkout(tmp_path)
    with_small_sources(source)
    (source / "csrc" / "bindings.cpp").write_text(
        'extern "C" __attribute__((visibility("default")))\n'
        "const char* reason() { return FASTBERT_WITHOUT_CUDA; }\n"
    )
    result = setup_with_nvcc(nvcc_alone, "build_ext", "--inplace", cwd=source)
    assert result.returncode == 0, result.stderr
    (built,) = (source / "fastbert").glob("_C*.so")
    code = (
        "import ctypes, torch\n"
        f"library = ctypes.CDLL({str(built)!r})\n"
        "library.reason.restype = ctypes.c_char_p\n"
        "print(library.reason().decode())"
    )
    reason = python(code, tmp_path)
    assert reason.startswith("c++ cannot include the headers of CUDA (cuda.h: No such file")
    last = (result.stdout + result.stderr).splitlines()[-1]
    assert last == f"fastbert: built without the CUDA C++ kernels: {reason}."


def test_a_build_without_torch_says_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    result = setup("-V", PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert "Install torch first" in result.stderr
