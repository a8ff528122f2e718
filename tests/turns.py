"""Run one slice of `make every-case` and one gate, chosen in rotation, within a time limit.

    python tests/turns.py [--minutes 30]            # the slice and the gate of this commit
    python tests/turns.py NAME [NAME ...]           # or: make turn NAMES='training emulate'
    python tests/turns.py --list

A slice is all tests of one room, which is a part of the project. It includes the cases that
`make test` leaves out. A gate is a Makefile target, or a part of one, that takes too long for every
change. The number of commits (`git rev-list --count HEAD`) selects the slice and the gate, so that
all of them run in rotation. If the time limit ends a run before anything has failed, the run does
not count as failed, and its last line says so. The exit status is 1 if a test or a gate fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# An interrupted run has this many seconds to print its summary.
LAST_WORDS = 60
# In an interrupted run, these lines of pytest and the gates show that something failed.
FAILURE = re.compile(rb"\bFAILED\b|\b[1-9]\d* (failed|error)")


class Room(NamedTuple):
    """Files, the tests that a change of these files can break, and make targets that check them.

    The files and the tests are folders or globs; a glob after "!" excludes tests.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    gates: tuple[str, ...] = ()


GPU_TESTS = (
    *("tests/csrc/test_attention_code.py", "tests/csrc/test_attention_faults.py"),
    *("tests/csrc/test_cuda_*.py", "tests/csrc/test_hopper_*.py"),
    *("tests/csrc/test_layer_norm_faults.py", "tests/csrc/test_nvcc.py"),
)
ROOMS = {
    "cpu-kernels": Room(
        ("csrc/*", "csrc/cpu"),
        ("tests/csrc/test_*.py", *(f"!{pattern}" for pattern in GPU_TESTS)),
        ("test-processors", "test-arm", "sanitize", "mutate"),
    ),
    "gpu-kernels": Room(("csrc/cuda",), GPU_TESTS, ("emulate", "calibrate")),
    "ptx-machine": Room(
        ("ptxmachine", "fastbert/testing/ptx"),
        ("ptxmachine/tests", "tests/ptx"),
        ("emulate", "calibrate", "sanitize", "mutate"),
    ),
    "triton-kernels": Room(
        ("kernels",), ("tests/kernels",), ("ahead-of-time", "emulate", "mutate")
    ),
    "ops": Room(
        ("fastbert/ops", "fastbert/reference", "fastbert/testing/*.py"),
        ("tests/ops", "tests/testing"),
        ("test-processors", "conformance-peers"),
    ),
    "modules": Room(
        ("fastbert/*.py", "fastbert/modules", "fastbert/inference", "fastbert/graphs"),
        ("tests/modules", "tests/inference", "tests/soak"),
        ("test-processors", "conformance-transformers", "soak"),
    ),
    "integrations": Room(
        ("fastbert/integrations", "fastbert/parity"),
        ("tests/integrations", "tests/parity"),
        ("conformance-transformers", "conformance-peers", "newest"),
    ),
    "training": Room(
        ("fastbert/training", "fastbert/demo"), ("tests/training", "tests/demo"), ("fuzz",)
    ),
    "data": Room(
        ("fastbert/data", "fastbert/finetuning", "fastbert/seq2seq"),
        ("tests/data", "tests/finetuning", "tests/seq2seq"),
        ("fuzz",),
    ),
    "files-and-commands": Room(
        ("fastbert/cli", "fastbert/jobs", "fastbert/io"),
        ("tests/cli", "tests/jobs", "tests/io", "tests/fuzz", "tests/checkpoints"),
        ("fuzz", "checkpoints"),
    ),
    "analysis": Room(
        ("fastbert/analysis", "fastbert/viewer"),
        ("tests/analysis", "tests/viewer"),
        ("test-viewer", "mutate-viewer"),
    ),
    "house": Room(
        ("*", "docs", "benchmarks", "fastbert/bench", "tests"),
        ("tests/bench", "tests/docs", "tests/mutation", "tests/release", "tests/test_*.py"),
        ("newest", "mutate"),
    ),
}
FAMILIES = (
    "bert roberta xlm-roberta",
    "camembert distilbert albert",
    "electra mpnet modernbert nomic_bert",
    "deberta-v2 deberta xlnet",
    "data2vec-text ernie roberta-prelayernorm xlm-roberta-xl",
    "layoutlm megatron-bert gte jina_embeddings_v3 esm",
    "roformer eurobert t5 marian",
)
MUTATIONS = 16
# Name of a gate → arguments of make. A gate that exceeds the time limit is split into parts.
GATES: dict[str, tuple[str, ...]] = {
    "test-processors": ("test-processors",),
    "test-arm": ("test-arm",),
    **{f"ahead-of-time-{n}": ("ahead-of-time", f"ARCH={n}") for n in (80, 89, 90, 100, 120)},
    "emulate": ("emulate",),
    "calibrate": ("calibrate",),
    "sanitize-address": ("sanitize", "SANITIZERS=address"),
    "sanitize-thread": ("sanitize", "SANITIZERS=thread"),
    **{
        f"conformance-{n}": ("conformance-transformers", f"FAMILIES={part}")
        for n, part in enumerate(FAMILIES, 1)
    },
    "conformance-peers": ("conformance-peers",),
    **{f"mutate-{n}": ("mutate", f"PART={n}/{MUTATIONS}") for n in range(1, MUTATIONS + 1)},
    "mutate-viewer": ("mutate-viewer",),
    "checkpoints": ("checkpoints",),
    "soak": ("soak", "MINUTES=5"),
    "fuzz": ("fuzz", "SECONDS=600"),
    "check": ("check",),
    "newest": ("newest",),
}


def files_of(room: Room) -> list[str]:
    """Return the files and folders with the tests of a room, relative to the repository root."""
    found: dict[str, None] = {}
    for pattern in room.tests:
        paths = sorted(ROOT.glob(pattern.removeprefix("!")))
        for name in (path.relative_to(ROOT).as_posix() for path in paths):
            found.pop(name, None) if pattern.startswith("!") else found.setdefault(name)
    return list(found)


def command_of(name: str) -> list[str]:
    """Return the command of a slice or a gate."""
    if name in ROOMS:
        return ["make", "every-case", f"TESTS={' '.join(files_of(ROOMS[name]))}"]
    return ["make", *GATES[name]]


def of_this_commit() -> tuple[str, str]:
    """Return the slice and the gate that the number of commits selects."""
    command = ["git", "rev-list", "--count", "HEAD"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    commits = int(run.stdout)
    return list(ROOMS)[commits % len(ROOMS)], list(GATES)[commits % len(GATES)]


class Outcome(NamedTuple):
    """The exit status of a slice or a gate, and whether the time limit ended it."""

    name: str
    status: int
    stopped: bool
    seconds: float

    @property
    def failed(self) -> bool:
        return self.status != 0 and not self.stopped

    def __str__(self) -> str:
        if self.stopped and self.seconds == 0:
            return f"{self.name} was not started, for lack of time"
        outcome = "FAILED" if self.failed else "passed"
        if self.stopped:
            outcome = "was ended by the time box, with no failure,"
        return f"{self.name} {outcome} after {self.seconds:.0f} s"


def run(name: str, command: list[str], seconds: float) -> Outcome:
    """Run a slice or a gate, and interrupt it after `seconds` as Ctrl-C does.

    If the output of an interrupted run reports a failure, the run counts as failed.
    """
    if seconds < 1e-3:
        return Outcome(name, 0, True, 0.0)
    start, failure = time.monotonic(), False
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    box = Box(process, seconds)
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
        failure |= FAILURE.search(line) is not None
    status = process.wait()
    stopped = box.close()
    return Outcome(name, status, stopped and not failure, time.monotonic() - start)


class Box:
    """Interrupt the processes of a run at its time limit, and kill them a minute later."""

    def __init__(self, process: subprocess.Popen, seconds: float) -> None:
        self.process, self.stopped = process, False
        self.timers = [
            threading.Timer(seconds, self.send, [signal.SIGINT]),
            threading.Timer(seconds + LAST_WORDS, self.send, [signal.SIGKILL]),
        ]
        for timer in self.timers:
            timer.daemon = True
            timer.start()

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.stopped = True
            os.killpg(self.process.pid, number)

    def close(self) -> bool:
        """Cancel the timers, and return whether the time limit ended the run."""
        for timer in self.timers:
            timer.cancel()
        return self.stopped


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ROOMS, *GATES]
    parser.add_argument("names", nargs="*", metavar="NAME", help="slices and gates")
    parser.add_argument("--minutes", type=float, default=30.0, help="the time box of all of them")
    parser.add_argument("--list", action="store_true", help="print the names and their commands")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in names:
            parser.error(f"NAME: got {name!r}, allowed: {', '.join(names)}")
    if options.list:
        print("\n".join(f"{name}: {shlex.join(command_of(name))}" for name in names))
        return 0
    chosen = options.names or of_this_commit()
    end, outcomes = time.monotonic() + 60 * options.minutes, []
    for number, name in enumerate(chosen):
        # Later runs may use the time that earlier runs did not need.
        share = (end - time.monotonic()) / (len(chosen) - number)
        print(f"fastbert: {name}, for at most {share / 60:.0f} minutes", flush=True)
        outcomes.append(run(name, command_of(name), share))
    print(f"fastbert: {'; '.join(map(str, outcomes))}", flush=True)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
