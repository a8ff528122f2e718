"""A contest: several engines at one shape, each with a row of figures or a reason for having none.

``benchmarks.cpu`` runs every engine in a process of its own and ``benchmarks.gpu`` runs all engines
in one process. Rows, ratios, targets and the form of their records are the same in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastbert.bench.timing import Timing


@dataclass
class ContestRow:
    """One engine at one shape; seconds per call, None where ``refused`` gives the reason.

    Attributes:
        section, series, label: Where the row stands in the run and in the plot.
        contender: The engine's name; ``ours`` says whether it is fastbert's.
        rate: Amount of work per second in ``unit``, or milliseconds where the unit is "ms".
        of_measured_floor: The fewest seconds that the ceilings of this run allow, over ``seconds``.
        ratio: Seconds of the peer that the row is compared with, over ``seconds``.
        ratio_goal: The ratio to reach.
        peak_bytes: Peak of the memory that the engine took.
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
        """Take the times of samples that made ``calls`` calls each."""
        self.seconds, self.p10, self.p90 = (
            t / calls for t in (timing.median, timing.p10, timing.p90)
        )
        self.samples = timing.samples

    def add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, [self.note, text]))


RowT = TypeVar("RowT", bound=ContestRow)


@dataclass(frozen=True)
class Target:
    """The ratio that must be reached, and the ratio that is wanted."""

    floor: float | None = None
    goal: float | None = None


def fastest(rows: Iterable[RowT]) -> RowT | None:
    """The row with the fewest seconds; None where no row was timed."""
    timed = [row for row in rows if row.seconds is not None]
    return min(timed, key=lambda row: row.seconds or 0.0, default=None)


def ratio(row: ContestRow, peer: ContestRow | None) -> float | None:
    """The peer's seconds over the row's; None where one of them was not timed."""
    if peer is None or peer.seconds is None or row.seconds is None:
        return None
    return peer.seconds / row.seconds


def to_dict(row: ContestRow) -> dict[str, Any]:
    """The row's record; figures that were not measured are left out."""
    return {k: v for k, v in dataclasses.asdict(row).items() if v is not None}
