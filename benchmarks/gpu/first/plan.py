"""The steps of the first contact with a GPU, in the order of their value, with their limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fastbert.testing.cases import OPS

# Seconds of the whole plan.
LIMIT_S = 480
PROCESSES = 16
RERUNS = 20
SMOKE, TIMES = "benchmarks.gpu.first.smoke", "benchmarks.gpu.bench"
GRAPHS = "benchmarks.gpu.first.graphs"
# Without its cache, PyTorch's allocations lie apart, so that memcheck sees an access between them.
UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
# The operation that `fastbert check` calls bert is the whole model.
CHECKED = (*OPS, "bert")


@dataclass(frozen=True)
class Step:
    """Commands that run at the same time, in processes of their own.

    Args:
        name: Name of the step.
        about: The question that the step answers.
        commands: The commands, each as its words.
        limit_s: Seconds after which the commands are ended.
        after: Name of a step in the background that must succeed before; empty if there is none.
        background: Whether the next step starts at once.
        environment: Variables of the commands.
    """

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    limit_s: int
    after: str = ""
    background: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def steps(folder: Path, *, rehearsal: bool = False) -> list[Step]:
    """Return the plan.

    Args:
        folder: Folder for what the steps write.
        rehearsal: Whether the steps run tiny shapes on a machine without a GPU.

    Returns:
        The steps in the order of their start. The limits of those in the foreground add up to at
        most ``LIMIT_S``.
    """
    python = sys.executable
    info = (python, "-m", "fastbert", "info")
    build = (python, "setup.py", "--quiet", "build_ext", "--inplace")
    compiler = (python, "-m", "fastbert.testing.ahead_of_time", "--arch", "90")
    times = (python, "-m", TIMES, "first-attention", "--minutes", "0.7", "--out", str(folder))
    graphs = (python, "-m", GRAPHS, *(("--rehearse",) * rehearsal))
    arch = (("TORCH_CUDA_ARCH_LIST", "9.0a"), ("MAX_JOBS", "8"), ("FASTBERT_CUDA", "1"))
    return [
        Step("machine", "the device and the versions", (info,), 20),
        Step(
            "build", "the extension with its CUDA kernels", (info if rehearsal else build,), 300,
            background=True, environment=arch,
        ),
        Step(
            "compile", "every shipped Triton launch, into Triton's cache",
            ((*compiler, "--processes", str(PROCESSES), *(("--only", "delta") * rehearsal)),), 70,
        ),
        Step(
            "smoke", f"each Triton kernel {RERUNS} times with equal bits",
            _smokes("triton", rehearsal), 80,
        ),
        Step("check-bfloat16", "parity of every operation", _checks("bfloat16", rehearsal), 60),
        # By now, the build has usually ended, so that attention in CUDA C++ takes part.
        Step(
            "attention", "forward and backward beside SDPA",
            ((*times, *(("--toy",) * rehearsal)),), 50,
        ),
        Step(
            "graphs", "CUDA graphs of inference and of training steps beside plain calls",
            (graphs,), 90, background=True,
        ),
        Step(
            "smoke-cuda", f"each CUDA C++ kernel {RERUNS} times with equal bits",
            _smokes("cuda", rehearsal), 30, after="build",
        ),
        Step(
            "sanitizer", "memcheck and racecheck of the Triton kernels on quick cases",
            _sanitizers("triton", rehearsal), 70, environment=(UNCACHED,),
        ),
        Step(
            "sanitizer-cuda", "memcheck and racecheck of the CUDA C++ kernels on quick cases",
            _sanitizers("cuda", rehearsal), 30, after="build", environment=(UNCACHED,),
        ),
        Step("check-float32", "parity of every operation", _checks("float32", rehearsal), 60),
    ]  # fmt: skip


def _smokes(backend: str, rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    """Return a command per shard; each runs every n-th case."""
    # A rehearsal runs the compiled Triton kernels on the PTX machine, and no CUDA C++ kernel.
    shards = 1 if rehearsal else PROCESSES
    command = (sys.executable, "-m", SMOKE, "--backend", "cpu" if rehearsal else backend)
    if rehearsal and backend == "triton":
        command = (*command[:-1], "triton", "--emulate", "90", "--op", "layer_norm", "--quick")
    elif rehearsal:
        command = (*command, "--op", "layer_norm", "--quick")
    reruns = 2 if rehearsal else RERUNS
    return tuple(
        (*command, "--reruns", str(reruns), "--shard", f"{n}/{shards}") for n in range(shards)
    )


def _checks(dtype: str, rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    """Return a command per operation."""
    command = (sys.executable, "-m", "fastbert", "check", "--json", "--dtype", dtype)
    if rehearsal:
        return ((*command, "--op", "layer_norm", "--case", "plain", "--backend", "cpu"),)
    return tuple((*command, "--op", op) for op in CHECKED)


def _sanitizers(backend: str, rehearsal: bool) -> tuple[tuple[str, ...], ...]:
    smoke = (sys.executable, "-m", SMOKE, "--quick", "--reruns", "0", "--dtype", "bfloat16")
    options = ("--backend", "cpu", "--op", "layer_norm") if rehearsal else ("--backend", backend)
    tools = {"memcheck": (), "racecheck": ("--racecheck-report", "all")}
    common = ("--error-exitcode", "86", "--print-limit", "20")
    return tuple(
        ("compute-sanitizer", "--tool", tool, *more, *common, *smoke, *options)
        for tool, more in tools.items()
    )
