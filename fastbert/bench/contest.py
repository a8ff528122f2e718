"""A contest: several implementations of a computation at one shape, with figures for each of them.

An implementation is a backend of fastbert or a peer, such as PyTorch. ``benchmarks.cpu`` runs every
implementation in its own process, and ``benchmarks.gpu`` runs all implementations in one process.
Both of them use this module for the settings, for the rows, for the ratios with their floors and
goals, and for the form of a row as text and as a dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastbert.bench.encoder import Notify
from fastbert.bench.limits import Limits, Target, Work
from fastbert.bench.timing import Timing


@dataclass
class Setting:
    """The settings of all contests of a benchmark section.

    ``seconds`` limits the timing of one contest.
    """

    section: str
    seconds: float
    notify: Notify = print


@dataclass
class ContestRow:
    """The figures of one implementation at one shape, or the reason why it was not timed.

    Attributes:
        section, series, label: Section of the run, panel of the plot, and label in the panel.
        contender: Name of the implementation.
        ours: Whether the implementation belongs to fastbert.
        seconds, p10, p90: Median and percentiles of the seconds per call; None if not timed.
        rate: Amount of work per second in ``unit``, or milliseconds if the unit is "ms".
        of_measured_floor: Shortest time that the rates measured in this run allow, divided by
            ``seconds``.
        against: Name of the fastest implementation with which the row is compared.
        ratio: Seconds of the implementation ``against`` divided by ``seconds``.
        ratio_floor, ratio_goal: The lowest ratio that is accepted, and the ratio to reach.
        peak_bytes: Peak of the memory that the implementation used.
        refused: The reason why the implementation was not timed.
    """

    section: str
    series: str
    label: str
    op: str
    dtype: str
    direction: str
    contender: str
    ours: bool
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    samples: int = 0
    rate: float | None = None
    unit: str = ""
    tflops: float | None = None
    of_measured_floor: float | None = None
    against: str | None = None
    ratio: float | None = None
    ratio_floor: float | None = None
    ratio_goal: float | None = None
    peak_bytes: int | None = None
    note: str | None = None
    refused: str | None = None

    def fill(self, timing: Timing, calls: int = 1) -> None:
        """Set the times per call from samples of ``calls`` calls each."""
        self.seconds, self.p10, self.p90 = (
            t / calls for t in (timing.median, timing.p10, timing.p90)
        )
        self.samples = timing.samples

    def set_rates(self, amount: float, work: Work, ceilings: Limits | None) -> None:
        """Set the figures of a timed row: ``amount`` and ``work`` are for one call."""
        if self.seconds is None:
            return
        self.rate = self.seconds * 1e3 if self.unit == "ms" else amount / self.seconds
        if work.flops:
            self.tflops = work.flops / self.seconds / 1e12
        if ceilings and work != Work():
            self.of_measured_floor = work.floor(ceilings) / self.seconds

    def add_note(self, text: str | None) -> None:
        self.note = "; ".join(filter(None, [self.note, text]))


RowT = TypeVar("RowT", bound=ContestRow)

# Ranks of the formats: a higher rank is more exact. The CPU and the GPU rows name them differently.
EXACTNESS = {
    "int8": 0,
    "bf16": 1,
    "fp16": 1,
    "fp32": 2,
    "bfloat16": 1,
    "float16": 1,
    "float32": 2,
}


def is_as_exact(dtype: str, than: str) -> bool:
    """Return whether a format is at least as exact as another format."""
    return EXACTNESS[dtype] >= EXACTNESS[than]


def fastest(rows: Iterable[RowT]) -> RowT | None:
    """Return the row with the fewest seconds, or None if no row was timed."""
    timed = [row for row in rows if row.seconds is not None]
    return min(timed, key=lambda row: row.seconds or 0.0, default=None)


def ratio(row: ContestRow, peer: ContestRow | None) -> float | None:
    """Return the peer's seconds divided by the row's, or None if the peer or row was not timed."""
    if peer is None or peer.seconds is None or row.seconds is None:
        return None
    return peer.seconds / row.seconds


def judge(
    rows: Sequence[RowT],
    is_peer: Callable[[RowT, RowT], bool],
    target: Callable[[RowT], Target],
) -> None:
    """Set the ratio, the floor and the goal of every timed row of fastbert at one shape.

    ``is_peer(row, other)`` tells whether ``row`` may be compared with ``other``.
    """
    for row in rows:
        if not row.ours or row.seconds is None:
            continue
        wanted = target(row)
        row.ratio_floor, row.ratio_goal = wanted.floor, wanted.goal
        peer = fastest(other for other in rows if other is not row and is_peer(row, other))
        if peer is not None:
            row.against, row.ratio = peer.contender, ratio(row, peer)


def goals_met(row: ContestRow) -> str:
    """Return in words whether a row meets its floor and goal, or "" if it has neither."""
    parts = []
    for name, wanted in (("floor", row.ratio_floor), ("goal", row.ratio_goal)):
        if wanted is not None:
            met = row.ratio is not None and row.ratio >= wanted
            parts.append(f"{name} {wanted:g}: {'met' if met else 'NOT met'}")
    return ", ".join(parts)


def line(row: ContestRow) -> str:
    """Return a row as a line of text."""
    text = f"{row.contender:<26}"
    if row.seconds is None:
        return f"{text} {row.refused}"
    short, rate = row.seconds < 1e-3, row.rate or 0.0
    text += f" {1e6 * row.seconds:>9.1f} µs" if short else f" {1e3 * row.seconds:>9.2f} ms"
    text += f"  {rate:>10,.0f} {row.unit}" if rate >= 1e3 else f"  {rate:>10.4g} {row.unit}"
    if row.ratio is None:
        return text
    return ", ".join(filter(None, [f"{text}  {row.ratio:.2f}× {row.against}", goals_met(row)]))


def to_dict(row: ContestRow) -> dict[str, Any]:
    """Return the fields of a row by name, without the fields whose value is None."""
    return {k: v for k, v in dataclasses.asdict(row).items() if v is not None}
