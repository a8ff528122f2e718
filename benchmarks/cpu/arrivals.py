"""Calls of MiniLM 1×32 at random times, as a server calls it, on an idle and on a busy machine.

The steady calls follow each other without a pause. The other calls are due at random times (a
Poisson process), which are the same for every implementation. Between two calls, threads fall
asleep and the processor changes its frequency, and both lengthen the next call. Only one worker
process exists at a time. The busy process is a loop of Python on one core.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.ceilings import Ceilings
from benchmarks.cpu.contest import LEFT_OUT, CpuRow, Setting
from benchmarks.cpu.encoder import SCALES, admit, prepare
from benchmarks.cpu.remote import Failed, Remote
from benchmarks.cpu.runtimes import BF16, BY_NAME, Runtime
from fastbert.bench.limits import INFERENCE
from fastbert.bench.timing import percentile

ENGINES = (
    "fastbert bf16",
    "fastbert fp32",
    "fastbert int8",
    "transformers sdpa fp32",
    "transformers sdpa bf16",
    "OpenVINO fp32",
    "OpenVINO bf16",
    "OpenVINO int8",
)
LENGTH = 32
WARM_CALLS, QUICK_CALLS = 30, 3
# The goals of fastbert, as multiples of the same percentile of its steady calls.
GOAL_P50, GOAL_P99 = 1.4, 3.0
# The busy process ends when its parent has ended without ending it.
BUSY = "import os\nparent = int({!r})\nwhile os.getppid() == parent:\n  for _ in range(10**6): pass"


@dataclass(frozen=True)
class Column:
    """Calls at a mean rate per second, or without pauses if the rate is None."""

    label: str
    rate: float | None
    calls: int
    busy: bool = False

    def gaps(self, calls: int) -> list[float]:
        """Return the seconds between the times at which two successive calls are due."""
        drawn = random.Random(0)
        return [drawn.expovariate(self.rate) if self.rate else 0.0 for _ in range(calls)]


STEADY = Column("steady", None, 200)
COLUMNS = (
    STEADY,
    Column("5 per second", 5, 25),
    Column("20 per second", 20, 60),
    Column("100 per second", 100, 200),
    Column("steady, beside a busy process", None, 200, busy=True),
    Column("20 per second, beside a busy process", 20, 60, busy=True),
)


def has_unit(ceilings: Ceilings) -> bool:
    """Return whether the processor has a unit for bf16, whose name `ceilings` has."""
    return "BF16" in ceilings.units[BF16]


def left_out(engine: Runtime, setting: Setting) -> str | None:
    """Return the reason why an implementation is left out; every bf16 format has one in fp32."""
    if engine.form == BF16 and not has_unit(setting.ceilings):
        return f"{LEFT_OUT}no unit for bf16 was found in this processor"
    return None


def run(
    setting: Setting, threads: int, names: Sequence[str] = (), *, quick: bool = False
) -> list[CpuRow]:
    """Time all columns of each implementation; an empty ``names`` means every implementation."""
    wanted = [BY_NAME[name] for name in ENGINES if not names or name in names]
    rows: list[CpuRow] = []
    with tempfile.TemporaryDirectory() as folder:
        refused = prepare(Path(folder), SCALES["minilm"], wanted, setting, left_out)
        for engine in wanted:
            reason, found = refused.get(engine.name), []
            if reason is None:
                with Remote(engine.name, Path(folder), threads) as worker:
                    reason = _measure(worker, engine, found, setting, quick)
            if reason is not None:
                found.append(_row(engine, STEADY.label, setting))
                found[-1].refused = reason
                setting.notify(f"  {engine.name}: {reason}")
            rows += found
    return rows


def _row(engine: Runtime, label: str, setting: Setting) -> CpuRow:
    return CpuRow(
        setting.section, "MiniLM-L6 1×32", label, "encoder", engine.form, INFERENCE, engine.name,
        engine.ours, unit="calls/s", tokens=LENGTH,
    )  # fmt: skip


def _measure(
    worker: Remote, engine: Runtime, rows: list[CpuRow], setting: Setting, quick: bool
) -> str | None:
    """Add a row for each column to ``rows``; return the reason if the implementation fails."""
    _, reason = admit(worker, engine.ours)
    if reason is not None:
        return reason
    try:
        worker.ask("shape", lengths=[LENGTH])
        worker.ask("arrivals", gaps=[0.0] * WARM_CALLS)
        for column in COLUMNS:
            gaps = column.gaps(QUICK_CALLS if quick else column.calls)
            with busy_process() if column.busy else contextlib.nullcontext():
                times = worker.ask("arrivals", gaps=gaps)["times"]
            row = _row(engine, column.label, setting)
            row.seconds, row.p99 = percentile(times, 0.5), percentile(times, 0.99)
            row.samples = len(times)
            rows.append(row)
            setting.notify(
                f"  {engine.name}, {column.label}: p50 {1e3 * row.seconds:.2f} ms, "
                f"p99 {1e3 * row.p99:.2f} ms"
            )
    except Failed as failure:
        return str(failure)
    return None


@contextlib.contextmanager
def busy_process() -> Iterator[int]:
    """Run a process that computes without a pause, and end it in every case; yield its id."""
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def estimate(ceilings: Ceilings, start: float) -> float:
    """Estimate the seconds of the section; ``start`` are those of a worker's start and checks."""
    engines = [BY_NAME[name] for name in ENGINES]
    runs = sum(engine.form != BF16 or has_unit(ceilings) for engine in engines)
    waits = sum(column.calls / column.rate for column in COLUMNS if column.rate)
    # A steady call takes about three milliseconds.
    steady = sum(column.calls for column in COLUMNS if not column.rate) * 0.003
    return runs * (start + waits + steady)


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of all implementations and columns, the goals, and the refusals."""
    timed: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if "seconds" in row:
            timed.setdefault(row["contender"], {})[row["label"]] = row
    labels = [column.label for column in COLUMNS]
    yield ""
    yield (
        "A cell has the median and the 99th percentile of the milliseconds of a call of MiniLM "
        "1×32, and the ratio of the median to the engine's steady median."
    )
    yield ""
    yield f"| engine | {' | '.join(labels)} |"
    yield f"|---{'|---' * len(labels)}|"
    for name, found in timed.items():
        steady = found[STEADY.label]["seconds"] if STEADY.label in found else None
        cells = [_cell(found.get(label), steady) for label in labels]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield (
        f"The goals of fastbert at random arrivals on an idle machine: p50 at most {GOAL_P50:g} × "
        f"the steady p50, p99 at most {GOAL_P99:g} × the steady p99."
    )
    yield ""
    for name, found in timed.items():
        if STEADY.label in found and found[STEADY.label]["ours"]:
            yield f"- {name}: {'; '.join(missed(found)) or 'met'}"
    for row in rows:
        if row.get("refused"):
            yield f"- {row['contender']}: {row['refused']}"


def _cell(row: Mapping[str, Any] | None, steady: float | None) -> str:
    if row is None:
        return ""
    text = f"{1e3 * row['seconds']:.2f} / {1e3 * row['p99']:.2f}"
    if steady is None or row["label"] == STEADY.label:
        return text
    return f"{text} ({row['seconds'] / steady:.2f} ×)"


def missed(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the goals that an implementation misses, from its rows by the label of the column."""
    steady, texts = found[STEADY.label], []
    for column in COLUMNS:
        if column.rate is None or column.busy or column.label not in found:
            continue
        for key, name, goal in (("seconds", "p50", GOAL_P50), ("p99", "p99", GOAL_P99)):
            times = found[column.label][key] / steady[key]
            if times > goal:
                texts.append(f"**not met**: {name} at {column.label} is {times:.2f} × steady")
    return texts
