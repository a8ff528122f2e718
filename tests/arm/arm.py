"""Build fastbert for aarch64 on a machine with another processor, and test it under emulation.

    python tests/arm/arm.py [PROCESSOR ...]    # or: make test-arm

The packages of Debian and of PyPI are unpacked in build/arm, without privileges: a cross compiler
and QEMU's user-mode emulator for this machine, Python and the C library for aarch64, and the last
torch on PyPI that is a CPU build for aarch64. QEMU is started by name, so the kernel needs no
entry for foreign programs (binfmt_misc). A process under emulation can start native programs:
setup.py runs under emulation, as on an ARM machine, and the compiler and ninja run natively.

Then each processor, which is a model of QEMU, runs `fastbert check` and tests of the C++ operators.
Downloads are not repeated, and only changed files are compiled again. The exit status is 1 if
anything fails.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "arm"
TOOLS, SYSTEM, SITE, LIB = (FOLDER / name for name in ("tools", "root", "site", "lib"))
# Scripts that behave like the programs of these names on an ARM machine.
BIN = FOLDER / "bin"
PYTHON = BIN / "python"

MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = {
    "amd64": ["g++-12-aarch64-linux-gnu", "qemu-user-static"],
    "arm64": ["python3.11", "libpython3.11-dev", "libstdc++-12-dev", "libgomp1"],
}
# The tools use the C and C++ libraries of this machine. The cross compiler uses the headers and the
# C library of the unpacked system, because those of its own packages name absolute paths.
LEFT_OUT = ("libc6", "libstdc++6_", "libgcc-s1_", "linux-libc-dev")
# torch is installed without the packages that it requires, because pip would judge by this machine
# that the CUDA libraries are among them.
TORCH = "torch==2.10.0"
WHEELS = [
    *("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"),
    *("huggingface-hub>=0.30", "numpy>=1.26", "regex>=2024.5.10", "rich>=13", "safetensors>=0.4.5"),
    *("tokenizers>=0.21", "typer>=0.15", "pybind11>=2.13", "setuptools>=77", "wheel"),
    *("expecttest", "hypothesis>=6.100", "pytest>=8.3", "pytest-benchmark>=5.1"),
    *("pytest-timeout>=2.3", "pytest-xdist>=3.6", "transformers>=5,<6"),
]
TESTS = ["tests/csrc"]
TESTS_LEFT_OUT = [
    # In these tests, the PTX machine runs GPU kernels that nvcc compiles.
    *("tests/csrc/test_cuda_*.py", "tests/csrc/test_hopper_*.py", "tests/csrc/test_nvcc.py"),
    *("tests/csrc/test_attention_code.py", "tests/csrc/test_*_faults.py"),
]
# The models of QEMU 7.2 and their tests. The first has all levels. The second has neither bf16 nor
# i8mm, and the first runs the tests of its levels too. torch's wheel needs ARMv8.2, so it does not
# run on models of ARMv8.0, such as cortex-a57.
PROCESSORS = {"max": TESTS, "neoverse-n1": ["tests/csrc/test_isa.py"]}


def fail(text: str) -> None:
    sys.exit(f"fastbert: {text}")


def run(command: list[object], **options: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, **options).returncode:  # type: ignore[call-overload]
        fail(f"this command failed: {shlex.join(words)}")


def once(folder: Path, contents: list[str]) -> bool:
    """Empty a folder and return True, unless the folder already has these contents."""
    stamp = folder.with_suffix(".done")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == "\n".join(contents):
        return False
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def done(folder: Path, contents: list[str]) -> None:
    folder.with_suffix(".done").write_text("\n".join(contents), encoding="utf-8")


def unpack(architecture: str, folder: Path) -> None:
    """Unpack the packages of an architecture and all that they depend on, with apt-get and dpkg.

    apt-get reads and writes only its folder in build/arm. Its list of installed packages is empty,
    so that it downloads every package that is needed.
    """
    names = PACKAGES[architecture]
    if not once(folder, names):
        return
    print(f"fastbert: downloading {', '.join(names)} for {architecture}", flush=True)
    state = FOLDER / f"apt-{architecture}"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    source = f"deb [signed-by={KEYRING}] {MIRROR} {SUITE} main\n"
    (state / "sources.list").write_text(source, encoding="utf-8")
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
    }
    lines = ["#clear APT::Architectures;", *(f'{name} "{v}";' for name, v in settings.items())]
    (state / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = os.environ | {"APT_CONFIG": str(state / "apt.conf")}
    run(["apt-get", "--quiet=2", "update"], env=environment)
    download = ["apt-get", "--quiet=2", "--yes", "--download-only", "install", *names]
    run(download, env=environment, stdout=subprocess.DEVNULL)
    for package in sorted((state / "archives").glob("*.deb")):
        if architecture == "arm64" or not package.name.startswith(LEFT_OUT):
            run(["dpkg", "-x", package, folder])
    done(folder, names)


def install_wheels() -> None:
    """Install torch for aarch64 and the packages that fastbert and its tests import."""
    if not once(SITE, [TORCH, *WHEELS]):
        return
    print(f"fastbert: downloading {TORCH} and {len(WHEELS)} other packages for aarch64", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--no-warn-conflicts", "--target", str(SITE)]
    pip += ["--python-version", "3.11", "--implementation", "cp"]
    for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        pip += ["--platform", f"{tag}_aarch64"]
    run([*pip, "--no-deps", TORCH])
    run([*pip, "--constraint", ROOT / "constraints.txt", *WHEELS])
    done(SITE, [TORCH, *WHEELS])


def write_scripts() -> None:
    """Write the scripts in `BIN`: Python under emulation, and the native tools for aarch64."""
    libraries = f"LD_LIBRARY_PATH={TOOLS / 'usr/lib/x86_64-linux-gnu'}"
    prefix = TOOLS / "usr/bin"
    compiler = ["env", libraries, prefix / "aarch64-linux-gnu-g++-12", f"--sysroot={SYSTEM}"]
    BIN.mkdir(exist_ok=True)
    for name, command in {
        "python": [prefix / "qemu-aarch64-static", "-L", SYSTEM, SYSTEM / "usr/bin/python3.11"],
        "c++": compiler,
        "objdump": ["env", libraries, prefix / "aarch64-linux-gnu-objdump"],
    }.items():
        words = shlex.join(str(word) for word in command)
        (BIN / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        (BIN / name).chmod(0o755)
    # Python imports this file when it starts. Tests start Python by the name in sys.executable.
    text = f"import sys\n\nsys.executable = {str(PYTHON)!r}\n"
    (SITE / "sitecustomize.py").write_text(text, encoding="utf-8")


def environment_of(processor: str) -> dict[str, str]:
    # ninja, a native program, is installed beside this Python.
    paths = [str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "QEMU_CPU": processor,
        "PYTHONPATH": f"{LIB}{os.pathsep}{SITE}",
        "PYTHONSAFEPATH": "1",  # the folder of the sources has no extension for aarch64
        "PATH": os.pathsep.join(paths),
        "CC": "c++",
        "CXX": "c++",
        "FASTBERT_CUDA": "0",
    }


def build() -> None:
    """Compile the extensions; later runs compile only changed files."""
    environment = environment_of("max")
    for name, project in (("fastbert", ROOT), ("ptxmachine", ROOT / "ptxmachine")):
        print(f"fastbert: compiling {name} for aarch64", flush=True)
        setup = [PYTHON, "setup.py", "--quiet", "build", "--build-base", FOLDER / f"build-{name}"]
        command = [str(word) for word in [*setup, "--build-lib", LIB]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=project, env=environment, text=True, **pipes) as process:
            for line in process.stdout:
                # A command of ninja becomes its number and the name of the compiled file.
                print(re.sub(r"^(\[\d+/\d+\]) .* -c (\S+) .*", r"\1 \2", line), end="", flush=True)
        if process.returncode:
            fail(f"this command failed: {shlex.join(command)}")


def main(processors: list[str]) -> int:
    began = time.monotonic()
    if platform.machine() != "x86_64":
        fail("make test-arm needs an x86-64 machine; on an ARM machine, make test runs all tests")
    for tool in ("apt-get", "dpkg", "ninja"):
        if shutil.which(tool, path=environment_of("")["PATH"]) is None:
            fail(f"{tool} was not found; make test-arm needs a machine with Debian's tools")
    unpack("amd64", TOOLS)
    unpack("arm64", SYSTEM)
    install_wheels()
    write_scripts()
    build()
    failed = []
    check = ["fastbert", "check", "--backend", "cpu", "--quick"]
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    tests += [f"--ignore-glob={ROOT / pattern}" for pattern in TESTS_LEFT_OUT]
    for processor in processors or PROCESSORS:
        paths = PROCESSORS.get(processor, TESTS)
        for name, words in (("check", check), ("tests", [*tests, *paths])):
            start = time.monotonic()
            print(f"== {processor}: {name}", flush=True)
            options = {"cwd": ROOT, "env": environment_of(processor)}
            if subprocess.run([str(PYTHON), "-m", *words], **options).returncode:
                failed.append(f"{processor}: {name}")
            print(f"== {processor}: {name}: {time.monotonic() - start:.0f} s", flush=True)
    result = f"failed: {', '.join(failed)}" if failed else "everything passes"
    print(f"{time.monotonic() - began:.0f} s; {result}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
