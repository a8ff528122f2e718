"""One shape, many engines: who runs is checked first, then timed side by side, and nobody dropped.

A ``Match`` is one case in one dtype and direction with its contenders. ``play`` prepares them on
rotated inputs, compares what they compute with the float64 reference, and times those that are
right in turns. Who cannot run, or is one of ours and wrong, stays in the table with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.judge import Judge, rotated
from benchmarks.gpu.match import TRAINING, Contender, Match
from fastbert.bench.attention_peers import Prepared
from fastbert.bench.contest import ContestRow, fastest, ratio
from fastbert.bench.limits import BACKWARD, Limits, Work
from fastbert.bench.timing import Stopwatch, alternate, captured, peak_memory
from fastbert.testing.cases import Inputs
from fastbert.testing.compare import Comparison

# Calls whose mean is the time with the host's part.
HOST_CALLS = 10


@dataclass
class GpuRow(ContestRow):
    """One contender of one match.

    ``host_seconds``: plain calls one after another, Python and launches included; ``seconds`` is of
    a CUDA graph's replays where ``graphed``. ``of_floor``: the fewest seconds that the limits allow
    over these. ``ratio`` is against the fastest peer that computes the same function.
    ``error_ratio``: largest error over the reference's in the same dtype.
    """

    same_function: bool = True
    graphed: bool = False
    host_seconds: float | None = None
    gigabytes_per_second: float | None = None
    of_floor: float | None = None
    bound_by: str | None = None
    goal: float | None = None
    of_goal: float | None = None
    error_ratio: float | None = None


class Deadline:
    """The end of a section: what would begin later is listed as left out."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self.end


@dataclass
class Setting:
    """What all matches of a section share."""

    section: str
    device: str
    seconds: float
    limits: Limits | None = None
    ceilings: Limits | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(float("inf")))
    # The inputs of the last case: its backward pass comes after its forward pass.
    drawn: dict[tuple[Any, ...], Sequence[Inputs]] = field(default_factory=dict)

    def inputs(self, match: Match) -> Sequence[Inputs]:
        """Sets of inputs that together overflow the caches."""
        if match.case is None:
            return match.batches
        case = match.case
        key = (case.op, case.name, case.shape, match.dtype)
        if key not in self.drawn:
            self.drawn.clear()
            self.drawn[key] = rotated(case, match.dtype, self.device)
        return self.drawn[key]


def play(match: Match, setting: Setting) -> list[GpuRow]:
    """Checks, times and reports every contender of ``match``."""
    rows = {c.name: new_row(match, c, setting) for c in match.contenders}
    if setting.deadline.passed():
        for row in rows.values():
            row.refused = "left out: the section's time was up"
        return list(rows.values())
    torch._dynamo.reset()  # or the shapes of earlier matches count as recompilations
    sets = setting.inputs(match)
    judge = Judge(match, sets[0])
    calls: dict[str, Callable[[int], object]] = {}
    for contender in match.contenders:
        row = rows[contender.name]
        try:
            call, verdicts = _ready(match, contender, sets, judge)
        except Exception as error:
            row.refused = reason_of(error)
            continue
        if verdicts:
            worst = max(verdict.ratio for verdict in verdicts)
            row.error_ratio = worst if math.isfinite(worst) else None
        red = [verdict for verdict in verdicts if not verdict.passed]
        if red and contender.ours and contender.same_function:
            row.refused = f"parity is red: {red[0]}"
            continue
        if red:
            row.note = f"breaks the tolerance rule: {red[0]}"
        calls[contender.name] = call
    judge.forget()
    _time(calls, rows, len(sets) if match.graphs else 0, setting)
    if match.memory:
        _measure_memory(match, sets, rows)
    finish(match, list(rows.values()), setting)
    return list(rows.values())


def new_row(match: Match, contender: Contender, setting: Setting) -> GpuRow:
    return GpuRow(
        setting.section,
        match.series,
        match.label,
        match.op,
        str(match.dtype).removeprefix("torch."),
        match.direction,
        contender.name,
        contender.ours,
        unit=match.unit,
        ratio_goal=match.ratio_goal if contender.ours else None,
        same_function=contender.same_function,
    )


def reason_of(error: BaseException) -> str:
    """Why an engine did not run, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# Calls


def _ready(
    match: Match, contender: Contender, sets: Sequence[Inputs], judge: Judge
) -> tuple[Callable[[int], object], list[Comparison]]:
    """The contender's call on rotated inputs, and how right it is on the first of them."""
    if match.direction != BACKWARD:
        # Without leaves: some engines refuse them where they have no backward pass.
        sets = [dataclasses.replace(inputs, gradients=()) for inputs in sets]
    prepared = [contender.prepare(inputs) for inputs in sets]
    if match.direction != BACKWARD:

        def forward(index: int) -> Tensor:
            return prepared[index % len(prepared)].run()

        call = forward if match.direction == TRAINING else _without_gradients(forward)
        return call, judge.compare(contender, [prepared[0].restore(call(0))])
    runs = [_backward(one, judge) for one in prepared]

    def backward(index: int) -> Sequence[Tensor]:
        return runs[index % len(runs)]()

    gradients = [prepared[0].restore(gradient) for gradient in backward(0)]
    return backward, judge.compare(contender, gradients)


def _without_gradients(call: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    def run(index: int) -> Tensor:
        with torch.inference_mode():
            return call(index)

    return run


def _backward(prepared: Prepared, judge: Judge) -> Callable[[], Sequence[Tensor]]:
    """The backward pass alone: its forward pass has run, and stays for the next call."""
    out = prepared.run()
    gradient = _output_gradient(prepared, out.detach(), judge)
    if prepared.backward is not None:
        run = prepared.backward
        return lambda: run(gradient)
    return lambda: torch.autograd.grad(out, prepared.targets, gradient, retain_graph=True)


def _output_gradient(prepared: Prepared, out: Tensor, judge: Judge) -> Tensor:
    """The judge's gradient in the engine's own layout and strides: ``restore`` backwards."""
    base = torch.zeros_like(out, requires_grad=True)
    restored = prepared.restore(base)
    given = judge.gradient(restored.shape, restored)
    gradient = given if restored is base else torch.autograd.grad(restored, base, given)[0]
    return torch.empty_like(out).copy_(gradient)


def _time(
    calls: Mapping[str, Callable[[int], object]],
    rows: Mapping[str, GpuRow],
    sets: int,
    setting: Setting,
) -> None:
    """Fills in the times: of graph replays of ``sets`` calls on a GPU, else of plain calls."""
    watch = Stopwatch(setting.device)
    timed: dict[str, Callable[[int], object]] = {}
    per_call: dict[str, int] = {}
    for name, call in calls.items():
        timed[name], per_call[name] = call, 1
        if setting.device != "cuda" or not sets:
            continue
        try:
            watch.measure(call, 0, 2)
            rows[name].host_seconds = watch.measure(call, 0, HOST_CALLS)
            timed[name], per_call[name] = captured(call, sets), sets
            rows[name].graphed = True
        except Exception as error:
            # It runs but cannot be captured: its own launches are then part of its time.
            rows[name].note = f"not captured in a graph: {reason_of(error)}"
            torch.cuda.synchronize()
    if not timed:
        return
    for name, timing in alternate(timed, device=setting.device, seconds=setting.seconds).items():
        rows[name].fill(timing, per_call[name])


def _measure_memory(match: Match, sets: Sequence[Inputs], rows: Mapping[str, GpuRow]) -> None:
    """The peak of forward and backward together, for those that were timed."""
    for contender in match.contenders:
        row = rows[contender.name]
        if row.seconds is None:
            continue
        ready = [contender.prepare(inputs) for inputs in sets[:2]]

        def step(index: int, ready: list[Prepared] = ready) -> None:
            one = ready[index % len(ready)]
            out = one.run()
            torch.autograd.grad(out, one.targets, torch.ones_like(out))

        row.peak_bytes = peak_memory(step)


# Figures


def finish(match: Match, rows: Sequence[GpuRow], setting: Setting) -> None:
    """Rates, fractions of the limits and the goal, and the ratio to the best peer."""
    best_peer = fastest(r for r in rows if not r.ours and r.same_function)
    for row in rows:
        if row.seconds is None:
            continue
        row.rate = match.amount / row.seconds
        if match.unit == "ms":
            row.rate = row.seconds * 1e3
        if match.work.flops:
            row.tflops = match.work.flops / row.seconds / 1e12
        if match.work.bytes:
            row.gigabytes_per_second = match.work.bytes / row.seconds / 1e9
        if setting.limits and match.work != Work():
            row.of_floor = match.work.floor(setting.limits) / row.seconds
            row.bound_by = match.work.bound_by(setting.limits)
        if setting.ceilings and match.work != Work():
            row.of_measured_floor = match.work.floor(setting.ceilings) / row.seconds
        if row.ours and match.goal:
            row.goal, row.of_goal = match.goal.value, match.goal.reached(row.rate)
        row.ratio = ratio(row, best_peer)


def play_all(
    matches: Sequence[Match], setting: Setting, notify: Callable[[str], None]
) -> list[GpuRow]:
    """Every match in its order, the most wanted first; each is reported as it ends."""
    rows: list[GpuRow] = []
    for match in matches:
        played = play(match, setting)
        rows += played
        notify(line(match, played))
    return rows


def line(match: Match, rows: Sequence[GpuRow]) -> str:
    """One line: the best of ours beside the best of theirs."""
    ours = fastest(row for row in rows if row.ours and not is_variant(row.contender))
    theirs = fastest(row for row in rows if not row.ours and row.same_function)
    text = f"{match.series:<34} {match.label:<26} {match.direction:<8}"
    for who in (ours, theirs):
        text += f" {_figure(who):<44}"
    if ours and theirs:
        text += f" {ratio(ours, theirs):5.2f}×"
    if ours and ours.of_goal is not None:
        text += f"  {100 * ours.of_goal:4.0f} % of the goal"
    return text.rstrip()


def is_variant(contender: str) -> bool:
    """Whether this is a forced choice (``path=short``) and not what a caller gets."""
    return "=" in contender


def _figure(row: GpuRow | None) -> str:
    if row is None or row.rate is None or row.seconds is None:
        return "nobody"
    return f"{row.contender}: {row.seconds * 1e6:,.1f} µs, {row.rate:,.4g} {row.unit}"
