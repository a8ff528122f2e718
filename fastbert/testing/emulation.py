"""Run cases on the compiled GPU kernels, on the PTX machine, in separate processes.

`emulate` starts this module as a program. The program compiles the kernels of each case and runs
them forward and backward on CPU tensors. It judges every tensor by the tolerance rule, and prints a
JSON object for each run. A separate process is needed, because Triton decides at import whether
@jit interprets.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert.ops import backend as backends
from fastbert.testing import model_parity, parity
from fastbert.testing.cases import Case
from fastbert.testing.parity import ParityRow
from fastbert.testing.ptx import cuda_operators as cuda
from fastbert.testing.ptx.triton_launches import STAND_IN, Emulator, serving_triton
from ptxmachine import PtxFault, PtxSyntaxError, Report

ARCHITECTURES = ("sm_80", "sm_90")
BACKENDS = ("triton", "cuda")


class Selection(NamedTuple):
    """A selection of cases to run on the PTX machine.

    Args:
        arch: "sm_80" or "sm_90".
        backends: Some of "triton" and "cuda".
        op: The only operation, or "bert" for the whole model. None selects all operations and, if
            "triton" is among `backends`, the whole model.
        case: Name of a case; None is all registered cases.
        dtype: Name of the only dtype; None is fp32, fp16 and bf16.
        quick: Whether only the cases of the quick selection run.
        random: Number of random cases, which then replace the registered cases.
        seed: Seed of the inputs or of the random cases, as in `parity.check`.
        schedule: Seed of the PTX machine. With 0, warps run one after another and asynchronous
            operations take effect at once. Another number chooses the order of the warps, and for
            each asynchronous operation whether it takes effect at once or at its wait.
        approximate: Share of the documented error that approximate instructions make, from -1 to 1.
    """

    arch: str
    backends: Sequence[str] = BACKENDS
    op: str | None = None
    case: str | None = None
    dtype: str | None = None
    quick: bool = False
    random: int = 0
    seed: int = 0
    schedule: int = 1
    approximate: float = 0.0


@dataclass(frozen=True)
class EmulatedRun:
    """One case on one backend in one dtype, on the PTX machine.

    Args:
        arch: "sm_80" or "sm_90".
        op: Name of the operation.
        case: Name of the case.
        backend: "triton" or "cuda".
        dtype: Dtype of the inputs, such as "bfloat16".
        schedule: Seed of the PTX machine.
        approximate: Share of the documented error that approximate instructions made.
        launches: Number of launches by name.
        seconds: Time of the run in seconds, including the oracle (the reference in float64) and
            excluding compilation.
        compile_seconds: Time in seconds of Triton's compilation, or of reading its results from a
            cache; 0 for "cuda", which is compiled before the runs.
        rows: The comparison of each tensor; empty after a fault.
        fault: The fault of the PTX machine or the ValueError that ended the run, in words; "" if
            the run was complete.
        command: The command line that runs the case again.
        number: Position of the run, from 1.
        total: Number of runs of the program.
    """

    arch: str
    op: str
    case: str
    backend: str
    dtype: str
    schedule: int
    approximate: float
    launches: dict[str, int]
    seconds: float
    compile_seconds: float
    rows: list[ParityRow]
    fault: str
    command: str
    number: int = 0
    total: int = 0

    @property
    def passed(self) -> bool:
        """Whether there is no fault and every tensor passes."""
        return not self.fault and all(row.passed for row in self.rows)

    @property
    def ratio(self) -> float:
        """The largest ratio of a tensor's error to the yardstick's error; 0 after a fault."""
        return max((row.ratio for row in self.rows), default=0.0)


def obstacle(backend: str) -> str | None:
    """Return the reason why the PTX machine cannot run a backend here, or None.

    Args:
        backend: "triton" or "cuda".
    """
    if backend == "cuda":
        return cuda.obstacle()
    return None if backends.HAS_TRITON else "triton is not installed"


def emulate(
    selections: Sequence[Selection], processes: int = 2, cache: Path | None = None
) -> Iterator[EmulatedRun]:
    """Run cases on the PTX machine.

    Args:
        selections: The selections, which run one after another.
        processes: Number of processes that compile and run.
        cache: Folder of Triton's cache; None is Triton's default.

    Yields:
        The runs, as soon as each is done.

    Raises:
        ValueError: If a selection is unknown or contradictory, or if a backend cannot run here.
        RuntimeError: If the program fails. The message is the end of its standard error.
    """
    for arch, chosen in ((selection.arch, selection.backends) for selection in selections):
        if arch not in ARCHITECTURES:
            raise ValueError(f"arch: got {arch!r}, allowed: {', '.join(ARCHITECTURES)}")
        for backend in chosen:
            if backend not in BACKENDS:
                raise ValueError(f"backend: got {backend!r}, allowed: {', '.join(BACKENDS)}")
            reason = obstacle(backend)
            if reason is not None:
                raise ValueError(f"backend: {backend!r} cannot run on {STAND_IN}: {reason}")
    for share in (selection.approximate for selection in selections):
        if not -1 <= share <= 1:
            raise ValueError(f"approximate: got {share:g}, allowed: -1 to 1")
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    command = [sys.executable, "-m", "fastbert.testing.emulation", str(processes), str(threads)]
    command.append(json.dumps([selection._asdict() for selection in selections]))
    environment = {
        **backends.compiler_environment(cache),
        # Cases run on the CPU, also where there is a GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
    }
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as run,
    ):
        assert run.stdout is not None
        try:
            for line in run.stdout:
                content = json.loads(line)
                if "refused" in content:
                    raise ValueError(content["refused"])
                yield from_json(content)
        except BaseException:
            run.terminate()
            raise
        if run.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"emulation: {errors.read()[-4000:]}")


def from_json(content: dict[str, Any]) -> EmulatedRun:
    """Return the run of a JSON object that the program printed."""
    rows = [ParityRow(**row) for row in content["rows"]]
    return EmulatedRun(**{**content, "rows": rows})


def summarize(runs: Sequence[EmulatedRun]) -> list[dict[str, Any]]:
    """Sum up the runs by operation, backend, dtype and architecture.

    Args:
        runs: The runs, in any order.

    Returns:
        A dict for each group, sorted by operation, backend, dtype and architecture. Each dict has
        the numbers of cases and launches, the largest ratio, the seconds of the runs and of
        compilation, and whether all runs pass.
    """
    groups: dict[tuple[str, str, str, str], list[EmulatedRun]] = {}
    for run in runs:
        groups.setdefault((run.op, run.backend, run.dtype, run.arch), []).append(run)
    return [
        {
            "op": op,
            "backend": backend,
            "dtype": dtype,
            "arch": arch,
            "cases": len({run.case for run in group}),
            "launches": sum(sum(run.launches.values()) for run in group),
            "ratio": max(run.ratio for run in group),
            "seconds": sum(run.seconds for run in group),
            "compile_seconds": sum(run.compile_seconds for run in group),
            "passed": all(run.passed for run in group),
        }
        for (op, backend, dtype, arch), group in sorted(groups.items())
    ]


# The program


class _Job(NamedTuple):
    case: Case
    backend: str
    dtype: torch.dtype
    arch: str
    seed: int
    schedule: int
    approximate: float
    threads: int


# The compiled CUDA C++ operators by architecture. The child processes inherit them.
_operators: dict[str, cuda.CompiledOperators] = {}


def _jobs(selection: Selection, threads: int) -> list[_Job]:
    dtype = None if selection.dtype is None else getattr(torch, selection.dtype)
    model = model_parity.CASE
    planned: list[tuple[Case, str, torch.dtype]] = []
    refusals = []
    for backend in selection.backends if selection.op != model.op else ():
        with backends.standing_in(STAND_IN, backend):
            try:
                runs = parity.plan(
                    selection.op, backend, dtype, selection.case, selection.quick,
                    selection.random, selection.seed,
                )  # fmt: skip
            except ValueError as error:
                refusals.append(error)
                continue
        planned += [(case, backend, kind) for case, _, kind, _ in runs]
    whole = selection.op in (None, model.op) and selection.case in (None, model.name)
    if whole and not selection.random and "triton" in selection.backends:
        kinds = parity.DTYPES if dtype is None else (dtype,)
        planned += [(model, "triton", kind) for kind in kinds]
    if not planned:
        allowed = "allowed: op='bert' with triton, without random cases"
        raise refusals[0] if refusals else ValueError(f"op: got {selection.op!r}, {allowed}")
    # A random case has the seed in its name, and always the inputs of seed 0.
    seed = 0 if selection.random else selection.seed
    arch, schedule, approximate = selection.arch, selection.schedule, selection.approximate
    return [_Job(*run, arch, seed, schedule, approximate, threads) for run in planned]


def _comparisons(job: _Job) -> list[ParityRow]:
    """Run a case, or a training step of the whole model, and judge every tensor."""
    if job.case.op == model_parity.CASE.op:
        return list(model_parity.check_model(job.backend, job.dtype, job.seed))
    results = parity.check_case(job.case, job.backend, job.dtype, seed=job.seed)
    return [
        parity.parity_row(job.case, job.backend, job.dtype, result, job.seed) for result in results
    ]


def _run(job: _Job) -> EmulatedRun:
    """Run one job on ``job.threads`` threads."""
    torch.set_num_threads(job.threads)
    arch = int(job.arch.removeprefix("sm_"))
    options = {"seed": job.schedule, "threads": job.threads, "approximate": job.approximate}
    emulator = Emulator(arch, **options)
    reports: list[tuple[str, Report]] = emulator.reports
    serving: AbstractContextManager[None] = serving_triton(arch, emulator.run)
    if job.backend == "cuda":
        operators = _operators[job.arch]
        operators.options, reports = options, operators.compiled.reports
        reports.clear()
        serving = cuda.serving_cuda(operators)
    start, rows, fault = time.monotonic(), [], ""
    command = job.case.command(job.backend, job.dtype, job.seed)
    command += f" --emulate {job.arch} --schedule {job.schedule}"
    if job.approximate:
        command += f" --approximate {job.approximate:g}"
    try:
        with serving:
            rows = [replace(row, command=command) for row in _comparisons(job)]
    except (PtxFault, PtxSyntaxError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
    return EmulatedRun(
        arch=job.arch,
        op=job.case.op,
        case=job.case.name,
        backend=job.backend,
        dtype=backends.dtype_name(job.dtype),
        schedule=job.schedule,
        approximate=job.approximate,
        launches=dict(Counter(name for name, _ in reports)),
        seconds=time.monotonic() - start - emulator.compile_seconds,
        compile_seconds=emulator.compile_seconds,
        rows=rows,
        fault=fault,
        command=command,
    )


def _print(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def main() -> None:
    """Run the selections of the arguments, and print a JSON object for each run."""
    processes, threads = int(sys.argv[1]), int(sys.argv[2])
    selections = [Selection(**content) for content in json.loads(sys.argv[3])]
    # With this setting, torch fills new memory with NaN, which shows elements that no kernel wrote.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        jobs = [job for selection in selections for job in _jobs(selection, threads)]
    except ValueError as error:
        _print({"refused": str(error)})
        return
    with tempfile.TemporaryDirectory(prefix="fastbert-emulate-") as folder:
        for arch in {job.arch for job in jobs if job.backend == "cuda"}:
            _operators[arch] = cuda.CompiledOperators(Path(folder), int(arch.removeprefix("sm_")))
        # The children are forked, so that they already have the CUDA C++ operators.
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            for number, result in enumerate(pool.imap_unordered(_run, jobs), 1):
                _print(asdict(replace(result, number=number, total=len(jobs))))


if __name__ == "__main__":
    main()
