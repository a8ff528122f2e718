"""Run a plan: each step in processes of its own, with its own limit and the limit of the whole."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.first.plan import Step
from benchmarks.gpu.sections import ROOT

OK, FAILED, OUT_OF_TIME, NOT_RUN = "ok", "FAILED", "OUT OF TIME", "NOT RUN"


@dataclass
class Outcome:
    """What became of a step.

    Args:
        step: The step.
        verdict: "ok", "FAILED", "OUT OF TIME" or "NOT RUN".
        reason: The reason of another verdict than "ok", in words.
        seconds: Seconds that the step took.
        statuses: Exit status of each command; None if it was ended at the limit.
        outputs: Standard output of each command.
        errors: Standard error of each command.
    """

    step: Step
    verdict: str = OK
    reason: str = ""
    seconds: float = 0.0
    statuses: list[int | None] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Running:
    """The processes of a step that has started."""

    def __init__(self, step: Step, scratch: Path, seconds: float) -> None:
        """Start every command; a command that does not start has the exit status 127."""
        self.step, self.start = step, time.monotonic()
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

    def done(self) -> bool:
        """Tell whether every command has ended, or the limit has passed."""
        return self.overdue() or all(p is None or p.poll() is not None for p in self.processes)

    def overdue(self) -> bool:
        return time.monotonic() > self.end

    def finish(self) -> Outcome:
        """End the commands that still run, with their children, and return the outcome."""
        found = Outcome(self.step)
        for process, path in zip(self.processes, self.paths, strict=True):
            if process is None:
                found.statuses.append(127)
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                found.statuses.append(None)
            else:
                found.statuses.append(process.returncode)
            found.outputs.append(path.with_suffix(".out").read_text("utf-8", "replace"))
            found.errors.append(path.with_suffix(".err").read_text("utf-8", "replace"))
        found.seconds = round(time.monotonic() - self.start, 1)
        ended = found.statuses.count(None)
        if ended:
            found.verdict = OUT_OF_TIME
            found.reason = f"{ended} of {len(found.statuses)} processes after {found.seconds:.0f} s"
        elif any(found.statuses):
            number = next(n for n, status in enumerate(found.statuses) if status)
            found.verdict = FAILED
            found.reason = f"exit status {found.statuses[number]}: {last_line(found, number)}"
        return found


def last_line(outcome: Outcome, number: int) -> str:
    """Return the last line that a command of a step wrote, which mostly is its error."""
    text = outcome.errors[number].strip() or outcome.outputs[number].strip()
    return text.splitlines()[-1][:160] if text else "no output"


def play(
    plan: Sequence[Step], scratch: Path, limit_s: float, notify: Callable[[str], None] = print
) -> list[Outcome]:
    """Run the steps one after another, and those in the background beside them.

    A step that waits for a step in the background lets later steps pass.

    Args:
        plan: The steps.
        scratch: Existing folder for the output of the commands.
        limit_s: Seconds of the whole plan.
        notify: Receives a line for each start and end.

    Returns:
        The outcomes, in the order of the plan.
    """
    end = time.monotonic() + limit_s
    waiting, beside = list(plan), list[Running]()
    found: dict[str, Outcome] = {}

    def keep(outcome: Outcome) -> None:
        found[outcome.step.name] = outcome
        notify(
            f"[{outcome.step.name}] {outcome.verdict} after {outcome.seconds} s {outcome.reason}"
        )

    def look_beside() -> None:
        for running in [r for r in beside if r.done()]:
            beside.remove(running)
            keep(running.finish())

    while waiting:
        look_beside()
        step = next((s for s in waiting if not s.after or s.after in found), None)
        left = end - time.monotonic()
        if left <= 0:
            break
        if step is None:
            time.sleep(0.2)
            continue
        waiting.remove(step)
        if step.after and found[step.after].verdict != OK:
            keep(Outcome(step, NOT_RUN, f"{step.after}: {found[step.after].verdict}"))
            continue
        for command in step.commands[:1]:
            notify(f"[{step.name}] {len(step.commands)} × {shlex.join(command)}")
        running = Running(step, scratch, left)
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
    return [found[step.name] for step in plan]
