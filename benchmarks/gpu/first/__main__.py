"""Find out within eight minutes on a GPU which kernels run and are right, and how fast they are.

    python -m benchmarks.gpu.first --out out/gpu-first    # or: make gpu-first
    python -m benchmarks.gpu.first --built                # with the extension that is there
    python -m benchmarks.gpu.first --rehearse             # the same plan on a machine without a GPU
    python -m benchmarks.gpu.first --rehearse --faults    # a rehearsal with inserted mistakes

Each step has its own time limit and runs in separate processes. If a step fails or runs out of
time, the next step still runs. Each row of a result is added to ``rows.jsonl`` as soon as it is
known, and a summary of one screen is printed last. The exit status is 1 if a step is not ok, and 2
if the machine has no CUDA device. A rehearsal runs every step on tiny shapes: Triton's kernels run
on the PTX machine, and the backend "cpu" replaces CUDA C++. With ``--faults``, some calls of this
backend hang, refuse a launch or compute wrong results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.first import screen
from benchmarks.gpu.first.plan import LIMIT_S, PATIENCE, steps
from benchmarks.gpu.first.run import OK, play


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/gpu-first"), help="folder that receives the results"
    )
    parser.add_argument(
        "--built", action="store_true", help="use the extension that is there, and build none"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument(
        "--faults", action="store_true", help="with --rehearse: a hang, a refusal, a wrong result"
    )
    arguments = parser.parse_args()
    if arguments.faults and not arguments.rehearse:
        parser.error("--faults: got the flag without --rehearse, allowed: with --rehearse")
    if not arguments.rehearse and not has_gpu():
        print(
            "benchmarks.gpu.first: this machine has no CUDA device, so nothing was run; --rehearse "
            "runs the plan on tiny shapes",
            file=sys.stderr,
        )
        return 2
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plan = steps(
            folder,
            rehearsal=arguments.rehearse,
            faults=arguments.faults,
            built=arguments.built,
        )
        limit_s = LIMIT_S * (PATIENCE if arguments.rehearse else 1)
        rows = screen.Rows(folder)
        outcomes = play(plan, Path(scratch), limit_s, keep_row=rows.add)
    missed = [] if arguments.rehearse else screen.never_launched(outcomes, shipped_kernels())
    text = screen.screen(outcomes, missed)
    screen.write(outcomes, folder, text)
    print("\n".join(["", *text]))
    return 0 if all(outcome.result == OK for outcome in outcomes) else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def shipped_kernels() -> list[str]:
    """Return the names of the Triton launches that ship, once each."""
    from fastbert.testing.shipped_launches import all_launches

    return sorted({launch.name for launch in all_launches()})


if __name__ == "__main__":
    sys.exit(main())
