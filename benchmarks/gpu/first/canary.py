"""Run one small case of a family of CUDA C++ kernels, forward and backward, within five seconds.

    python -m benchmarks.gpu.first.canary --family attention

The first quick case of the family runs. The program prints one JSON object before the run, and one
with the result after the run. The exit status is 0 if the case passed, and 1 if it failed or the
backend serves no quick case. If the case took longer than the limit, the exit status is ``HUNG``,
and later steps skip the family.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.first import smoke
from benchmarks.gpu.first.watch import limited
from fastbert.ops import backend as backends

# Seconds that the case may take, not counting the start of the process and of the device.
LIMIT_S = 5.0
HUNG = 3
MARK = "canary"
OK, FAILED, HANGS = "ok", "FAILED", "hangs"
FAMILIES = tuple(name for name, table in backends.TABLES.items() if "cuda" in table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--backend", choices=backends.BACKENDS, default="cuda")
    parser.add_argument("--dtype", choices=smoke.DTYPES, default="bfloat16")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the case")
    options = parser.parse_args()
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the case, print the result, and return the exit status; a hang ends the process."""
    device = "cuda" if options.backend == "cuda" else "cpu"
    options = argparse.Namespace(
        **vars(options), op=None, quick=True, shard="0/1", reruns=0, emulate=None
    )
    said: dict[str, Any] = {MARK: options.family, "backend": options.backend, "result": "started"}
    cases = smoke.selected(options, device)
    if not cases:
        smoke.say({**said, "result": FAILED, "faults": ["no quick case is served"]})
        return 1
    said |= {"op": cases[0].op, "case": cases[0].name}
    if device == "cuda":
        torch.ones(1, device=device).cpu()
    smoke.say(said)
    start = time.monotonic()

    def hangs() -> None:
        smoke.say({**said, "result": HANGS, "faults": [f"no end after {options.limit} s"]})
        os._exit(HUNG)

    with limited(options.limit, hangs):
        faults = smoke.tried(cases[0], options, device)["faults"]
    seconds = round(time.monotonic() - start, 2)
    smoke.say({**said, "result": FAILED if faults else OK, "faults": faults, "seconds": seconds})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
