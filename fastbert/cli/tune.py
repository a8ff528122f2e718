"""``fastbert tune``: measure on this GPU which backend, path and tile is the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fastbert.cli.common import err, new_table, one_of, out, print_json, progress_bar

if TYPE_CHECKING:
    from fastbert.bench.tune import Result

# Times in bfloat16 hold for float16 too.
DTYPES = ("bfloat16", "float32")


def tune(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint whose shapes are measured; BERT-base and MiniLM if absent.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Dtype: bfloat16 (the default) or float32; may be repeated."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the table of this GPU instead.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the results as JSON to stdout.")
    ] = False,
) -> None:
    """Measure on this GPU which backend, path and tile is the fastest at each shape.

    Every candidate first passes the parity check. A candidate that hangs or
    ends its process is left out. The result is a table in the user's cache, for
    this GPU, its driver and the installed versions. [bold]backend=None[/] then
    follows the table, and [bold]fastbert info[/] shows it.
    """
    import torch

    from fastbert.bench import tune as tuning
    from fastbert.ops import backend, tuned

    arch = backend.capability()
    if arch is None:
        raise ValueError("fastbert tune: got a machine without a CUDA GPU, allowed: one with a GPU")
    names = dtype or ["bfloat16"]
    for name in names:
        one_of("--dtype", name, DTYPES)
    file, named = backend.tuned_file(), tuned.key()
    if forget:
        return _forget(file)
    shapes = tuning.default_shapes() if model is None else tuning.shapes_of(_config(model))
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        result = tuning.tune(
            shapes,
            [getattr(torch, name) for name in names],
            gpu=str(named["gpu"]),
            arch=10 * arch[0] + arch[1],
            advance=lambda text, done, total: bar.update(
                task, description=text, completed=done, total=total
            ),
        )
    report(result, file, named, as_json=as_json)


def _forget(file: Path) -> None:
    existed = file.exists()
    file.unlink(missing_ok=True)
    out.print(f"{file}: {'deleted' if existed else 'there is no table'}", soft_wrap=True)


def _config(model: str) -> Any:
    from fastbert.io import checkpoint

    return checkpoint.without_weights(model).config({})


def report(result: Result, file: Path, named: dict[str, str | None], *, as_json: bool) -> None:
    """Print the results and then write the table, so that an error loses no result.

    Raises:
        OSError: If the table cannot be written.
    """
    from fastbert.bench import tune as tuning

    if as_json:
        content = {"file": str(file), "key": named, "rows": [r._asdict() for r in result.rows]}
        print_json(content | {"choices": result.choices})
    else:
        out.print(rows_table(result))
        for name, by_size in sorted(result.choices.items()):
            chosen = ", ".join(f"{size}: {choice}" for size, choice in sorted(by_size.items()))
            out.print(f"{name}: {chosen}", markup=False, highlight=False, soft_wrap=True)
    tuning.save(result, file, named)
    err.print(f"written: {file}", soft_wrap=True)


def rows_table(result: Result) -> Table:
    """Return the table of all candidates; an asterisk marks the fastest of its shape."""
    from fastbert.bench import tune as tuning

    table = new_table("µs on this GPU; * = the fastest forward at the shape")
    for heading in ("operation", "shape", "dtype", "candidate"):
        table.add_column(heading, no_wrap=True)
    for heading in ("forward", "backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("left out, because", overflow="fold")
    for row, is_fastest in tuning.winners(result):
        table.add_row(
            row.op,
            row.shape,
            row.dtype,
            row.candidate + "*" * is_fastest,
            *("" if s is None else f"{1e6 * s:.1f}" for s in (row.forward, row.backward)),
            row.left_out or "",
        )
    return table
