"""Compile the Triton cases, instead of interpreting them, and run them on the PTX machine.

    python run_triton.py --arch 90 [--only TEXT] [--names NAME ...] [--seeds 0 1]

The program prints one JSON object for each case: its name, the architecture, the error or null, the
number of instructions, the matrix and copy instructions in the PTX, and the time in seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from typing import Any

import torch
import triton
from triton_cases import CASES, Case
from triton_launch import Launch

import ptxmachine as ptx

# These mnemonics are counted in the PTX. The counts show that a case has the instructions it tests.
NOTABLE = re.compile(
    r"\b(wgmma\.mma_async|mma\.sync|ldmatrix|stmatrix|cp\.async\.bulk\.tensor"
    r"|cp\.reduce\.async\.bulk\.tensor|tensormap\.replace|cp\.async(?!\.bulk)(?=\.c[ag])"
    r"|setmaxnreg|mbarrier\.try_wait|atom\.|red\.)"
)


def must_fault(launch: Launch, arch: int, seed: int, kind: str) -> None:
    kinds = []
    try:
        launch.run(arch, seed=seed)
    except ptx.PtxFault as fault:
        kinds.append(fault.kind)
    assert kinds == [kind], f"faults found: {kinds}, expected: {kind}"


def run(case: Case, arch: int, seeds: list[int]) -> dict[str, Any]:
    start, error, instructions, found = time.monotonic(), None, 0, set()
    try:
        for seed in seeds:
            torch.manual_seed(0)
            problem = case.make()
            found |= set(NOTABLE.findall(problem.launch.compiled(arch).asm["ptx"]))
            if case.breach:
                must_fault(problem.launch, arch, seed, case.breach[0])
            if not case.breach or case.breach[0] == "race":
                report = problem.launch.run(arch, seed=seed, races=not case.breach)
                instructions += report.counts["instructions"]
                problem.check()
    except Exception as problem:
        text = traceback.format_exception_only(problem)[-1].strip()
        error = (
            text[:600]
            if isinstance(problem, (AssertionError, RuntimeError, ValueError))
            else (traceback.format_exc()[-2000:])
        )
    return {
        "name": case.name, "arch": arch, "error": error, "breach": case.breach,
        "instructions": instructions,
        "notable": sorted(found), "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--names", nargs="*", help="whole names of cases; default: all")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET: got 1, allowed: unset; the interpreter compiles nothing")
    for case in CASES:
        named = options.names is None or case.name in options.names
        if named and options.arch in case.architectures and options.only in case.name:
            print(json.dumps(run(case, options.arch, options.seeds)), flush=True)


if __name__ == "__main__":
    main()
