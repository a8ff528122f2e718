"""The sections of ``make gpu``; the commands of a section together end within nine minutes.

``CALLS`` has the order for a machine that is lent for ten minutes at a time.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.bench import SECTIONS as BENCHES

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540
# The summary has at most this many characters of a log, from its end.
TAIL = 3000
TEST_GROUPS = {
    "test-kernels": ("tests/kernels",),
    "test-ops": ("tests/ops", "tests/testing"),
    "test-modules": ("tests/modules", "tests/inference"),
    "test-training": ("tests/integrations", "tests/training"),
}
# Tests that a machine without a GPU can also run, each with the reason to leave it out on a machine
# with a GPU.
NOT_ON_A_GPU = {
    "tests/kernels/test_aot.py": "the section compile compiles the launches on all cores",
    "tests/kernels/test_compiled_kernels.py": "the PTX machine is a program for the CPU",
    "tests/testing/test_emulation.py": "the PTX machine is a program for the CPU",
    "tests/analysis": "explanations and geometry on the CPU",
    "tests/bench": "the benchmarks run",
    "tests/cli": "the commands; the section check runs the one that uses a GPU",
    "tests/csrc": "C++ for the CPU; tests/ops runs the CUDA kernels",
    "tests/data": "text and batches",
    "tests/demo": "the demo in miniature; the section check compares what it compares",
    "tests/docs": "the documentation",
    "tests/fuzz": "damaged files",
    "tests/finetuning": "data, figures and small runs on the CPU",
    "tests/io": "files",
    "tests/jobs": "files",
    "tests/mutation": "faults in kernels need no GPU",
    "tests/checkpoints": "a program that downloads packages, on the CPU",
    "tests/parity": "comparisons on the CPU; tests/integrations runs the models",
    "tests/release": "the changelog and the names",
    "ptxmachine/tests": "the PTX machine is a program for the CPU",
    "tests/ptx": "the PTX machine is a program for the CPU",
    "tests/seq2seq": "data and small runs on the CPU",
    "tests/soak": "the memory of a process on the CPU",
    "tests/viewer": "a page for a browser, computed on the CPU",
    "tests/test_architecture.py": "the sources",
    "tests/test_docstrings.py": "the sources",
    "tests/test_fresh_python.py": "processes forked from one with torch, without a GPU",
    "tests/test_house.py": "the sources",
    "tests/test_numbered_cases.py": "the sources",
    "tests/test_cuda_toolkit.py": "the search for headers, with a made-up toolkit",
    "tests/test_sample_prose.py": "the sources",
    "tests/test_quick_cases.py": "the selection of the tests",
    "tests/test_turns.py": "the order of CI",
    "tests/test_packaging.py": "wheels, whose build takes minutes",
}
# The sections of each command on a machine that is lent for ten minutes at a time, and that has no
# built extension at the start. The most valuable commands come first, after `make gpu-first`.
CALLS = (
    ("bench-attention",),
    ("build", "test-kernels"),
    ("build", "test-ops"),
    ("bench-encoder",),
    ("bench-training",),
    ("build", "bench-rows"),
    ("build", "bench-gemm"),
    ("bench-varlen",),
    ("bench-latency", "compile"),
    ("build", "check"),
    ("build", "test-modules"),
    ("build", "test-training"),
)
# Seconds that a benchmark section needs at its end for its last match and its files.
LAST_MATCH_S = 90
BUILT = (
    "import sys; from fastbert.ops import backend; "
    "sys.exit(None if backend.EXTENSION_HAS_CUDA else "
    "f'the extension has no CUDA kernels: {backend.WITHOUT_CUDA or backend.EXTENSION_STATE}')"
)
# An extension from an earlier build may lack the kernels of Hopper GPUs.
HAS_HOPPER = (
    "import sys; from fastbert.ops import backend; "
    "sys.exit(None if backend.capability() != (9, 0) or '9.0a' in backend.CUDA_ARCHS else "
    "f'the extension has no kernels of Hopper GPUs: it was built for {backend.CUDA_ARCHS}')"
)


@dataclass(frozen=True)
class Section:
    """Commands that run one after another until one fails.

    ``stdout`` is the file that receives the standard output of the last command. All other output
    goes to the log of the section.
    """

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    stdout: str | None = None


def sections(folder: Path) -> dict[str, Section]:
    """Return every section by name, in the order of the run."""
    python = sys.executable
    fastbert = (python, "-m", "fastbert")
    listed = [
        Section(
            "build",
            "the extension with its CUDA kernels, in place",
            (
                (python, "setup.py", "--quiet", "build_ext", "--inplace"),
                (python, "-c", BUILT),
                (python, "-c", HAS_HOPPER),
                (*fastbert, "info"),
            ),
        ),
        Section(
            "compile",
            "every shipped Triton launch ahead of time, for three architectures",
            ((*fastbert, "check", "--aot", "--json"),),
            stdout="compile.json",
        ),
    ]
    for name, paths in TEST_GROUPS.items():
        listed.append(Section(name, "the tests, on CUDA if they take a device", (pytest(paths),)))
    listed.append(
        Section(
            "check",
            "parity of every operation, backend and dtype",
            ((*fastbert, "check", "--json"),),
            stdout="check.json",
        )
    )
    for name in BENCHES:
        command = (python, "-m", "benchmarks.gpu.bench", name, "--out", str(folder))
        listed.append(Section(name, "times of fastbert and its peers", (command,)))
    return {section.name: section for section in listed}


def refused_architectures() -> str | None:
    """Return why setup.py refuses TORCH_CUDA_ARCH_LIST on this machine, or None.

    setup.py prints the architectures, and whether the kernels of Hopper GPUs are among them.
    """
    if torch.version.cuda is None:
        return None  # The build reports that torch has no CUDA.
    try:
        runpy.run_path(str(ROOT / "setup.py"))["architectures"]()
    except SystemExit as refused:
        return str(refused)
    return None


def pytest(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for pytest, with several processes if pytest-xdist is installed.

    Several processes save time, because most of the time of the tests is compilation on the CPU.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    command += [f"--ignore={path}" for path in NOT_ON_A_GPU if path.startswith(paths)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2))), "--dist", "worksteal"]
    return tuple(command)


def run(
    section: Section,
    folder: Path,
    notify: Callable[[str], None] = print,
    seconds: float | None = None,
) -> dict[str, object]:
    """Run one section in the root of the repository, with its output in ``<section>.log``.

    A section that exceeds its time limit is ended and counts as failed. The limit is ``LIMIT_S``,
    or the seconds that are left for the whole command if these are fewer. In the second case, a
    benchmark gets its number of minutes as an argument, so that it leaves out its last matches and
    is not ended.
    """
    limit = LIMIT_S if seconds is None else min(LIMIT_S, seconds)
    if limit <= 0:
        notify(f"[{section.name}] not run: the time of the command is over")
        return {"section": section.name, "status": 124, "seconds": 0.0, "commands": []}
    # With this variable, a build without the CUDA kernels fails.
    environment = {**os.environ, "FASTBERT_CUDA": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    start = time.monotonic()
    status = 0
    log_path = folder / f"{section.name}.log"
    with log_path.open("w+", encoding="utf-8") as log:
        for number, command in enumerate(section.commands, 1):
            if section.name in BENCHES and limit < LIMIT_S:
                command += ("--minutes", f"{max(0.0, limit - LAST_MATCH_S) / 60:.1f}")
            notify(f"[{section.name}] {shlex.join(command)}")
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            keeps = section.stdout is not None and number == len(section.commands)
            target = (
                (folder / section.stdout).open("w", encoding="utf-8")
                if keeps and section.stdout
                else log
            )
            left = limit - (time.monotonic() - start)
            try:
                status = _run(command, environment, target, log, max(1.0, left))
            finally:
                if target is not log:
                    target.close()
            if status:
                break
        log.seek(0)
        tail = log.read()[-TAIL:]
    seconds = round(time.monotonic() - start, 1)
    outcome = "ok" if status == 0 else f"FAILED, exit status {status}"
    notify(f"[{section.name}] {outcome} after {seconds} s")
    if status:
        notify(tail)
    if status == 0 and (folder / f"{section.name}.json").exists():
        log_path.unlink()  # The JSON file has all results, so the log is not needed.
    return {
        "section": section.name,
        "status": status,
        "seconds": seconds,
        "commands": [shlex.join(command) for command in section.commands],
        **({"tail": tail} if status or section.name.startswith("test") else {}),
    }


def _run(command, environment, target, log, seconds: float) -> int:
    """Run a command and return its exit status, or 124 if it runs for longer than ``seconds``.

    At the end, the whole process group of a command that still runs is killed.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=target,
        stderr=log,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        log.write(f"\nended after {seconds:.0f} s, the rest of its time limit\n")
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
