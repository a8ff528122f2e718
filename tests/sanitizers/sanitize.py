"""Run tests of the C++ operators under GCC's sanitizers.

    python tests/sanitizers/sanitize.py address [pytest's arguments]    # or: make sanitize
    python tests/sanitizers/sanitize.py thread [pytest's arguments]

`address` runs tests/csrc and ptxmachine/tests with AddressSanitizer and UndefinedBehaviorSanitizer;
`thread` runs tests/csrc/test_threads.py with ThreadSanitizer. Each sanitizer has a copy of fastbert
and ptxmachine in build/sanitize-* with extensions of its own, which later runs update. Python and
torch are not instrumented, so the sanitizers see only accesses of the extensions. Leaks are not
reported, because Python frees little of its memory at exit. The first error that a sanitizer
reports ends the run with an exit status other than 0.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# -O1 keeps the sums of a tile in registers. -g1 gives line numbers in the sanitizer's reports.
FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer"]
# With the second option, an allocation that is too large returns null instead of ending the
# process.
ASAN = "detect_leaks=0:allocator_may_return_null=1"
KEPT = "tests/csrc/test_large_blocks.py"


class Sanitizer(NamedTuple):
    flags: list[str]
    libraries: list[str]  # Python must load these libraries first
    environment: dict[str, str]
    tests: list[str]
    left_out: list[str]


SANITIZERS = {
    # The vptr check needs type information that torch does not export.
    "address": Sanitizer(
        ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
        ["libasan.so", "libubsan.so", "libstdc++.so"],
        {"ASAN_OPTIONS": ASAN, "UBSAN_OPTIONS": "print_stacktrace=1"},
        ["tests/csrc", "ptxmachine/tests"],
        [
            # The memory grows, because AddressSanitizer does not reuse freed memory for a while.
            "tests/csrc/test_attention.py::test_calls_grow_no_memory",
            "tests/csrc/test_gemm.py::test_ten_thousand_calls_grow_no_memory",
            # Memory of large tensors is not kept, because AddressSanitizer would not check it.
            f"{KEPT}::test_the_next_tensor_of_about_the_same_size_gets_the_memory_of_a_freed_one",
            f"{KEPT}::test_no_more_is_kept_than_was_in_use_at_one_time",
            # nvcc crashes if libasan is loaded.
            "tests/csrc/test_nvcc.py",
            "ptxmachine/tests/test_tutorial.py",
        ],
    ),
    "thread": Sanitizer(
        ["-fsanitize=thread"],
        ["libtsan.so", "libstdc++.so"],
        {"TSAN_OPTIONS": f"suppressions='{HERE / 'thread.supp'}' halt_on_error=1"},
        ["tests/csrc/test_threads.py"],
        [],
    ),
}


def build(name: str, sanitizer: Sanitizer) -> Path:
    """Build the instrumented extensions, and return the folder with both packages."""
    folder = ROOT / "build" / f"sanitize-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    links = [*sanitizer.flags]
    if name == "thread":
        threads = folder / "threads.o"
        source = HERE / "openmp_on_std_threads.cpp"
        command = ["g++", "-std=c++17", "-fPIC", *FLAGS, *sanitizer.flags]
        subprocess.run([*command, "-c", source, "-o", threads], check=True)
        links.append(str(threads))
    flags = " ".join([*FLAGS, *sanitizer.flags])
    environment = {
        "CC": "gcc",
        "CXX": "g++",
        "FASTBERT_CXXFLAGS": flags,
        "PTXMACHINE_CXXFLAGS": flags,
        "LDFLAGS": shlex.join(links),
        "FASTBERT_CUDA": "0",
    }
    for project, base in ((ROOT, folder), (ROOT / "ptxmachine", folder / "ptxmachine")):
        setup = [sys.executable, "setup.py", "--quiet", "build", "--build-base", base]
        command = [*setup, "--build-lib", folder / "lib"]
        subprocess.run(command, cwd=project, env=os.environ | environment, check=True)
    return folder / "lib"


def library(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(package: Path, sanitizer: Sanitizer, arguments: list[str]) -> int:
    environment = sanitizer.environment | {
        "LD_PRELOAD": " ".join(map(library, sanitizer.libraries)),
        "PYTHONPATH": str(package),
    }
    # `python -m pytest` would import fastbert from the working tree, so this file runs pytest
    # itself.
    command = [sys.executable, __file__, "--in", package, *(arguments or sanitizer.tests)]
    command += [f"--deselect={test}" for test in sanitizer.left_out]
    print("tests left out:", *(sanitizer.left_out or ["none"]), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--in"]:
        import pytest

        from fastbert.ops.backend import EXTENSION

        assert EXTENSION is not None, f"the extension in {arguments[1]} cannot be imported"
        assert Path(EXTENSION.__file__).is_relative_to(arguments[1]), EXTENSION.__file__
        # The sanitizer writes its report when the process ends, when pytest's captured output is
        # lost.
        return pytest.main(["--capture=no", "-p", "no:cacheprovider", *arguments[2:]])
    if not arguments or arguments[0] not in SANITIZERS:
        print(__doc__, file=sys.stderr)
        return 2
    sanitizer = SANITIZERS[arguments[0]]
    return run(build(arguments[0], sanitizer), sanitizer, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
