"""Run the steps of a plan in separate processes, with a time limit for each step and the plan.

Commands print rows, one JSON object per line. Each row is passed on as soon as it is printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.first.canary import HUNG
from benchmarks.gpu.first.plan import Step
from benchmarks.gpu.sections import ROOT
from benchmarks.gpu.summary import row_of

OK, FAILED, OUT_OF_TIME, NOT_RUN = "ok", "FAILED", "OUT OF TIME", "NOT RUN"
# Longest wait for a killed process, in seconds; a GPU that hangs can block the end of a process.
KILLED_S = 5
# A function that receives a step and a row that one of its commands printed.
Keep = Callable[[Step, dict[str, Any]], None]


@dataclass
class Outcome:
    """The outcome of a step.

    Args:
        step: The step.
        result: "ok", "FAILED", "OUT OF TIME" or "NOT RUN".
        reason: Why the result is not "ok", in words.
        seconds: Seconds that the step took.
        statuses: Exit status of each command; None if it was ended at the limit, and 127 if it did
            not start.
        outputs: Standard output of each command.
        errors: Standard error of each command.
        skipped: The reason, in words, for each family of kernels that was left out.
    """

    step: Step
    result: str = OK
    reason: str = ""
    seconds: float = 0.0
    statuses: list[int | None] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class Tail:
    """Reads the lines that a process adds to a file."""

    def __init__(self, path: Path) -> None:
        self.file, self.rest = path.open("rb"), b""

    def lines(self, ended: bool) -> list[str]:
        """Return the lines completed since the last call; if the process `ended`, also the rest."""
        *complete, self.rest = (self.rest + self.file.read()).split(b"\n")
        if ended:
            complete.append(self.rest)
        return [line.decode("utf-8", "replace") for line in complete]


class Running:
    """The processes of a step that has started."""

    def __init__(self, step: Step, scratch: Path, seconds: float, keep: Keep) -> None:
        """Start every command; a command that does not start has the exit status 127."""
        self.step, self.start, self.keep = step, time.monotonic(), keep
        self.skipped: dict[str, str] = {}
        self.end = self.start + min(seconds, step.limit_s)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)}
        if len(step.commands) > 1:
            # The commands share the cores.
            environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.paths = [scratch / f"{step.name}-{n}" for n in range(len(step.commands))]
        self.processes: list[subprocess.Popen[bytes] | None] = []
        for command, path in zip(step.commands, self.paths, strict=True):
            with (
                path.with_suffix(".out").open("w", encoding="utf-8") as out,
                path.with_suffix(".err").open("w", encoding="utf-8") as e,
            ):
                try:
                    process = subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                        stderr=e, start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    e.write(f"{command[0]}: {error}\n")
                    process = None
            self.processes.append(process)
        self.tails = [Tail(path.with_suffix(".out")) for path in self.paths]

    def hand_on(self, ended: bool = False) -> None:
        """Pass to ``keep`` the rows that the commands have printed since the last call."""
        for tail in self.tails:
            for row in filter(None, map(row_of, tail.lines(ended))):
                self.keep(self.step, row)

    def done(self) -> bool:
        """Tell whether every command has ended, or the limit has passed."""
        self.hand_on()
        return self.overdue() or all(p is None or p.poll() is not None for p in self.processes)

    def overdue(self) -> bool:
        return time.monotonic() > self.end

    def finish(self) -> Outcome:
        """End the commands that still run, with their children, and return the outcome."""
        outcome = Outcome(self.step, skipped=self.skipped)
        for process, path in zip(self.processes, self.paths, strict=True):
            if process is None:
                outcome.statuses.append(127)
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(KILLED_S)
                outcome.statuses.append(None)
            else:
                outcome.statuses.append(process.returncode)
            outcome.outputs.append(path.with_suffix(".out").read_text("utf-8", "replace"))
            outcome.errors.append(path.with_suffix(".err").read_text("utf-8", "replace"))
        self.hand_on(ended=True)
        for tail in self.tails:
            tail.file.close()
        outcome.seconds = round(time.monotonic() - self.start, 1)
        ended = outcome.statuses.count(None)
        if ended:
            outcome.result = OUT_OF_TIME
            outcome.reason = (
                f"{ended} of {len(outcome.statuses)} processes after {outcome.seconds:.0f} s"
            )
        elif any(outcome.statuses):
            number = next(n for n, status in enumerate(outcome.statuses) if status)
            outcome.result = FAILED
            outcome.reason = f"exit status {outcome.statuses[number]}: {last_line(outcome, number)}"
        return outcome


def last_line(outcome: Outcome, number: int) -> str:
    """Return the last line that a command of a step wrote, which usually is its error."""
    text = outcome.errors[number].strip() or outcome.outputs[number].strip()
    return text.splitlines()[-1][:160] if text else "no output"


def without_hung_families(step: Step, before: Outcome) -> tuple[Step, dict[str, str]]:
    """Return a step without the commands of families that hang, and the reason for each family.

    Args:
        step: The step.
        before: The outcome of the step that ``step`` waits for, which has one command per family.
    """
    pairs = zip(before.step.families, before.statuses, strict=True)
    hung = {family: status for family, status in pairs if status in (None, HUNG)}
    indices = [n for n, family in enumerate(step.families) if family not in hung]
    less = dataclasses.replace(
        step,
        commands=tuple(step.commands[n] for n in indices),
        families=tuple(step.families[n] for n in indices),
    )
    reason = f"its {before.step.name} hangs"
    return less, {family: reason for family in dict.fromkeys(step.families) if family in hung}


def obstacle(step: Step, before: Outcome) -> str | None:
    """Return why ``step`` cannot run after ``before``, the outcome that it waits for, or None."""
    if before.result == NOT_RUN or (before.result != OK and not before.step.families):
        return f"{before.step.name}: {before.result}"
    return None


def play(
    plan: Sequence[Step],
    scratch: Path,
    limit_s: float,
    notify: Callable[[str], None] = print,
    keep_row: Keep = lambda step, row: None,
) -> list[Outcome]:
    """Run the steps one after another; background steps run at the same time as later steps.

    While a step waits for a background step, later steps run first. A step that waits for a step
    with families leaves out each family whose command hung in that step.

    Args:
        plan: The steps.
        scratch: Existing folder for the output of the commands.
        limit_s: Seconds that the whole plan may take.
        notify: Receives a line for each start and end of a step.
        keep_row: Receives each row of a command as soon as it is printed, and a row for each
            outcome.

    Returns:
        The outcomes, in the order of the plan.
    """
    end = time.monotonic() + limit_s
    waiting, beside = list(plan), list[Running]()
    outcomes: dict[str, Outcome] = {}

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.step.name] = outcome
        words = {"result": outcome.result, "reason": outcome.reason, "seconds": outcome.seconds}
        keep_row(outcome.step, {**words, "skipped": outcome.skipped})
        notify(f"[{outcome.step.name}] {outcome.result} after {outcome.seconds} s {outcome.reason}")

    def look_beside() -> None:
        for running in [r for r in beside if r.done()]:
            beside.remove(running)
            keep(running.finish())

    while waiting:
        look_beside()
        step = next((s for s in waiting if not s.after or s.after in outcomes), None)
        left = end - time.monotonic()
        if left <= 0:
            break
        if step is None:
            time.sleep(0.2)
            continue
        waiting.remove(step)
        skipped: dict[str, str] = {}
        if step.after:
            before = outcomes[step.after]
            if reason := obstacle(step, before):
                keep(Outcome(step, NOT_RUN, reason))
                continue
            if before.step.families:
                step, skipped = without_hung_families(step, before)
            for family, reason in skipped.items():
                notify(f"[{step.name}] skipped {family}: {reason}")
            if not step.commands:
                keep(Outcome(step, NOT_RUN, "every family was skipped", skipped=skipped))
                continue
        notify(f"[{step.name}] {len(step.commands)} × {shlex.join(step.commands[0])}")
        running = Running(step, scratch, left, keep_row)
        running.skipped = skipped
        if step.background:
            beside.append(running)
            continue
        while not running.done():
            time.sleep(0.05)
            look_beside()
        keep(running.finish())
    while beside and time.monotonic() < end:
        look_beside()
        time.sleep(0.05)
    for running in beside:
        keep(running.finish())
    for step in waiting:
        keep(Outcome(step, NOT_RUN, f"the {limit_s:.0f} s of the plan were over"))
    return [outcomes[step.name] for step in plan]
