"""Run quick and random cases of every operation on compiled GPU kernels, without a GPU.

    python tests/ptx/emulate_all.py [--cases 2] [--out out/emulate]    # or: make emulate

The cases run on the PTX machine for sm_80 and sm_90, with the Triton kernels and, if nvcc exists,
with the CUDA C++ kernels. Each case runs with two schedules. Schedule 0 runs warps in order and
asynchronous operations immediately; schedule 1 shuffles both. Approximate instructions have the
largest error of the PTX manual, downwards in schedule 0 and upwards in schedule 1. The results are
written to emulation.json and emulation.md. The exit status is 1 if a run fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastbert import json_file
from fastbert.testing import emulation
from fastbert.testing.emulation import EmulatedRun, Selection, emulate, summarize
from fastbert.testing.random_cases import TURNS

# Each pair is a schedule and the share, with sign, of the documented error of approximate
# instructions.
SCHEDULES = ((0, -1.0), (1, 1.0))
# The CUDA C++ kernels support only about 1 of 15 random attention cases, so more random attention
# cases are drawn.
ATTENTION = ("attention", "attention_varlen", "attention_qkvpacked")
DRAWN = 100


def selections(backends: tuple[str, ...], random: int) -> list[Selection]:
    """Return the selections to run; `random` is the number of random cases per operation."""
    chosen = []
    for arch in emulation.ARCHITECTURES:
        # The schedules of an architecture are adjacent, so the second one needs no compilation.
        for schedule, approximate in SCHEDULES:
            common = {"schedule": schedule, "approximate": approximate}
            chosen.append(Selection(arch, backends, quick=True, **common))
            if random:
                chosen.append(Selection(arch, backends, random=random * len(TURNS), **common))
            for op in ATTENTION if "cuda" in backends else ():
                chosen.append(Selection(arch, ("cuda",), op, **common))
                if random:
                    chosen.append(Selection(arch, ("cuda",), op, random=DRAWN * random, **common))
    return chosen


def run_all(chosen: list[Selection]) -> list[EmulatedRun]:
    """Run all selections, and print a line for each run."""
    runs = []
    for run in emulate(chosen, processes=os.cpu_count() or 1):
        runs.append(run)
        result = f"ratio {run.ratio:.2f}" if run.passed else f"FAILED {run.fault}"
        print(
            f"[{run.number}/{run.total}] {run.arch} {run.op} {run.case} {run.backend} {run.dtype} "
            f"schedule {run.schedule}: {result} ({run.seconds:.1f} + {run.compile_seconds:.1f} s)",
            flush=True,
        )
    return runs


def page(runs: list[EmulatedRun], seconds: float) -> str:
    """Return Markdown with a summary, and a table row for each operation, backend and dtype."""
    rows: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for line in summarize(runs):
        rows.setdefault((line["op"], line["backend"], line["dtype"]), {})[line["arch"]] = line
    failed = sum(not run.passed for run in runs)
    launches = sum(sum(run.launches.values()) for run in runs)
    heading = " | ".join(
        f"{arch}: cases · launches · ratio · s" for arch in emulation.ARCHITECTURES
    )
    lines = [
        "# Emulation: the compiled kernels on the PTX machine",
        "",
        f"`make emulate`, Triton {version('triton')}, torch {version('torch')}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, "
        f"{time.strftime('%Y-%m-%d')}: {len(runs)} runs with {launches} launches in "
        f"{seconds / 60:.1f} minutes, {failed or 'none'} of them failed.",
        "",
        "A case runs on two schedules, and its launches on both are counted. Approximate "
        "instructions err by the largest error in the PTX manual, downwards on the first schedule "
        "and upwards on the second. The ratio is the worst error of a tensor, divided by that of "
        "plain PyTorch in the same dtype. The seconds "
        "are those of the PTX machine and of the float64 reference, without compilation.",
        "",
        f"| operation | backend | dtype | {heading} |",
        "|---|---|---|" + "---|" * len(emulation.ARCHITECTURES),
    ]
    for (op, backend, dtype), by_arch in rows.items():
        cells = [_cell(by_arch.get(arch)) for arch in emulation.ARCHITECTURES]
        lines.append(f"| `{op}` | {backend} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "–"
    result = "" if line["passed"] else " FAILED"
    counts = f"{line['cases']} · {line['launches']}"
    return f"{counts} · {line['ratio']:.2f} · {line['seconds']:.1f}{result}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2, help="random cases of each operation")
    parser.add_argument("--out", type=Path, default=Path("out/emulate"), help="folder of the files")
    options = parser.parse_args()
    reasons = {name: emulation.obstacle(name) for name in emulation.BACKENDS}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"the backend {name} is left out: {reason}", flush=True)
    backends = tuple(name for name, reason in reasons.items() if reason is None)
    if not backends:
        parser.error("no backend can run here")
    start = time.monotonic()
    runs = run_all(selections(backends, options.cases))
    text = page(runs, time.monotonic() - start)
    options.out.mkdir(parents=True, exist_ok=True)
    results = json_file.text({"summary": summarize(runs), "runs": runs})
    (options.out / "emulation.json").write_text(results, encoding="utf-8")
    (options.out / "emulation.md").write_text(text, encoding="utf-8")
    print(text)
    for run in runs:
        if not run.passed:
            print(f"FAILED {run.fault or [row.detail for row in run.rows if not row.passed]}")
            print(f"  reproduce: {run.command}")
    return 0 if all(run.passed for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
