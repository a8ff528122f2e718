"""``fastbert fill-mask``: the likeliest tokens for each [MASK] of a text."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fastbert.cli.arguments import typed_text
from fastbert.cli.common import BACKENDS, new_table, one_of, out, print_json
from fastbert.jobs import fill_mask as job


def fill_mask(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a checkpoint with a masked-LM head."
        ),
    ],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="A text with at least one \\[MASK].", callback=typed_text
        ),
    ],
    top_k: Annotated[int, typer.Option(help="Number of tokens for each \\[MASK].", min=1)] = 5,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List the likeliest tokens for each \\[MASK] of TEXT, with probabilities and sentences."""
    one_of("--backend", backend, BACKENDS)
    masks = job.predict(model, text, top_k=top_k, backend=backend)
    if as_json:
        print_json({"text": text, "masks": masks})
        return
    for mask in masks:
        out.print(_table(mask, numbered=len(masks) > 1))


def _table(mask: dict[str, Any], *, numbered: bool) -> Table:
    title = f"[MASK] at token {mask['position']}" if numbered else None
    table = new_table()
    table.title = Text(title) if title else None
    table.add_column("token", style="bold")
    table.add_column("probability", justify="right")
    table.add_column("sentence", overflow="fold")
    for row in mask["candidates"]:
        # Rich interprets brackets in a str as markup, but not in a Text.
        table.add_row(Text(row["token"]), f"{row['probability']:.4f}", Text(row["sentence"]))
    return table
