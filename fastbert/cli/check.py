"""``fastbert check``: is every operation right here, on every backend that this machine can run?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastbert.cli.check_compiled import check_compiled
from fastbert.cli.common import BACKENDS, DTYPES, err, new_table, one_of, out, print_json

if TYPE_CHECKING:
    from fastbert.testing.parity import ParityRow


def check(
    op: Annotated[
        str | None,
        typer.Option(help="One operation, such as attention, or bert for the whole model."),
    ] = None,
    case: Annotated[str | None, typer.Option(help="One case of it, such as dropout.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="reference, triton, cuda or cpu; all of them if not given.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the quick cases.")] = False,
    cases: Annotated[
        int, typer.Option(help="That many random cases instead, drawn by --seed.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.", min=0)] = 0,
    aot: Annotated[
        bool,
        typer.Option(
            "--aot", help="Compile every shipped Triton launch instead: spills, registers, units."
        ),
    ] = False,
    arch: Annotated[
        str, typer.Option(help="With --aot: the GPUs to compile for, by commas.")
    ] = "80,90,100",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every tensor's row as JSON on stdout.")
    ] = False,
) -> None:
    """Compare each operation with the float64 reference: outputs and gradients.

    Error and yardstick are the largest errors against float64 of the backend
    and of plain PyTorch in the same dtype; ratio is one over the other.
    Without a GPU, Triton's kernels run in its interpreter, on the quick cases
    unless Triton is asked for by name. Exits 1 when anything fails.
    """
    if aot:
        if not check_compiled(arch, as_json):
            raise typer.Exit(1)
        return
    one_of("--backend", backend, BACKENDS)
    one_of("--dtype", dtype, DTYPES)
    if cases and case is not None:
        raise ValueError(f"--case: got {case!r} with --cases, allowed: one of the two")
    if cases and quick:
        raise ValueError(f"--quick: got it with --cases {cases}, allowed: one of the two")
    rows = list(_with_progress(op, case, backend, dtype, quick, cases, seed))
    if not rows:
        raise ValueError(f"--backend: got {backend!r}, which serves nothing of {op} here")
    summary = summarize(rows)
    if as_json:
        print_json({"passed": all(row.passed for row in rows), "summary": summary, "rows": rows})
    else:
        _print(rows, summary)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def _with_progress(
    op: str | None,
    case: str | None,
    backend: str | None,
    dtype: str | None,
    quick: bool,
    random: int,
    seed: int,
) -> Iterator[ParityRow]:
    import torch

    from fastbert.ops import backend as backends
    from fastbert.testing import model_parity, parity

    if not torch.cuda.is_available() and backend in (None, "triton") and backends.HAS_TRITON:
        backends.enable_interpreter()
    kind = None if dtype is None else getattr(torch, dtype)
    whole_model = op in (None, model_parity.CASE.op) and case in (None, model_parity.CASE.name)
    whole_model = whole_model and not random
    only_model = whole_model and (op, case) != (None, None)
    selections = [] if only_model else _selections(op, case, backend, kind, quick, random)
    selections = [{**selection, "random": random, "seed": seed} for selection in selections]
    total = sum(len(parity.plan(**selection)) for selection in selections) + int(whole_model)
    columns = (TextColumn("check"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as progress:
        task = progress.add_task("", total=total)
        command = None
        for selection in selections:
            for row in parity.check(**selection):
                if row.command != command:
                    command = row.command
                    progress.update(
                        task,
                        advance=1,
                        description=f"{row.op} {row.case} {row.backend} {row.dtype}",
                    )
                yield row
        if whole_model:
            progress.update(task, description="bert, one pre-training step")
            yield from model_parity.check_model(backend, kind, seed)


def _selections(
    op: str | None, case: str | None, backend: str | None, dtype: Any, quick: bool, random: int
) -> list[dict[str, Any]]:
    """One selection of cases per backend that serves any of them here."""
    import torch

    from fastbert.testing import parity
    from fastbert.testing.selection import find

    find(op, case)
    selections = []
    for name in BACKENDS if backend is None else (backend,):
        interpreted = name == "triton" and not torch.cuda.is_available()
        selection = {
            "op": op,
            "backend": name,
            "dtype": dtype,
            "case": case,
            "quick": quick or (interpreted and backend is None and case is None and not random),
        }
        try:
            parity.plan(**selection)
        except ValueError:
            if backend is not None:
                raise
            continue  # not a backend of this machine or operation; `fastbert info` says why
        selections.append(selection)
    return selections


def summarize(rows: list[ParityRow]) -> list[dict[str, Any]]:
    """One line per operation, backend and dtype, with the figures of its worst tensor.

    Worst is a failure if there is one, else the largest ratio.
    """
    groups: dict[tuple[str, str, str], list[ParityRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.dtype), []).append(row)
    lines = []
    for (op, backend, dtype), group in groups.items():
        worst = max(group, key=lambda row: (not row.passed, row.ratio))
        lines.append(
            {
                "op": op,
                "backend": backend,
                "dtype": dtype,
                "cases": len({row.case for row in group}),
                "worst": f"{worst.tensor} of {worst.case}",
                "error": worst.error,
                "yardstick": worst.yardstick,
                "ratio": worst.ratio,
                "passed": all(row.passed for row in group),
            }
        )
    return sorted(lines, key=lambda line: line["op"])


def _print(rows: list[ParityRow], summary: list[dict[str, Any]]) -> None:
    table = new_table()
    for heading in ("operation", "backend", "dtype"):
        table.add_column(heading, no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("worst tensor", overflow="fold")
    for heading in ("error", "yardstick", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for line in summary:
        table.add_row(
            line["op"],
            line["backend"],
            line["dtype"],
            str(line["cases"]),
            line["worst"],
            f"{line['error']:.1e}",
            f"{line['yardstick']:.1e}",
            f"{line['ratio']:.2f}",
            "[green]ok[/]" if line["passed"] else "[bold red]FAILED[/]",
        )
    out.print(table)
    failures = [row for row in rows if not row.passed]
    for row in failures:
        out.print(f"{row.op}, {row.case}, {row.backend}: {row.detail}", style="red", markup=False)
        out.print(f"  reproduce: {row.command}", markup=False, highlight=False, soft_wrap=True)
    verdict = f"{len(failures)} of {len(rows)} FAILED" if failures else f"all {len(rows)} pass"
    out.print(f"{verdict}: outputs and gradients by the tolerance rule", highlight=False)
