"""What ``make gpu`` runs: sections, each a few commands that together end within nine minutes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.bench import SECTIONS as BENCHES

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540
# What a log's end may add to the summary.
TAIL = 3000
TEST_GROUPS = {
    "test-kernels": ("tests/kernels",),
    "test-ops": ("tests/ops", "tests/csrc", "tests/testing"),
}
# Compiled by the section compile, on all cores; breaking kernels on purpose proves no machine.
NOT_ON_A_GPU = ("tests/kernels/test_aot.py", "tests/mutation")
BUILT = (
    "import sys; from fastbert.ops import backend; "
    "sys.exit(None if backend.EXTENSION_HAS_CUDA else "
    "f'the extension has no CUDA kernels: {backend.EXTENSION_STATE}')"
)


@dataclass(frozen=True)
class Section:
    """commands: one after another until one fails. stdout: file that takes the last one's."""

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    stdout: str | None = None


def sections(folder: Path) -> dict[str, Section]:
    """Every section by name, in the order in which they run."""
    python = sys.executable
    fastbert = (python, "-m", "fastbert")
    found = [
        Section(
            "build",
            "the extension with its CUDA kernels, in place",
            (
                (python, "setup.py", "--quiet", "build_ext", "--inplace"),
                (python, "-c", BUILT),
                (*fastbert, "info"),
            ),
        ),
        Section(
            "compile",
            "every shipped Triton launch ahead of time, for three architectures",
            ((python, "-m", "benchmarks.gpu.compiled", "--out", str(folder)),),
        ),
    ]
    for name, paths in {**TEST_GROUPS, "test-modules": other_tests()}.items():
        found.append(Section(name, "the tests, on CUDA where they take a device", (pytest(paths),)))
    found.append(
        Section(
            "check",
            "parity of every operation, backend and dtype",
            ((*fastbert, "check", "--json"),),
            stdout="check.json",
        )
    )
    for name in BENCHES:
        command = (python, "-m", "benchmarks.gpu.bench", name, "--out", str(folder))
        found.append(Section(name, "figures beside the peers", (command,)))
    return {section.name: section for section in found}


def other_tests() -> tuple[str, ...]:
    """What no other group has, so that a new folder of tests cannot be forgotten."""
    taken = {path for paths in TEST_GROUPS.values() for path in paths} | set(NOT_ON_A_GPU)
    entries = sorted((ROOT / "tests").iterdir())
    tests = [e for e in entries if (e.is_dir() and list(e.rglob("test_*.py"))) or is_test(e)]
    return tuple(p for e in tests if (p := e.relative_to(ROOT).as_posix()) not in taken)


def is_test(path: Path) -> bool:
    return path.suffix == ".py" and path.name.startswith("test_")


def pytest(paths: tuple[str, ...]) -> tuple[str, ...]:
    """On several processes where pytest-xdist is there: the tests compile more than they run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    command += [f"--ignore={path}" for path in NOT_ON_A_GPU]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2))), "--dist", "worksteal"]
    return tuple(command)


def run(section: Section, folder: Path, notify: Callable[[str], None] = print) -> dict[str, object]:
    """Runs one section from the repository root; everything it prints goes to ``<section>.log``.

    A section that is still running at the limit is ended and counts as failed.
    """
    # The extension must contain the CUDA kernels here, or the build has to fail.
    environment = {**os.environ, "FASTBERT_CUDA": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    start = time.monotonic()
    status = 0
    log_path = folder / f"{section.name}.log"
    with log_path.open("w+", encoding="utf-8") as log:
        for number, command in enumerate(section.commands, 1):
            notify(f"[{section.name}] {shlex.join(command)}")
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            keeps = section.stdout is not None and number == len(section.commands)
            target = (folder / section.stdout).open("w") if keeps and section.stdout else log
            left = LIMIT_S - (time.monotonic() - start)
            try:
                status = _run(command, environment, target, log, left)
            finally:
                if target is not log:
                    target.close()
            if status:
                break
        log.seek(0)
        tail = log.read()[-TAIL:]
    seconds = round(time.monotonic() - start, 1)
    verdict = "ok" if status == 0 else f"FAILED, exit status {status}"
    notify(f"[{section.name}] {verdict} after {seconds} s")
    if status:
        notify(tail)
    if status == 0 and (folder / f"{section.name}.json").exists():
        log_path.unlink()  # its figures are in the JSON; few files are easily fetched
    return {
        "section": section.name,
        "status": status,
        "seconds": seconds,
        "commands": [shlex.join(command) for command in section.commands],
        **({"tail": tail} if status or section.name.startswith("test") else {}),
    }


def _run(command, environment, target, log, seconds: float) -> int:
    """The exit status; 124 when the time ran out. Ends the whole group of processes then."""
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
        return process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        log.write(f"\nended after {LIMIT_S} s, the limit of a section\n")
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
