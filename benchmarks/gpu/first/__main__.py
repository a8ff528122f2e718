"""The first contact with a GPU: within eight minutes, what runs, what is right and how fast it is.

    python -m benchmarks.gpu.first --out out/gpu-first    # or: make gpu-first
    python -m benchmarks.gpu.first --rehearse             # the same plan on a machine without a GPU
    python -m benchmarks.gpu.first --rehearse --faults    # and the stand-in for CUDA C++ is faulty

Each step has its own limit and runs in processes of its own. A step that fails, or that runs out of
time, does not stop the next one. Each row of a result is added to ``rows.jsonl`` as soon as it is
known, and the screen of results is printed last. The exit status is 1 if a step is not ok, and 2 if
the machine has no CUDA device. A rehearsal runs every step on tiny shapes: Triton's kernels on the
PTX machine, all else on the CPU. With ``--faults``, the CPU's kernels that stand in for CUDA C++
hang, refuse a launch or compute wrong results.
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
        plan = steps(folder, rehearsal=arguments.rehearse, faults=arguments.faults)
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
