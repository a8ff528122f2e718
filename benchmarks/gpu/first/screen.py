"""The results of the first contact: one screen of text, and the result files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.first import canary, graphs
from benchmarks.gpu.first.plan import Step
from benchmarks.gpu.first.run import FAILED, OK, Outcome
from benchmarks.gpu.first.smoke import MARK
from benchmarks.gpu.summary import lines_of_rows, row_of, rows_of

# The log has at most this many characters of a command's output, from its end.
TAIL = 20_000
# Largest number of lines of details for each step on the screen; the files have all lines.
SHOWN = 6


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the JSON objects that the commands of a step printed, one per line."""
    return list(filter(None, map(row_of, "\n".join(outcome.outputs).splitlines())))


class Rows:
    """The file ``rows.jsonl``, to which each row of the plan is added as soon as it is known.

    The file is complete up to the moment at which the machine is lost.
    """

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "rows.jsonl").open("w", encoding="utf-8")

    def add(self, step: Step, row: dict[str, Any]) -> None:
        """Write a row with the name of its step."""
        self.file.write(json.dumps({"step": step.name, **row}) + "\n")
        self.file.flush()


def smoke_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the number of cases that passed, then the errors and the cases that never ended."""
    said = [record for record in records(outcome) if MARK in record]
    done = [record for record in said if record[MARK] == "done"]
    names = {(r["op"], r["case"]) for r in done}
    bad = [record for record in done if record["faults"]]
    kernels = {kernel for record in done for kernel in record["kernels"]}
    yield f"{len(names) - len(bad)} of {len(names)} cases, {len(kernels)} kernels"
    yield from (f"{r['op']} {r['case']}: {'; '.join(r['faults'])}" for r in bad)
    yield from (
        f"{op} {case}: never ended"
        for op, case in dict.fromkeys((r["op"], r["case"]) for r in said)
        if (op, case) not in names
    )


def never_launched(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[str]:
    """Return those shipped kernels in ``names`` that no case of the step "smoke" launched."""
    seen = {
        kernel
        for outcome in outcomes
        if outcome.step.name == "smoke"
        for record in records(outcome)
        for kernel in record.get("kernels", ())
    }
    return sorted(set(names) - seen)


def parities(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the rows of every ``fastbert check`` of a step; a command without rows gives none."""
    return [record for record in records(outcome) if "tensor" in record]


def check_lines(outcome: Outcome) -> Iterator[str]:
    rows = parities(outcome)
    bad = [row for row in rows if not row["passed"]]
    worst = max((row["ratio"] for row in rows if row["ratio"] is not None), default=0.0)
    backends = Counter(row["backend"] for row in rows)
    counted = ", ".join(f"{backend} {number}" for backend, number in sorted(backends.items()))
    yield f"{len(rows) - len(bad)} of {len(rows)} tensors pass ({counted}), worst ratio {worst:.2f}"
    yield from (f"{r['op']} {r['case']} {r['backend']} {r['tensor']}: {r['detail']}" for r in bad)


def compile_lines(outcome: Outcome) -> Iterator[str]:
    launches = records(outcome)
    bad = [launch for launch in launches if launch.get("faults")]
    total = launches[-1]["total"] if launches else 0
    yield f"{len(launches)} of {total} launches compiled, {len(bad)} with faults"
    yield from (f"{launch['name']}: {'; '.join(launch['faults'])}" for launch in bad)


def graph_lines(outcome: Outcome) -> Iterator[str]:
    said = [record for record in records(outcome) if graphs.MARK in record]
    bad = [record for record in said if record["faults"]]
    yield f"{len(said) - len(bad)} of {len(graphs.COMPARISONS)} comparisons agree"
    yield from (f"{record[graphs.MARK]}: {'; '.join(record['faults'])}" for record in bad)


def canary_lines(outcome: Outcome) -> Iterator[str]:
    said = {record[canary.MARK]: record for record in records(outcome) if canary.MARK in record}
    good = [family for family, record in said.items() if record["result"] == canary.OK]
    yield f"{len(good)} of {len(outcome.step.families)} families of CUDA C++ kernels run"
    for family in outcome.step.families:
        record = said.get(family, {"result": "never started", "faults": []})
        if record["result"] != canary.OK:
            yield f"{family} {record['result']}: {'; '.join(record.get('faults', []))}"


def attention_lines(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each shape that was timed, even if the step was ended early."""
    yield from lines_of_rows(rows_of(records(outcome)))


def sanitizer_lines(outcome: Outcome) -> Iterator[str]:
    for command, output, error in zip(
        outcome.step.commands, outcome.outputs, outcome.errors, strict=True
    ):
        tool = command[command.index("--tool") + 1]
        marked = [line for line in (output + error).splitlines() if line.startswith("=========")]
        summary = next((line for line in reversed(marked) if "SUMMARY" in line), "no summary")
        cases = sum(1 for record in records(outcome) if record.get(MARK) == "done")
        yield f"{tool}: {summary.lstrip('= ')} ({cases} cases in all tools)"


def machine_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the GPU and the versions from the output of ``fastbert info``."""
    shown: dict[str, str] = {}
    for line in outcome.outputs[0].splitlines():
        name, _, value = line.strip().partition(" ")
        if name in ("gpu", "torch", "triton", "python"):
            shown.setdefault(name, value.strip())
    yield ", ".join(f"{name} {value}" for name, value in shown.items())


def of(outcome: Outcome) -> list[str]:
    """Return the lines of a step on the screen, without its result."""
    skipped = [f"skipped {family}: {reason}" for family, reason in outcome.skipped.items()]
    return [*(_lines(outcome) if outcome.outputs else []), *skipped]


def _lines(outcome: Outcome) -> list[str]:
    name = outcome.step.name
    if name.startswith("smoke"):
        return list(smoke_lines(outcome))
    if name.startswith("check"):
        return list(check_lines(outcome))
    if name.startswith("sanitizer"):
        return list(sanitizer_lines(outcome))
    if name == "graphs":
        return list(graph_lines(outcome))
    if name == "machine":
        return list(machine_lines(outcome))
    if name == "compile":
        return list(compile_lines(outcome))
    if name == "canary":
        return list(canary_lines(outcome))
    if name.startswith("attention"):
        return list(attention_lines(outcome))
    return []


def settle(outcome: Outcome) -> None:
    """Mark a step as failed if it exited with 0 but ran no case, or if one of its cases failed."""
    name = outcome.step.name
    if outcome.result != OK:
        return
    if name.startswith(("smoke", "sanitizer", "graphs")) and not records(outcome):
        outcome.result, outcome.reason = FAILED, "no case ran"
    elif name.startswith("smoke") and len(list(smoke_lines(outcome))) > 1:
        outcome.result, outcome.reason = FAILED, "cases have faults"
    elif name.startswith("check") and not parities(outcome):
        outcome.result, outcome.reason = FAILED, "no tensor was compared"


def screen(outcomes: Sequence[Outcome], missed: Sequence[str]) -> list[str]:
    """Return the lines of the screen: a block for each step, which begins with its result."""
    text = []
    for outcome in outcomes:
        lines = of(outcome)
        settle(outcome)
        head = f"{outcome.step.name:<15} {outcome.result:<12} {outcome.seconds:6.1f} s"
        first = lines[0] if lines else outcome.step.about
        text.append(f"{head}  {first}{f' [{outcome.reason}]' if outcome.reason else ''}")
        text += [f"{'':<16}{line[:150]}" for line in lines[1 : 1 + SHOWN]]
        if len(lines) > 1 + SHOWN:
            text.append(f"{'':<16}… and {len(lines) - 1 - SHOWN} more lines in summary.json")
    if missed:
        text.append(f"no case launched: {', '.join(missed)}")
    return text


def write(outcomes: Sequence[Outcome], folder: Path, text: Sequence[str]) -> None:
    """Write ``summary.json`` and ``first.log``."""
    steps = [
        {
            "step": o.step.name, "result": o.result, "reason": o.reason, "seconds": o.seconds,
            "statuses": o.statuses, "lines": of(o),
        }
        for o in outcomes
    ]  # fmt: skip
    content = {"screen": list(text), "steps": steps}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "first.log").open("w", encoding="utf-8") as log:
        for outcome in outcomes:
            for number, command in enumerate(outcome.step.commands[: len(outcome.outputs)]):
                log.write(f"\n$ {' '.join(command)}\n")
                for part in (outcome.outputs[number], outcome.errors[number]):
                    log.write(part[-TAIL:])
