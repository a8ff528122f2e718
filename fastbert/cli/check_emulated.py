"""``fastbert check --emulate``: check the compiled GPU kernels on the PTX machine.

The PTX machine is the distribution ``ptxmachine``, which executes PTX code on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastbert.cli.common import err, new_table, one_of, out, print_json_rows

if TYPE_CHECKING:
    from fastbert.testing.emulation import EmulatedRun, Selection


def check_emulated(
    arch: str,
    *,
    op: str | None,
    case: str | None,
    backend: str | None,
    dtype: str | None,
    quick: bool,
    cases: int,
    seed: int,
    schedule: int,
    approximate: float,
    as_json: bool,
) -> bool:
    """Run the cases that the arguments select on the PTX machine, and print the results.

    Returns:
        Whether the PTX machine has found no error in any run, and every tensor passes.

    Raises:
        ValueError: If a value of an option is not allowed, or if no requested backend can run.
    """
    from fastbert.testing import emulation

    one_of("--emulate", arch, emulation.ARCHITECTURES)
    one_of("--backend", backend, emulation.BACKENDS)
    selection = emulation.Selection(
        arch=arch,
        backends=_backends(backend),
        op=op,
        case=case,
        dtype=dtype,
        quick=quick or (backend is None and case is None and not cases),
        random=cases,
        seed=seed,
        schedule=schedule,
        approximate=approximate,
    )
    emulated = _with_progress(selection)
    if as_json:
        runs = print_json_rows("runs", emulated, _outcome)
    else:
        runs = list(emulated)
        _print(runs, emulation.summarize(runs))
    return all(run.passed for run in runs)


def _outcome(runs: list[EmulatedRun]) -> dict[str, Any]:
    from fastbert.testing import emulation

    return {"summary": emulation.summarize(runs), "passed": all(run.passed for run in runs)}


def _backends(asked: str | None) -> tuple[str, ...]:
    """Return the requested backend; without one, return all backends that can run here.

    A note on stderr gives the reason for each backend that cannot run.
    """
    from fastbert.testing import emulation

    if asked is not None:
        return (asked,)
    reasons = {name: emulation.obstacle(name) for name in emulation.BACKENDS}
    chosen = tuple(name for name, reason in reasons.items() if reason is None)
    if not chosen:
        refusals = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"--emulate: no backend can run here: {refusals}")
    for name, reason in reasons.items():
        if reason is not None:
            err.print(f"note: the backend {name} is left out: {reason}", highlight=False)
    return chosen


def _with_progress(selection: Selection) -> Iterator[EmulatedRun]:
    from fastbert.testing.emulation import emulate

    columns = (TextColumn("emulate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=err, transient=True
    ) as progress:
        task = progress.add_task("compiling the kernels", total=None)
        for run in emulate([selection], processes=os.cpu_count() or 1):
            description = f"{run.op} {run.case} {run.backend} {run.dtype} {run.arch}"
            progress.update(task, completed=run.number, total=run.total, description=description)
            yield run


def _print(runs: list[EmulatedRun], summary: list[dict[str, Any]]) -> None:
    table = new_table(
        "ratio: the largest error of the worst tensor, divided by that of plain PyTorch\n"
        "seconds: on the PTX machine, with the float64 reference, + to compile"
    )
    for heading in ("operation", "backend", "dtype", "GPU"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "launches", "ratio", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for line in summary:
        table.add_row(
            *(line[key] for key in ("op", "backend", "dtype", "arch")),
            str(line["cases"]),
            str(line["launches"]),
            f"{line['ratio']:.2f}",
            f"{line['seconds']:.1f} + {line['compile_seconds']:.1f}",
            "[green]ok[/]" if line["passed"] else "[bold red]FAILED[/]",
        )
    out.print(table)
    failures = [run for run in runs if not run.passed]
    for run in failures:
        name = f"{run.op}, {run.case}, {run.backend}, {run.dtype}, {run.arch}"
        details = [run.fault] if run.fault else [row.detail for row in run.rows if not row.passed]
        for detail in details:
            out.print(f"{name}: {detail}", style="red", markup=False, soft_wrap=True)
        out.print(f"  reproduce: {run.command}", markup=False, highlight=False, soft_wrap=True)
    launches = sum(line["launches"] for line in summary)
    outcome = f"{len(failures)} FAILED" if failures else "all pass"
    out.print(
        f"{len(runs)} runs, {launches} launches of compiled kernels: {outcome}. A run passes if "
        "the PTX machine finds no fault, and every tensor passes by the tolerance rule.",
        highlight=False,
    )
