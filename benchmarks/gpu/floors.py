"""The work of each benchmark shape, and its floor: the shortest time that the GPU allows.

    python -m benchmarks.gpu.floors     # a Markdown table, on any machine

The floor is the largest of three times on an H200 (``fastbert.bench.limits``): FLOPs over the best
rate of a matrix product, bytes over the best rate of a copy, and exponentials over their rate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import SECTIONS, matches_of
from benchmarks.gpu.match import Match
from fastbert.bench.limits import H200

HEADINGS = (
    "operation",
    "shape",
    "GFLOP",
    "MB",
    "floor µs",
    "bound by",
    "rate at the floor",
    "goal",
)


def lines(sections: list[str]) -> Iterator[str]:
    """Yield the lines of the table for bf16; the floors of fp16 are the same."""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + "---|" * len(HEADINGS)
    for section in sections:
        for match in matches_of(section, "cpu", toy=False):
            if match.dtype == torch.bfloat16:
                yield line(match)


def line(match: Match) -> str:
    floor = match.work.floor(H200)
    goal = f"{match.goal.value:,.4g} {match.goal.unit}" if match.goal else ""
    if match.ratio_goal:
        goal = f"{match.ratio_goal:g} × the best peer"
    rate = f"{match.amount / floor:,.4g} {match.unit}" if match.unit != "ms" else ""
    cells = (
        match.series,
        match.label.removesuffix(" bfloat16"),
        f"{match.work.flops / 1e9:,.4g}",
        f"{match.work.bytes / 1e6:,.4g}" if match.work.bytes else "",
        f"{floor * 1e6:,.4g}",
        match.work.bound_by(H200),
        rate,
        goal,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    wanted = sys.argv[1:] or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"SECTION: got {', '.join(sorted(unknown))}, allowed: {', '.join(SECTIONS)}")
    for text in lines(wanted):
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
