"""Compare implementations at one shape: all have a first and a warm call, the fast ones take turns.

A much slower implementation has only its first call: on a processor without a unit for its dtype,
one call can take longer than all turns of the other implementations. An implementation that is left
out, refused or not installed has a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.cpu.ceilings import Ceilings
from benchmarks.cpu.remote import Failed, Remote, RemoteWatch
from benchmarks.cpu.runtimes import BY_NAME, FP32
from fastbert.bench import contest
from fastbert.bench.contest import ContestRow, fastest, ratio
from fastbert.bench.encoder import EncoderShape, Notify
from fastbert.bench.limits import INFERENCE, Target, Work
from fastbert.bench.timing import Timing, alternate

# A peer (an implementation that is not fastbert) takes no turns if its warm call takes longer than
# SHORT_S and longer than this multiple of the fastest call of its group (`fastest_peers`). Its
# result is then the time of the warm call.
BEHIND = 1.5
SHORT_S = 0.3
# A peer that is FAR_BEHIND times slower than the fastest has no warm call if its first call exceeds
# LONG_S; the result is then the time of the first call. The peer is left out of a shape if, by its
# rate at the last shape, a call would take longer than TOO_LONG_S.
FAR_BEHIND = 3.0
LONG_S = 4.0
TOO_LONG_S = 15.0
# Seconds of waiting before each sample, because the last implementation's threads spin for a while
# after a call.
SETTLE_S = 0.02
MIN_SAMPLES, MAX_SAMPLES = 3, 30
# An implementation is wrong if the RMS of its error exceeds this fraction of the RMS of the first
# fp32 implementation's result. Rounding to bf16 in twelve layers causes a few hundredths.
CLOSE = 0.25
# The reason for a refusal begins with these words if the run leaves the implementation out.
LEFT_OUT = "left out: "


@dataclass
class CpuRow(ContestRow):
    """One implementation of the CPU contest at one shape.

    Attributes:
        best_ratio: Time of the fastest peer in any format over the time of this implementation.
        difference: RMS of the difference to the first fp32 implementation's result, over the RMS of
            that result.
        peak_bytes: Peak resident memory of the process at this shape, after the first call.
        stock_ratio: Time of stock fp32 over the time of this implementation; set for tasks.
        embedding_error: Largest error of an element of the embeddings of real sentences, which have
            length 1. The exact embeddings are those of float64 in inference, and those of stock
            fp32 in the task ``encode``. Set for the published model only, like the next two fields.
        rank_correlation: Spearman's correlation between the similarities of all pairs of these
            sentences and the similarities of the exact embeddings.
        same_nearest: Share of these sentences whose nearest sentence is that of the exact
            embeddings.
        score_error: Largest difference of a score from the score of stock fp32.
        loss_error: Largest difference of a loss from the loss of stock fp32.
        p99: 99th percentile of the seconds of a call.
    """

    tokens: int = 0
    best_ratio: float | None = None
    difference: float | None = None
    stock_ratio: float | None = None
    embedding_error: float | None = None
    rank_correlation: float | None = None
    same_nearest: float | None = None
    score_error: float | None = None
    loss_error: float | None = None
    p99: float | None = None


@dataclass
class Setting(contest.Setting):
    """The settings of a section on the CPU."""

    ceilings: Ceilings = field(kw_only=True)
    # For each implementation, seconds per FLOP of a padded batch at the implementation's last timed
    # shape.
    rates: dict[str, float] = field(default_factory=dict)


def padded_flops(shape: EncoderShape) -> float:
    """Return the FLOPs of an implementation that computes the padding, too."""
    full = EncoderShape(shape.name, shape.config, (max(shape.lengths),) * len(shape.lengths))
    return full.flops


def play(
    shape: EncoderShape,
    series: str,
    workers: Mapping[str, Remote],
    refused: Mapping[str, str],
    notes: Mapping[str, str | None],
    setting: Setting,
) -> list[CpuRow]:
    """Return a row for each key of ``workers`` and ``refused``, in the order of the table."""
    rows = {}
    for name, engine in BY_NAME.items():
        if name in workers or name in refused:
            row = CpuRow(setting.section, series, shape.name, "encoder", engine.form, INFERENCE,
                         name, engine.ours, unit="tokens/s", tokens=shape.tokens)  # fmt: skip
            row.refused, row.note = refused.get(name), notes.get(name)
            rows[name] = row

    def first_call(name: str) -> dict[str, Any]:
        if reason := _too_slow(name, shape, setting):
            raise Failed(reason)
        return workers[name].ask("shape", lengths=list(shape.lengths))

    answers = first_calls(workers, rows, first_call, setting.notify)
    compare(answers, rows)
    seconds = {name: answers[name]["seconds"] for name in answers if not rows[name].refused}
    take_turns(seconds, workers, rows, setting.seconds)
    for name, row in rows.items():
        row.set_rates(shape.tokens, Work(shape.flops), setting.ceilings.limits(row.dtype))
        if row.seconds is not None:
            setting.rates[name] = row.seconds / padded_flops(shape)
    return list(rows.values())


def _too_slow(name: str, shape: EncoderShape, setting: Setting) -> str | None:
    """Return the reason to leave out an implementation whose call would take too long, or None."""
    if name not in setting.rates or BY_NAME[name].ours:
        return None
    expected = setting.rates[name] * padded_flops(shape)
    behind = setting.rates[name] / min(setting.rates.values())
    if expected < TOO_LONG_S or behind < FAR_BEHIND:
        return None
    return f"{LEFT_OUT}about {expected:.0f} s a call, {behind:.1f} × the fastest, by its last shape"


def first_calls(
    workers: Mapping[str, Remote],
    rows: Mapping[str, CpuRow],
    call: Callable[[str], dict[str, Any]],
    notify: Notify,
) -> dict[str, dict[str, Any]]:
    """Return the answer of each implementation to its first call, which compiles and allocates."""
    answers = {}
    for name, worker in workers.items():
        try:
            answers[name] = call(name)
            worker.ask("forget_peak")
        except Failed as failure:
            rows[name].refused = str(failure)
            notify(f"  {name}: {failure}")
            continue
        notify(f"  {name}: first call {answers[name]['seconds']:.3g} s")
    return answers


def compare(
    answers: Mapping[str, dict[str, Any]],
    rows: Mapping[str, CpuRow],
    close: Callable[[CpuRow], float] = lambda row: CLOSE,
) -> None:
    """Refuse each implementation whose result is not finite or far from the first fp32 result.

    ``close(row)`` is the largest accepted `CpuRow.difference`.
    """
    numbers = {name: np.asarray(answer["sample"]) for name, answer in answers.items()}
    order = sorted(numbers, key=lambda name: (rows[name].dtype != FP32, rows[name].ours))
    right = numbers[order[0]] if order else None
    for name, output in numbers.items():
        if not np.isfinite(output).all():
            rows[name].refused = "its result is not finite"
            continue
        difference = float(np.sqrt(np.mean((output - right) ** 2) / np.mean(right**2)))
        rows[name].difference = difference
        if difference > close(rows[name]):
            rows[name].refused = f"its result is wrong by {difference:.3g} of the RMS of fp32"


def take_turns(
    first: Mapping[str, float],
    workers: Mapping[str, Remote],
    rows: Mapping[str, CpuRow],
    seconds: float,
    always: Collection[str] = (),
) -> None:
    """Set the times and the memory in the row of every implementation that answered its first call.

    ``first`` maps each implementation to the seconds of its first call. Implementations of fastbert
    and those in ``always`` take turns even if they are slow.
    """
    once: dict[str, float] = {}
    fastest = fastest_peers(first, rows)
    for name, took in first.items():
        is_long = took > max(LONG_S, FAR_BEHIND * fastest[name]) and not rows[name].ours
        try:
            once[name] = took if is_long else workers[name].measure(1, 1)
        except Failed as failure:
            rows[name].refused = str(failure)
    fastest = fastest_peers(once, rows)
    turns = {
        name: took
        for name, took in once.items()
        if rows[name].ours or name in always or took <= max(SHORT_S, BEHIND * fastest[name])
    }
    timings = {name: Timing(took, took, took, 1) for name, took in once.items()}
    if turns:
        timings |= _alternate(turns, workers, rows, seconds)
    for name, timing in timings.items():
        row = rows[name]
        row.fill(timing)
        if name not in turns:
            row.add_note("one call: too slow to be the fastest peer")
        try:
            memory = workers[name].ask("peak")
        except Failed as failure:
            row.add_note(str(failure))
            continue
        row.peak_bytes = memory["peak"]


def _alternate(
    turns: Mapping[str, float],
    workers: Mapping[str, Remote],
    rows: Mapping[str, CpuRow],
    seconds: float,
) -> dict[str, Timing]:
    """Return the times of the implementations that take turns, or an empty dict if one fails."""
    try:
        return alternate(
            {name: workers[name] for name in turns},
            watch=RemoteWatch(),
            once=turns,
            settle=SETTLE_S,
            seconds=seconds,
            min_samples=MIN_SAMPLES,
            max_samples=MAX_SAMPLES,
        )
    except Failed as failure:
        for name in turns:
            rows[name].add_note(f"one call: the turns ended early: {failure}")
        return {}


def is_peer(row: CpuRow, other: CpuRow) -> bool:
    """Return whether the time of a row is compared with the time of the other row, a peer."""
    return not other.ours and contest.is_as_exact(other.dtype, than=row.dtype)


def fastest_peers(seconds: Mapping[str, float], rows: Mapping[str, CpuRow]) -> dict[str, float]:
    """Return for each implementation the shortest time of its peers, in seconds.

    The time of an implementation that is itself a peer may be the shortest.
    """
    return {
        name: min(
            (took for peer, took in seconds.items() if is_peer(rows[name], rows[peer])),
            default=float("inf"),
        )
        for name in seconds
    }


def judge(
    rows: Sequence[CpuRow],
    target: Callable[[CpuRow], Target],
) -> None:
    """Set the ratios, floors and goals of the rows of fastbert at one shape."""
    contest.judge(rows, is_peer, target)
    best = fastest(row for row in rows if not row.ours)
    for row in rows:
        if row.ours:
            row.best_ratio = ratio(row, best)
