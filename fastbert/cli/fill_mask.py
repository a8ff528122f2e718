"""``fastbert fill-mask``: what the masked-LM head puts in place of [MASK]."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fastbert.cli.common import BACKENDS, new_table, one_of, out, print_json
from fastbert.jobs import fill_mask as job


def fill_mask(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a checkpoint with a masked-LM head."
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text with one or more \\[MASK].")],
    top_k: Annotated[int, typer.Option(help="Candidates per mask.", min=1)] = 5,
    backend: Annotated[
        str | None, typer.Option(help="reference, triton, cuda or cpu; chosen if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Fill each \\[MASK] of TEXT with the likeliest tokens: token, probability, sentence."""
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
        # Text, not str: a bracket in a token is no markup
        table.add_row(Text(row["token"]), f"{row['probability']:.4f}", Text(row["sentence"]))
    return table
