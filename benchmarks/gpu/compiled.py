"""Compile every shipped Triton launch ahead of time and print the properties of the binaries.

    python -m benchmarks.gpu.compiled [--arch 90] [--out out/gpu]

This needs no GPU. The exit status is 1 if a launch spills registers, does not use the matrix units,
or has another fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from fastbert.bench.machine import describe
from fastbert.testing import ahead_of_time

HEADING = (
    f"{'kernel':<28} {'dtype':<9} {'arch':<7} {'registers':>9} {'stack B':>7} {'shared B':>8}  unit"
)


def compile_all(
    architectures: Sequence[int], notify: Callable[[str], None] = print
) -> list[ahead_of_time.Compiled]:
    """Compile every launch and print a line for each finished launch."""
    notify(HEADING)
    found = []
    for one in ahead_of_time.compile_launches(architectures, processes=os.cpu_count() or 1):
        notify(line(one))
        found.append(one)
    return found


def line(one: ahead_of_time.Compiled) -> str:
    text = (
        f"{one.name:<28} {one.dtype:<9} sm_{one.arch:<4} {one.registers:>9} {one.stack:>7} "
        f"{one.shared:>8}  {one.matrix}"
    )
    return f"{text}  FAULT: {'; '.join(one.faults)}" if one.faults else text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ahead_of_time.ARCHITECTURES
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=known, default=list(known), help="90 is sm_90"
    )
    parser.add_argument("--out", type=Path, help="folder that receives compile.json")
    arguments = parser.parse_args()
    found = compile_all(arguments.arch)
    faulty = [one for one in found if one.faults]
    print(f"{len(found)} launches compiled, {len(faulty)} with faults")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {"machine": asdict(describe()), "launches": [asdict(one) for one in found]}
        path = arguments.out / "compile.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if faulty or not found else 0


if __name__ == "__main__":
    sys.exit(main())
