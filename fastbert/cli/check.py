"""``fastbert check``: the errors of every operation on every backend that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastbert.cli.check_compiled import check_compiled
from fastbert.cli.check_emulated import check_emulated
from fastbert.cli.check_model import check_model, refuse_together
from fastbert.cli.common import BACKENDS, DTYPES, err, new_table, one_of, out, print_json_rows

if TYPE_CHECKING:
    from fastbert.testing.parity import ParityRow


def check(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a model that is checked instead."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Argument(
            metavar="TEXTS",
            help="A .txt with one text per line, a .jsonl, a .csv, a .tsv or a .parquet; by "
            "default the batches are generated.",
        ),
    ] = None,
    field: Annotated[
        str,
        typer.Option(help="Field of the .jsonl, or column of another file, that has the text."),
    ] = "text",
    pair_field: Annotated[
        str | None,
        typer.Option(help="Field or column with the second text of each pair."),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(help="Check only this operation, such as attention; bert is the whole model."),
    ] = None,
    case: Annotated[str | None, typer.Option(help="Check only this case, such as dropout.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Check only this backend: reference, triton, cuda or cpu."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Check only this dtype: float32, float16 or bfloat16.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check a few small cases of each operation.")
    ] = False,
    cases: Annotated[
        int,
        typer.Option(
            help="Check this number of random cases per operation; 0 takes the named cases.", min=0
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and the random cases.", min=0)] = 0,
    aot: Annotated[
        bool,
        typer.Option(
            "--aot",
            help="Compile every shipped Triton launch instead, and judge the binaries. "
            "This needs no GPU.",
        ),
    ] = False,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="Run the compiled Triton and CUDA C++ kernels for this architecture, sm_80 or "
            "sm_90, on a machine that executes PTX on the CPU. This needs no GPU."
        ),
    ] = None,
    schedule: Annotated[
        int,
        typer.Option(
            help="With --emulate: seed of the order of warps and of the time at which asynchronous "
            "operations take effect; 0 runs warps in turn and operations at once.",
            min=0,
        ),
    ] = 1,
    approximate: Annotated[
        float,
        typer.Option(
            help="With --emulate: share of the documented error that approximate instructions "
            "make, with its sign.",
            min=-1.0,
            max=1.0,
        ),
    ] = 0.0,
    arch: Annotated[
        str,
        typer.Option(help="With --aot: architectures to compile for, by commas; 80 is sm_80."),
    ] = "80,89,90,100,120",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print a row for every tensor as JSON on stdout, as soon as it is known."
        ),
    ] = False,
) -> None:
    """Compare the outputs and gradients of each operation with the float64 reference.

    With MODEL, the command compares this model in stock code with the same
    model accelerated, in fp32 and bf16, in inference and by gradients.

    The error is the largest error of a tensor against float64. The yardstick is
    the same figure for plain PyTorch in the tested dtype. The ratio is the
    error divided by the yardstick; the tolerance rule limits it.

    Without a GPU, Triton's kernels run in its interpreter. They run the quick
    cases only, unless --backend triton or --case asks for others. So it is
    with --emulate, for triton and cuda. The exit status is 1 if a tensor
    fails, or if the PTX machine finds a fault such as a race.
    """
    refuse_together(ctx, model, texts)
    if model is not None:
        one_of("--dtype", dtype, DTYPES)
        fields = (field,) if pair_field is None else (field, pair_field)
        if not check_model(model, texts, fields, dtype, seed, as_json=as_json):
            raise typer.Exit(1)
        return
    if aot and emulate is not None:
        raise ValueError(f"--emulate: got {emulate!r} with --aot, allowed: one of the two options")
    if aot:
        if not check_compiled(arch, as_json):
            raise typer.Exit(1)
        return
    one_of("--backend", backend, BACKENDS)
    one_of("--dtype", dtype, DTYPES)
    if op is not None:
        from fastbert.testing.cases import OPS
        from fastbert.testing.model_parity import CASE

        one_of("--op", op, (*OPS, CASE.op))
    if cases and case is not None:
        raise ValueError(f"--case: got {case!r} with --cases, allowed: one of the two options")
    if cases and quick:
        raise ValueError(
            f"--quick: got the flag with --cases {cases}, allowed: one of the two options"
        )
    if emulate is not None:
        passed = check_emulated(
            emulate, op=op, case=case, backend=backend, dtype=dtype, quick=quick, cases=cases,
            seed=seed, schedule=schedule, approximate=approximate, as_json=as_json,
        )  # fmt: skip
        if not passed:
            raise typer.Exit(1)
        return
    checked = _with_progress(op, case, backend, dtype, quick, cases, seed)
    rows = print_json_rows("rows", checked, _outcome) if as_json else list(checked)
    if not rows:
        raise ValueError(
            f"--backend: got {backend!r}, allowed: a backend that runs {op or case} here"
        )
    if not as_json:
        _print(rows, summarize(rows))
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def _outcome(rows: list[ParityRow]) -> dict[str, Any]:
    return {"summary": summarize(rows), "passed": all(row.passed for row in rows)}


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
    """Return the arguments of ``parity.check`` for each backend that can run some of the cases."""
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
            continue  # The backend cannot run on this machine; `fastbert info` shows why.
        selections.append(selection)
    return selections


def summarize(rows: list[ParityRow]) -> list[dict[str, Any]]:
    """Return a dict per operation, backend and dtype, with the figures of its worst tensor.

    The worst tensor is the one with the largest ratio of the error to the yardstick, which is the
    error of plain PyTorch in the same dtype. If a tensor has failed the check, only the tensors
    that failed are considered.
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
    table = new_table(
        "error: the largest error of the worst tensor against float64\n"
        "yardstick: the same for plain PyTorch in this dtype; ratio: error / yardstick"
    )
    for heading in ("operation", "backend", "dtype"):
        table.add_column(heading, no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("worst tensor", overflow="fold")
    for heading in ("error", "yardstick", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
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
    tensors = f"{len(rows)} output and gradient tensors"
    outcome = f"{len(failures)} of {tensors} FAILED" if failures else f"all {tensors} pass"
    out.print(f"{outcome} by the tolerance rule", highlight=False)
