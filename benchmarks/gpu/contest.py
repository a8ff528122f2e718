"""Compare implementations at one shape: each contender is checked first, then all take turns.

A ``Match`` is one case in one dtype and direction; its contenders are the implementations to
compare. ``play`` prepares them on several sets of inputs, which their calls use in rotation. It
compares their results with the float64 reference, and times the contenders in turns. A contender
that cannot run, or a wrong contender of fastbert, stays in the table with the reason.
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

from benchmarks.gpu.judge import Judge
from benchmarks.gpu.match import Contender, Match
from fastbert.bench import contest
from fastbert.bench.attention_peers import Prepared
from fastbert.bench.contest import ContestRow, fastest
from fastbert.bench.limits import BACKWARD, TRAINING, Limits, Target, Work
from fastbert.bench.operations import rotated_inputs
from fastbert.bench.timing import Stopwatch, alternate, captured, peak_memory
from fastbert.ops.backend import dtype_name
from fastbert.testing.cases import Inputs
from fastbert.testing.compare import Comparison

# Largest number of sets of inputs of a match; more sets would take too much memory.
MOST_SETS = 8
# ``host_seconds`` is the mean time of this many calls without a CUDA graph.
HOST_CALLS = 10


@dataclass
class GpuRow(ContestRow):
    """One contender of one match.

    Attributes:
        same_function: Whether the contender computes the function of the match.
        graphed: Whether ``seconds`` comes from replays of a CUDA graph.
        host_seconds: Mean seconds of consecutive calls without a graph, including the time of
            Python and of launches.
        of_floor: Shortest time that the limits of the GPU allow, divided by ``seconds``.
        bound_by: The limit of the GPU that determines the shortest time.
        goal, of_goal: The rate to reach, and the reached fraction of this rate.
        error_ratio: Largest error, divided by the largest error of the reference in the same dtype.

    ``ratio`` compares the contender with the fastest peer that computes the same function.
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
    """The end of a section; a match that would start later is listed as left out."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self.end


@dataclass
class Setting(contest.Setting):
    """The settings of a section on the GPU."""

    device: str = "cuda"
    limits: Limits | None = None
    ceilings: Limits | None = None
    # This function receives each row as soon as its match has ended.
    keep: Callable[[GpuRow], None] = lambda row: None
    deadline: Deadline = field(default_factory=lambda: Deadline(float("inf")))
    # The inputs of the last case. The backward match of a case reuses those of its forward match.
    drawn: dict[tuple[Any, ...], Sequence[Inputs]] = field(default_factory=dict)

    def inputs(self, match: Match) -> Sequence[Inputs]:
        """Return the batches of ``match``, or enough inputs of its case to exceed the caches."""
        if match.case is None:
            return match.batches
        case = match.case
        key = (case.op, case.name, case.shape, match.dtype)
        if key not in self.drawn:
            self.drawn.clear()
            self.drawn[key] = rotated_inputs(case, match.dtype, self.device, at_most=MOST_SETS)
        return self.drawn[key]


def play(match: Match, setting: Setting) -> list[GpuRow]:
    """Check and time every contender of ``match``, and return their rows."""
    rows = {c.name: new_row(match, c, setting) for c in match.contenders}
    if setting.deadline.passed():
        for row in rows.values():
            row.refused = "left out: the section's time was up"
        return list(rows.values())
    torch._dynamo.reset()  # Otherwise, earlier shapes would count towards the recompilation limit.
    sets = setting.inputs(match)
    judge = Judge(match, sets[0])
    calls: dict[str, Callable[[int], object]] = {}
    for contender in match.contenders:
        row = rows[contender.name]
        try:
            call, comparisons = _ready(match, contender, sets, judge)
        except Exception as error:
            row.refused = reason_of(error)
            continue
        if comparisons:
            worst = max(comparison.ratio for comparison in comparisons)
            row.error_ratio = worst if math.isfinite(worst) else None
        red = [comparison for comparison in comparisons if not comparison.passed]
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
        dtype_name(match.dtype),
        match.direction,
        contender.name,
        contender.ours,
        unit=match.unit,
        same_function=contender.same_function,
    )


def reason_of(error: BaseException) -> str:
    """Return in one line the reason why an implementation did not run."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# Calls


def _ready(
    match: Match, contender: Contender, sets: Sequence[Inputs], judge: Judge
) -> tuple[Callable[[int], object], list[Comparison]]:
    """Return a function that calls the contender on the n-th inputs, and comparisons of results.

    The compared results are those for the first set of inputs.
    """
    if match.direction != BACKWARD:
        # Implementations without a backward pass refuse inputs that need gradients.
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
    """Return the backward pass alone; its forward pass runs once, before all calls."""
    out = prepared.run()
    gradient = _output_gradient(prepared, out.detach(), judge)
    if prepared.backward is not None:
        run = prepared.backward
        return lambda: run(gradient)
    return lambda: torch.autograd.grad(out, prepared.targets, gradient, retain_graph=True)


def _output_gradient(prepared: Prepared, out: Tensor, judge: Judge) -> Tensor:
    """Return the judge's output gradient in the layout and strides of the contender's output."""
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
    """Time the calls; on a GPU, time CUDA graphs of ``sets`` calls each, unless ``sets`` is 0."""
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
            # The call runs but cannot be captured, so its time includes its launches.
            rows[name].note = f"not captured in a graph: {reason_of(error)}"
            torch.cuda.synchronize()
    if not timed:
        return
    for name, timing in alternate(timed, device=setting.device, seconds=setting.seconds).items():
        rows[name].fill(timing, per_call[name])


def _measure_memory(match: Match, sets: Sequence[Inputs], rows: Mapping[str, GpuRow]) -> None:
    """Measure the peak memory of forward and backward together for the timed contenders."""
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
    """Set in each row the rate, its fractions of limit and goal, and the ratio to the best peer."""
    for row in rows:
        row.set_rates(match.amount, match.work, setting.ceilings)
        if row.seconds is None or row.rate is None:
            continue
        if match.work.bytes:
            row.gigabytes_per_second = match.work.bytes / row.seconds / 1e9
        if setting.limits and match.work != Work():
            row.of_floor = match.work.floor(setting.limits) / row.seconds
            row.bound_by = match.work.bound_by(setting.limits)
        if row.ours and match.goal:
            row.goal, row.of_goal = match.goal.value, match.goal.reached(row.rate)
    contest.judge(
        rows,
        lambda row, other: not other.ours and other.same_function,
        lambda row: Target(goal=match.ratio_goal),
    )


def play_all(matches: Sequence[Match], setting: Setting) -> list[GpuRow]:
    """Run the matches in the given order; pass rows to ``setting.keep`` after each match."""
    rows: list[GpuRow] = []
    for match in matches:
        played = play(match, setting)
        rows += played
        for row in played:
            setting.keep(row)
        setting.notify(line(played))
    return rows


def line(rows: Sequence[GpuRow]) -> str:
    """Return a match as a line of text with the fastest contender of fastbert."""
    text = f"{rows[0].series:<34} {rows[0].label:<26}"
    ours = fastest(row for row in rows if row.ours and not is_variant(row.contender))
    if ours is None:
        return f"{text} no contender of fastbert was timed"
    text += f" {contest.line(ours)}"
    for part, whole in ((ours.of_floor, "limit"), (ours.of_goal, "goal")):
        if part is not None:
            text += f", {100 * part:.0f} % of the {whole}"
    return text


def is_variant(contender: str) -> bool:
    """Whether the contender is a forced choice, such as ``path=short``, and not the default."""
    return "=" in contender
