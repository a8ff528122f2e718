"""A contest: several engines at one shape, each with a row of figures or the reason for a refusal.

``benchmarks.cpu`` runs every engine in its own process, and ``benchmarks.gpu`` runs all engines in
one process. Both share the rows, the ratios, the targets and the form of the records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastbert.bench.timing import Timing


@dataclass
class ContestRow:
    """One engine at one shape.

    Attributes:
        section, series, label: The place of the row in the run and in the plot.
        contender: Name of the engine.
        ours: Whether the engine belongs to fastbert.
        seconds, p10, p90: Median and percentiles of the seconds per call; None if not timed.
        rate: Amount of work per second in ``unit``, or milliseconds if the unit is "ms".
        of_measured_floor: Shortest time that the ceilings of this run allow, over ``seconds``.
        ratio: Seconds of the peer that the row is compared with, over ``seconds``.
        ratio_goal: The ratio to reach.
        peak_bytes: Peak of the memory that the engine used.
        refused: The reason why the engine was not timed.
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
    ratio: float | None = None
    ratio_goal: float | None = None
    peak_bytes: int | None = None
    note: str | None = None
    refused: str | None = None

    def fill(self, timing: Timing, calls: int = 1) -> None:
        """Set the times from samples that made ``calls`` calls each."""
        self.seconds, self.p10, self.p90 = (
            t / calls for t in (timing.median, timing.p10, timing.p90)
        )
        self.samples = timing.samples

    def add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, [self.note, text]))


RowT = TypeVar("RowT", bound=ContestRow)


@dataclass(frozen=True)
class Target:
    """The lowest ratio that is accepted, and the ratio that is the goal; None if there is none."""

    floor: float | None = None
    goal: float | None = None


def fastest(rows: Iterable[RowT]) -> RowT | None:
    """Return the row with the fewest seconds, or None if no row was timed."""
    timed = [row for row in rows if row.seconds is not None]
    return min(timed, key=lambda row: row.seconds or 0.0, default=None)


def ratio(row: ContestRow, peer: ContestRow | None) -> float | None:
    """Return the seconds of the peer over those of the row, or None if one was not timed."""
    if peer is None or peer.seconds is None or row.seconds is None:
        return None
    return peer.seconds / row.seconds


def to_dict(row: ContestRow) -> dict[str, Any]:
    """Return the record of the row, without the figures that were not measured."""
    return {k: v for k, v in dataclasses.asdict(row).items() if v is not None}
