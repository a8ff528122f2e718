"""``fastbert bench``: the speed of the operations and the encoder compared with stock PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fastbert import json_file
from fastbert.atomic_file import write_atomically
from fastbert.cli.common import err, new_table, one_of, out, print_json

if TYPE_CHECKING:
    from fastbert.bench.encoder import EncoderRow
    from fastbert.bench.operations import OpRow
    from fastbert.machine import Machine

ENCODER = "encoder"


def bench(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Time small shapes only, in about a minute. The times are no result."
        ),
    ] = False,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Time only this operation, or encoder; may be repeated."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write all figures to this JSON file; - is stdout."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures into this .png, .svg or .pdf.")
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Print lower bounds of the GPU kernels' times on six GPUs instead, from "
            "instructions counted on this CPU. This needs no GPU and measures nothing.",
        ),
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="With --predict: triton, which is the default, or cuda."),
    ] = None,
) -> None:
    """Time operations and the encoder on every backend, beside stock PyTorch and transformers.

    All contenders of a shape take turns in one run, on random inputs that
    rotate. A time is the median of its samples. A backend that fails a case of
    [bold]fastbert check --quick[/] is not timed, and the exit status is then 1.
    """
    as_json = json_path is not None and str(json_path) == "-"
    if predict:
        for name, value in (("--quick", quick or None), ("--plot", plot)):
            if value is not None:
                raise ValueError(f"{name}: got {value} with --predict, allowed: one of the two")
        return print_bounds(op or [], json_path, backend or "triton")
    if backend is not None:
        raise ValueError(f"--backend: got {backend!r}, allowed: only with --predict")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: got {str(plot)!r}, allowed: a .png, .svg or .pdf")
    machine, operations, encoder = measure(op or [], quick=quick)
    content = {"machine": machine, "quick": quick, "operations": operations, "encoder": encoder}
    if as_json:
        print_json(content)
    else:
        print_rows(machine, operations, encoder)
    if json_path is not None and not as_json:
        json_file.write(json_path, content, json_file.record)
    if plot is not None:
        from fastbert.bench.plots import plot_bench

        write_atomically(plot, lambda path: plot_bench(path, operations, encoder, machine))
    rows: list[OpRow | EncoderRow] = [*operations, *encoder]
    refused = sorted({f"{row.engine}: {row.refused}" for row in rows if row.refused})
    for reason in refused:
        err.print(f"not timed: {reason}", style="red", markup=False, soft_wrap=True)
    if refused:
        raise typer.Exit(1)


def print_bounds(names: list[str], json_path: Path | None, backend: str) -> None:
    """Print lower bounds of kernel times as Markdown, and write them to `json_path` if not None.

    Args:
        names: Names of operations; an empty list takes all.
        json_path: The JSON file, or None; ``-`` prints JSON instead of Markdown.
        backend: "triton" or "cuda".
    """
    from fastbert.bench import predict

    one_of("--backend", backend, ("triton", "cuda"))

    known = dict.fromkeys(case.op for case in predict.cases())
    for name in names:
        one_of("--op", name, tuple(known))
    selected = [case for case in predict.cases() if case.op in (names or known)]
    with err.status("predicting") as status:
        prediction = predict.predict(
            selected, notify=lambda text: status.update(f"executing {text}"), backend=backend
        )
    if json_path is not None and str(json_path) == "-":
        print_json(prediction.to_dict())
        return
    if json_path is not None:
        json_file.write(json_path, prediction.to_dict(), json_file.record)
    for line in predict.markdown(prediction.bounds):
        typer.echo(line)


def measure(names: list[str], *, quick: bool) -> tuple[Machine, list[OpRow], list[EncoderRow]]:
    """Describe the machine and time the operations and the encoder.

    Args:
        names: Names of operations, and "encoder"; an empty list times everything.
        quick: Whether only small shapes are timed.
    """
    from fastbert.bench.encoder import bench_encoder
    from fastbert.bench.operations import bench_ops
    from fastbert.integrations import stock_models
    from fastbert.machine import describe
    from fastbert.testing.cases import TABLE_OF

    for name in names:
        one_of("--op", name, (*TABLE_OF, ENCODER))
    machine = describe()
    wanted = [name for name in names if name != ENCODER]
    operations, encoder = [], []
    with err.status("checking the parity of the first operation") as status:

        def notify(text: str) -> None:
            status.update(f"timing {text}")

        if wanted or not names:
            operations = bench_ops(wanted or None, quick=quick, notify=notify)
        if ENCODER in names or not names:
            if not stock_models.installed():
                err.print("note: transformers is not installed, so the encoder is timed without it")
            encoder = bench_encoder(quick=quick, notify=notify)
    return machine, operations, encoder


def print_rows(machine: Machine, operations: list[OpRow], encoder: list[EncoderRow]) -> None:
    """Print the machine, and the tables of the operations and the encoder."""
    for line in machine.lines():
        out.print(line, style="dim", highlight=False, soft_wrap=True)
    if operations:
        out.print(_operations_table(operations))
    if encoder:
        out.print(_encoder_table(encoder))


def _milliseconds(seconds: float | None) -> str:
    return "refused" if seconds is None else f"{seconds * 1e3:.3g}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}×[/]"


def _operations_table(rows: list[OpRow]) -> Table:
    """Make a table with a line per case, dtype and backend, and the times of stock PyTorch."""
    stock = {(r.op, r.case, r.dtype, r.direction): r.seconds for r in rows if r.engine == "torch"}
    table = new_table(
        "operations: median times in ms; speed = time of stock PyTorch / time of the backend;\n"
        "fwd+bwd = forward and backward pass; * = the backend that an operation chooses by default"
    )
    for heading in ("operation", "case", "dtype", "backend"):
        table.add_column(heading, overflow="fold")
    for heading in ("torch", "forward", "speed", "torch", "fwd+bwd", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if row.engine == "torch":
            continue
        name = row.engine.removeprefix("fastbert ") + ("*" if row.chosen else "")
        peer = stock[row.op, row.case, row.dtype, row.direction]
        lines.setdefault((row.op, row.case, row.dtype, name), []).extend(
            [_milliseconds(peer), _milliseconds(row.seconds), _times(row.speedup)]
        )
    previous = None
    for (op, case, dtype, name), cells in lines.items():
        if previous not in (None, op):
            table.add_section()
        previous = op
        table.add_row(op, case, dtype, name, *cells)
    return table


def _encoder_table(rows: list[EncoderRow]) -> Table:
    table = new_table(
        "encoder, forward pass: median times; rates count real tokens only, without padding;\n"
        "speed = time of the fastest transformers path in this run / time of the engine"
    )
    for heading in ("shape", "dtype", "engine"):
        table.add_column(heading, overflow="fold")
    for heading in ("ms", "tokens/s", "TFLOP/s", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous: Any = None
    for row in rows:
        if previous not in (None, (row.shape, row.dtype)):
            table.add_section()
        previous = (row.shape, row.dtype)
        table.add_row(
            row.shape,
            row.dtype,
            row.engine,
            _milliseconds(row.seconds),
            "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "–" if row.tflops is None else f"{row.tflops:.2f}",
            _times(row.speedup),
        )
    return table
