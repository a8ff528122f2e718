"""Run one benchmark section: measure ceilings, time matches, and write a JSON file and a plot.

    python -m benchmarks.gpu.bench bench-attention --out out/gpu [--toy] [--minutes 8]
    python -m benchmarks.gpu.bench bench-gemm --out out/gpu --only fastbert "torch eager"

The rows of each match are printed as JSON, a line for each, as soon as the match has ended. With
``--only``, other contenders are left out, such as those that torch.compile compiles for half a
minute. ``--toy`` runs tiny shapes on the CPU, which tries every match and peer without a GPU; its
times mean nothing. The exit status is 1 if an implementation of fastbert is wrong or cannot run, or
if the benchmark calls a peer wrongly.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch

from benchmarks.gpu import attention, encoder, gemm, rows
from benchmarks.gpu.contest import Deadline, GpuRow, Setting, is_variant, play_all
from benchmarks.gpu.match import Match
from fastbert import json_file
from fastbert.bench.contest import to_dict
from fastbert.bench.limits import H200, Limits, limits_of
from fastbert.bench.plots import plot_matches
from fastbert.bench.timing import copy_rate, product_rate
from fastbert.machine import Machine, describe

Build = Callable[[Any, str], Iterator[Match]]
# For each section: builder of its matches, full size, toy size, and seconds of timing for a match.
SECTIONS: dict[str, tuple[Build, Any, Any, float]] = {
    "bench-attention": (attention.dense, attention.FULL, attention.TOY, 1.0),
    "bench-varlen": (attention.packed, attention.FULL, attention.TOY, 1.0),
    "bench-rows": (rows.matches, rows.FULL, rows.TOY, 1.0),
    "bench-gemm": (gemm.matches, gemm.FULL, gemm.TOY, 1.0),
    "bench-encoder": (encoder.inference, encoder.FULL, encoder.TOY, 2.0),
    "bench-training": (encoder.training, encoder.FULL, encoder.TOY, 6.0),
    "bench-latency": (encoder.latency, encoder.FULL, encoder.TOY, 1.0),
}
# The sections of `make gpu-first`; in `make gpu`, bench-attention has the same lengths. A CUDA C++
# kernel that hangs would lose all rows of its match, so Triton has a section of its own.
FIRST: dict[str, tuple[Build, Any, Any, float]] = {
    "first-attention": (attention.first, attention.FULL, attention.TOY, 1.0),
    "first-attention-cuda": (attention.first_cuda, attention.FULL, attention.TOY, 1.0),
}
# These errors mean that the benchmark calls an implementation wrongly. Other errors are refusals.
MISTAKES = ("TypeError", "AttributeError", "NameError", "KeyError", "IndexError", "UnboundLocal")
COPY_BYTES = 4 << 30
PRODUCT = 8192


def matches_of(section: str, device: str, *, toy: bool) -> list[Match]:
    build, full, small, _ = (SECTIONS | FIRST)[section]
    return list(build(small if toy else full, device))


def of_names(matches: Sequence[Match], only: Sequence[str]) -> list[Match]:
    """Return the matches with those contenders whose names begin with a text of ``only``."""
    kept = [
        dataclasses.replace(
            match, contenders=[c for c in match.contenders if c.name.startswith(tuple(only))]
        )
        for match in matches
    ]
    return [match for match in kept if match.contenders]


def ceilings(device: str, *, copied: int = COPY_BYTES, size: int = PRODUCT) -> Limits:
    """Measure the rates of a large copy (bytes read and written) and of a large bf16 product.

    The rate of exponentials is the known rate of the chip (H200 if the chip is unknown), because no
    library function measures it alone.
    """
    moved = copy_rate(copied, device)
    flops = product_rate(size, torch.bfloat16, device)
    known = limits_of(describe().gpu) or H200
    return dataclasses.replace(known, measured_bytes=moved, measured_flops=flops)


def run(
    section: str,
    *,
    toy: bool,
    minutes: float,
    only: Sequence[str] = ("",),
    notify: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run a section and return the content of its JSON file.

    Args:
        section: Name of the section.
        toy: Whether tiny shapes run on the CPU.
        minutes: No match starts after this time.
        only: Beginnings of the names of the contenders that run.
        notify: Receives each line for the user.
    """
    start = time.monotonic()
    device = "cpu" if toy else "cuda"
    if not toy:
        # A CUDA graph cannot be captured on the default stream, and a backward pass uses the stream
        # of its forward pass.
        torch.cuda.set_stream(torch.cuda.Stream())
    # A compiled backward pass is timed alone. It runs many times after one forward pass, so it must
    # not reuse the memory of saved tensors.
    functorch.donated_buffer = False
    machine = describe()
    for line in machine.lines():
        notify(line)
    measured = ceilings(device, **({"copied": 1 << 16, "size": 64} if toy else {}))
    if not toy:
        notify(
            f"ceilings of this run: copy {measured.measured_bytes / 1e12:.2f} TB/s, "
            f"product {measured.measured_flops / 1e12:.0f} TFLOP/s"
        )
    setting = Setting(
        section,
        0.0 if toy else (SECTIONS | FIRST)[section][3],
        notify,
        device,
        limits_of(machine.gpu),
        measured,
        print_row,
        Deadline(60 * minutes),
    )
    played = play_all(of_names(matches_of(section, device, toy=toy), only), setting)
    return {
        "section": section,
        "toy": toy,
        "seconds": round(time.monotonic() - start, 1),
        "machine": dataclasses.asdict(machine),
        "limits": dataclasses.asdict(setting.limits) if setting.limits else None,
        "ceilings": dataclasses.asdict(measured),
        "faults": faults(played),
        "rows": [to_dict(row) for row in played],
    }


def print_row(row: GpuRow) -> None:
    """Print a row as a line of JSON at once, because the process may be ended in a later match."""
    print(json.dumps(to_dict(row), allow_nan=False), flush=True)


def faults(played: Sequence[GpuRow]) -> list[str]:
    """Return a line for each refused contender of fastbert, and for each peer called wrongly.

    A forced variant may refuse a shape that it does not support.
    """

    def is_fault(row: GpuRow) -> bool:
        if not row.refused:
            return False
        refuses = is_variant(row.contender) and row.refused.startswith("ValueError")
        return row.refused.startswith(MISTAKES) or (row.ours and not refuses)

    return sorted(
        {
            f"{row.series} {row.label} {row.contender}: {row.refused}"
            for row in played
            if is_fault(row)
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=list(SECTIONS | FIRST))
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that receives the JSON and the plot"
    )
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="no match starts after this time"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="beginnings of contenders' names"
    )
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --toy runs tiny shapes on the CPU")
    content = run(
        arguments.section, toy=arguments.toy, minutes=arguments.minutes, only=arguments.only
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.section}.json"
    json_file.write(path, content, json_file.record)
    plot_matches(path.with_suffix(".png"), content["rows"], Machine(**content["machine"]))
    for fault in content["faults"]:
        print(f"FAULT: {fault}")
    return 1 if content["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
