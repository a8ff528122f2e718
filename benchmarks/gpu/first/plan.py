"""The steps of the first contact with a GPU, the most valuable first, with their time limits.

All steps with Triton's kernels precede the steps with CUDA C++, so that a CUDA C++ kernel that
hangs the device loses no row of Triton. The first step with CUDA C++ is the canary: it runs one
small case of each family of kernels.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.first.canary import FAMILIES
from benchmarks.gpu.sections import HAS_HOPPER
from fastbert.ops import backend as backends
from fastbert.testing.cases import OPS, TABLE_OF

# Seconds that the whole plan may take.
LIMIT_S = 480
PROCESSES = 16
RERUNS = 20
SMOKE, TIMES = "benchmarks.gpu.first.smoke", "benchmarks.gpu.bench"
GRAPHS, CANARY = "benchmarks.gpu.first.graphs", "benchmarks.gpu.first.canary"
FAULTS = "benchmarks.gpu.first.faults"
# Without PyTorch's caching allocator, each tensor is a separate allocation, so that memcheck
# detects an access between two tensors.
UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
# The operations that have Triton kernels. What `fastbert check` calls bert is the whole model.
CHECKED = (*(op for op in OPS if "triton" in backends.TABLES[TABLE_OF[op]]), "bert")
# Seconds for one case under compute-sanitizer, which slows kernels down.
SANITIZED_CASE_LIMIT_S = 20
# The time limits of a rehearsal are longer by this factor, because its processors are slower than a
# GPU and may be busy.
PATIENCE = 20
REHEARSED_CASE_LIMIT_S = 240
PATIENT = ("--limit", str(REHEARSED_CASE_LIMIT_S))
# For these families, a rehearsal checks only the named case. For other families, it checks all
# quick cases.
REHEARSED_CASES = {"attention": "plain", "layer_norm": "residual"}


@dataclass(frozen=True)
class Step:
    """Commands that run at the same time, in processes of their own.

    Args:
        name: Name of the step.
        about: Short description of the step.
        commands: The commands; each is a tuple of its words.
        limit_s: Seconds after which the commands are ended.
        after: Name of a step that must succeed before this step starts; empty if there is none. If
            the named step has families, each command depends only on the command of its family.
        background: Whether the next step starts before this step has ended.
        environment: Environment variables of the commands, as pairs of a name and a value.
        families: Family of CUDA C++ kernels of each command; empty if the step has none.
    """

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    limit_s: int
    after: str = ""
    background: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    families: tuple[str, ...] = ()


def steps(
    folder: Path, *, rehearsal: bool = False, faults: bool = False, built: bool = False
) -> list[Step]:
    """Return the steps of the first contact with a GPU, or of its rehearsal.

    Args:
        folder: Folder for the files that the steps write.
        rehearsal: Whether the steps run tiny shapes on a machine without a GPU.
        faults: Whether the backend that replaces CUDA C++ in a rehearsal has the mistakes that
            ``faults.py`` inserts.
        built: Whether the extension is there already, so that the step "build" only asks whether
            it has the kernels of this GPU.

    Returns:
        The steps in the order of their start. The limits of the foreground steps add up to at most
        ``LIMIT_S``; in a rehearsal, to ``PATIENCE`` times as much.
    """
    python = sys.executable
    info = (python, "-m", "fastbert", "info")
    build = (python, "setup.py", "--quiet", "build_ext", "--inplace")
    if built:
        build = (python, "-c", HAS_HOPPER)
    compiler = (python, "-m", "fastbert.testing.ahead_of_time", "--arch", "90")
    graphs = (python, "-m", GRAPHS, *(("--rehearse",) * rehearsal))
    cuda = _Cuda(rehearsal, faults)
    arch = (("TORCH_CUDA_ARCH_LIST", "9.0a"), ("MAX_JOBS", "8"), ("FASTBERT_CUDA", "1"))
    plan = [
        Step("machine", "the device and the versions", (info,), 20),
        Step(
            "build", "the extension with its CUDA kernels", (info if rehearsal else build,), 300,
            background=True, environment=arch,
        ),
        Step(
            "compile", "every shipped Triton launch, into Triton's cache",
            ((*compiler, "--processes", str(PROCESSES), *(("--only", "delta") * rehearsal)),), 60,
        ),
        Step(
            "smoke", f"each Triton kernel {RERUNS} times with equal bits",
            _smokes(rehearsal), 70,
        ),
        Step(
            "check-bfloat16", "parity of every operation of Triton",
            _checks("bfloat16", rehearsal), 50,
        ),
        Step(
            "attention", "forward and backward of Triton beside SDPA",
            (_times("first-attention", folder, 0.4, rehearsal),), 35,
        ),
        Step(
            "graphs", "CUDA graphs of inference and of training steps beside plain calls",
            (graphs,), 90, background=True,
        ),
        Step(
            "check-float32", "parity of every operation of Triton",
            _checks("float32", rehearsal), 45,
        ),
        Step(
            "sanitizer", "memcheck and racecheck of the Triton kernels on quick cases",
            _sanitizers(rehearsal), 50, environment=(UNCACHED,),
        ),
        _cuda_step(
            "canary", "one case of each family of CUDA C++ kernels within five seconds",
            cuda.canary, 15, after="build",
        ),
        _cuda_step(
            "smoke-cuda", f"each CUDA C++ kernel {RERUNS} times with equal bits", cuda.smokes, 25
        ),
        _cuda_step("check-cuda", "parity of every operation of CUDA C++", cuda.checks, 40),
        _cuda_step(
            "attention-cuda", "forward and backward of CUDA C++ beside SDPA",
            lambda family: [_times("first-attention-cuda", folder, 0.3, rehearsal)], 25,
            families=("attention",),
        ),
        _cuda_step(
            "sanitizer-cuda", "memcheck and racecheck of the CUDA C++ kernels on quick cases",
            cuda.sanitizers, 30, environment=(UNCACHED,),
            families=("layer_norm",) if rehearsal else FAMILIES,
        ),
    ]  # fmt: skip
    if not rehearsal:
        return plan
    return [dataclasses.replace(step, limit_s=PATIENCE * step.limit_s) for step in plan]


def _cuda_step(
    name: str,
    about: str,
    commands_of: Callable[[str], Iterable[tuple[str, ...]]],
    limit_s: int,
    after: str = "canary",
    environment: tuple[tuple[str, str], ...] = (),
    families: tuple[str, ...] = FAMILIES,
) -> Step:
    """Return a step with the commands of each family of CUDA C++ kernels."""
    pairs = [(family, command) for family in families for command in commands_of(family)]
    return Step(
        name, about, tuple(command for _, command in pairs), limit_s, after,
        environment=environment, families=tuple(family for family, _ in pairs),
    )  # fmt: skip


def _smokes(rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    """Return a command per shard, which runs every n-th case; a rehearsal has a single command."""
    command = (sys.executable, "-m", SMOKE, "--backend", "triton")
    if rehearsal:
        # A rehearsal runs the compiled Triton kernels on the PTX machine, which takes minutes.
        command = (*command, "--emulate", "90", *PATIENT, "--op", "layer_norm", "--quick")
        return ((*command, "--reruns", "2"),)
    return tuple(
        (*command, "--reruns", str(RERUNS), "--shard", f"{n}/{PROCESSES}") for n in range(PROCESSES)
    )


def _checks(dtype: str, rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    """Return a command per operation; a rehearsal checks a single case of layer_norm."""
    command = (sys.executable, "-m", "fastbert", "check", "--json", "--dtype", dtype)
    if rehearsal:
        return ((*command, "--backend", "cpu", "--op", "layer_norm", "--case", "plain"),)
    return tuple((*command, "--backend", "triton", "--op", op) for op in CHECKED)


def _sanitizers(rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    options = ("--backend", "cpu", "--op", "layer_norm") if rehearsal else ("--backend", "triton")
    return tuple(_sanitized(options, rehearsal))


def _sanitized(options: tuple[str, ...], rehearsal: bool) -> Iterator[tuple[str, ...]]:
    """Yield the command that runs smoke.py on quick cases, for each tool of compute-sanitizer."""
    smoke = (sys.executable, "-m", SMOKE, "--quick", "--reruns", "0", "--dtype", "bfloat16")
    limit = PATIENT if rehearsal else ("--limit", str(SANITIZED_CASE_LIMIT_S))
    tools = {"memcheck": (), "racecheck": ("--racecheck-report", "all")}
    common = ("--error-exitcode", "86", "--print-limit", "20")
    for tool, more in tools.items():
        yield ("compute-sanitizer", "--tool", tool, *more, *common, *smoke, *limit, *options)


def _times(section: str, folder: Path, minutes: float, rehearsal: bool) -> tuple[str, ...]:
    command = (sys.executable, "-m", TIMES, section, "--minutes", str(minutes))
    return (*command, "--out", str(folder), *(("--toy",) * rehearsal))


class _Cuda:
    """Makes the commands that each step runs for a family of CUDA C++ kernels.

    Args:
        rehearsal: Whether the backend "cpu" replaces CUDA C++.
        faults: Whether this backend has the mistakes that ``faults.py`` inserts.
    """

    def __init__(self, rehearsal: bool, faults: bool) -> None:
        self.rehearsal = rehearsal
        self.backend = ("--backend", "cpu" if rehearsal else "cuda")
        self.patient = PATIENT if rehearsal else ()
        self.python = (sys.executable, "-m", *((FAULTS,) * faults))

    def canary(self, family: str) -> Iterator[tuple[str, ...]]:
        yield (*self.python, CANARY, "--family", family, *self.backend, *self.patient)

    def smokes(self, family: str) -> Iterator[tuple[str, ...]]:
        """Yield a command per shard of the family's cases, or one command in a rehearsal."""
        command = (*self.python, SMOKE, "--family", family, *self.backend, "--reruns")
        if self.rehearsal:
            yield (*command, "2", "--quick", *self.patient)
            return
        shards = PROCESSES // len(FAMILIES)
        for number in range(shards):
            yield (*command, str(RERUNS), "--shard", f"{number}/{shards}")

    def checks(self, family: str) -> Iterator[tuple[str, ...]]:
        """Yield a command per operation of the family, or one command in a rehearsal."""
        command = (*self.python, "fastbert", "check", "--json", *self.backend)
        for op in (op for op in OPS if TABLE_OF[op] == family):
            if not self.rehearsal:
                yield (*command, "--op", op)
            elif op == family:
                case = ("--case", REHEARSED_CASES[op]) if op in REHEARSED_CASES else ("--quick",)
                yield (*command, "--op", op, "--dtype", "bfloat16", *case)

    def sanitizers(self, family: str) -> Iterator[tuple[str, ...]]:
        yield from _sanitized(("--family", family, *self.backend), self.rehearsal)
