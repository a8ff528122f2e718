"""``fastbert view``: an HTML page that shows the attention of a model for one text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.arguments import typed_text
from fastbert.cli.common import BACKENDS, one_of, out, print_json


def view(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint.")
    ],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="The text; it may have a \\[MASK].", callback=typed_text
        ),
    ],
    pair: Annotated[
        str | None, typer.Option(help="The second text of a pair.", callback=typed_text)
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path(
        "attention.html"
    ),
    layers: Annotated[
        str | None,
        typer.Option(help="Layers, such as 0,5 or -1, separated by commas; all by default."),
    ] = None,
    target: Annotated[
        int | None,
        typer.Option(
            help="Id of the token, number of the class, or place of the first token of the answer, "
            "whose gradient is shown; by default the likeliest."
        ),
    ] = None,
    place: Annotated[
        int | None,
        typer.Option(
            help="Place of the mask or token of --target, from 0; the first by default. For an "
            "answer, the place of its last token."
        ),
    ] = None,
    pad_to: Annotated[
        int | None, typer.Option(help="Pads the text to so many tokens.", min=1)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Write a page with the attention of all heads of MODEL for TEXT, in one file for a browser."""
    one_of("--backend", backend, BACKENDS)
    from fastbert.viewer import command

    began = time.perf_counter()
    page = command.page_of(
        model, text, pair, layers=layers, output=target, place=place, pad_to=pad_to, backend=backend
    )
    path = page.save(output)
    seconds = time.perf_counter() - began
    summary = {"output": str(path), "bytes": path.stat().st_size, "seconds": seconds}
    if as_json:
        print_json(summary)
        return
    size = summary["bytes"]
    out.print(f"{size:,} bytes in {seconds:.1f} s → {path}", highlight=False, soft_wrap=True)
