"""One shape, many engines: who runs is checked first, then timed side by side, and nobody dropped.

A ``Match`` is one case in one dtype and direction with its contenders. ``play`` prepares them on
rotated inputs, compares what they compute with the float64 reference, and times those that are
right in turns. Who cannot run, or is one of ours and wrong, stays in the table with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.judge import Judge, rotated
from fastbert.bench.attention_peers import Prepared
from fastbert.bench.limits import BACKWARD, Goal, Limits, Work
from fastbert.bench.timing import Stopwatch, Timing, alternate, captured, peak_memory
from fastbert.testing.cases import Case, Inputs
from fastbert.testing.compare import Comparison

# Calls whose mean is the time with the host's part.
HOST_CALLS = 10
TRAINING = "training"


@dataclass(frozen=True)
class Contender:
    """An engine: how it is prepared, whether it is ours, and whether it computes the same function.

    What computes another function (a tanh GELU, a product without its GELU) is shown and never
    counted as the best peer.
    """

    name: str
    prepare: Callable[[Inputs], Prepared]
    ours: bool = False
    same_function: bool = True


@dataclass(frozen=True)
class Match:
    """One shape in one dtype and direction. ``series`` and ``label`` place it in the plot.

    case: where the inputs come from, and the reference that judges; None leaves both to
    ``batches``, inputs that stand for a batch by its seed, and the judging to ``prepare``. amount:
    what one call does in ``unit``, so that the rate is amount / seconds. ratio_goal: the best
    peer's time over ours to reach. graphs: time a CUDA graph's replays, the host's part apart.
    memory: also measure the peak of one forward and backward pass.
    """

    series: str
    label: str
    op: str
    dtype: torch.dtype
    direction: str
    contenders: Sequence[Contender]
    work: Work
    unit: str
    amount: float
    case: Case | None = None
    batches: Sequence[Inputs] = ()
    goal: Goal | None = None
    ratio_goal: float | None = None
    graphs: bool = True
    memory: bool = False


@dataclass
class Row:
    """One contender of one match; seconds per call, None where ``refused`` says why.

    ``host_seconds``: plain calls one after another, Python and launches included; ``seconds`` is of
    a CUDA graph's replays where ``graphed``. ``of_floor``: the fewest seconds that the limits allow
    over these. ``ratio``: the best peer's seconds over these, of those that compute the same.
    ``error_ratio``: largest error over the reference's in the same dtype.
    """

    section: str
    series: str
    label: str
    op: str
    dtype: str
    direction: str
    contender: str
    ours: bool
    same_function: bool = True
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    samples: int = 0
    graphed: bool = False
    host_seconds: float | None = None
    rate: float | None = None
    unit: str = ""
    tflops: float | None = None
    gigabytes_per_second: float | None = None
    of_floor: float | None = None
    of_measured_floor: float | None = None
    bound_by: str | None = None
    goal: float | None = None
    of_goal: float | None = None
    ratio: float | None = None
    ratio_goal: float | None = None
    peak_bytes: int | None = None
    error_ratio: float | None = None
    note: str | None = None
    refused: str | None = None


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


def play(match: Match, setting: Setting) -> list[Row]:
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


def new_row(match: Match, contender: Contender, setting: Setting) -> Row:
    return Row(
        setting.section,
        match.series,
        match.label,
        match.op,
        str(match.dtype).removeprefix("torch."),
        match.direction,
        contender.name,
        contender.ours,
        contender.same_function,
        unit=match.unit,
        ratio_goal=match.ratio_goal if contender.ours else None,
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
    rows: Mapping[str, Row],
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
        _fill(rows[name], timing, per_call[name])


def _fill(row: Row, timing: Timing, calls: int) -> None:
    row.seconds, row.p10, row.p90 = (t / calls for t in (timing.median, timing.p10, timing.p90))
    row.samples = timing.samples


def _measure_memory(match: Match, sets: Sequence[Inputs], rows: Mapping[str, Row]) -> None:
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


def finish(match: Match, rows: Sequence[Row], setting: Setting) -> None:
    """Rates, fractions of the limits and the goal, and the ratio to the best peer."""
    peers = [r.seconds for r in rows if r.seconds and not r.ours and r.same_function]
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
        if peers:
            row.ratio = min(peers) / row.seconds


def to_dict(row: Row) -> dict[str, Any]:
    """Without what was not measured, so that the file stays readable."""
    return {k: v for k, v in dataclasses.asdict(row).items() if v is not None}


def play_all(
    matches: Sequence[Match], setting: Setting, notify: Callable[[str], None]
) -> list[Row]:
    """Every match in its order, the most wanted first; each is reported as it ends."""
    rows: list[Row] = []
    for match in matches:
        played = play(match, setting)
        rows += played
        notify(line(match, played))
    return rows


def line(match: Match, rows: Sequence[Row]) -> str:
    """One line: the best of ours beside the best of theirs."""
    ours = _best(row for row in rows if row.ours and not is_variant(row.contender))
    theirs = _best(row for row in rows if not row.ours and row.same_function)
    text = f"{match.series:<34} {match.label:<26} {match.direction:<8}"
    for who in (ours, theirs):
        text += f" {_figure(who):<44}"
    if ours and theirs:
        text += f" {theirs.seconds / ours.seconds:5.2f}×"  # type: ignore[operator]
    if ours and ours.of_goal is not None:
        text += f"  {100 * ours.of_goal:4.0f} % of the goal"
    return text.rstrip()


def is_variant(contender: str) -> bool:
    """Whether this is a forced choice (``path=short``) and not what a caller gets."""
    return "=" in contender


def _best(rows: Iterator[Row]) -> Row | None:
    timed = [row for row in rows if row.seconds is not None]
    return min(timed, key=lambda row: row.seconds or 0.0, default=None)


def _figure(row: Row | None) -> str:
    if row is None or row.rate is None or row.seconds is None:
        return "nobody"
    return f"{row.contender}: {row.seconds * 1e6:,.1f} µs, {row.rate:,.4g} {row.unit}"
