"""``fastbert predict``: what a fine-tuned model says about each example of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.common import BACKENDS, err, one_of, out, print_json


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a fine-tuned model, such as OUT/model."
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="Data in a format of fastbert finetune; their labels are not read.",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .jsonl that receives a line per example.")
    ],
    text_field: Annotated[
        str, typer.Option(help="Column or field that has the text of a classification.")
    ] = "text",
    pair_field: Annotated[
        str | None, typer.Option(help="Column or field that has a second text.")
    ] = None,
    words_field: Annotated[
        str, typer.Option(help="Field of a .jsonl or .parquet that has the words of a sentence.")
    ] = "tokens",
    max_length: Annotated[
        int | None,
        typer.Option(help="Largest number of tokens; by default that of the training.", min=3),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as JSON on stdout.")
    ] = False,
) -> None:
    """Write what a fine-tuned model says about each example of INPUT to OUT.

    The class in config.json decides the task. Line i of OUT belongs to example i.
    """
    one_of("--backend", backend, BACKENDS)
    from fastbert.finetuning import predict as job

    result = job(
        model,
        data,
        output,
        text_field=text_field,
        pair_field=pair_field,
        words_field=words_field,
        max_length=max_length,
        backend=backend,
    )
    if as_json:
        print_json(result)
        return
    out.print(f"{result.examples:,} examples → {result.output}", highlight=False, soft_wrap=True)
    if result.truncated:
        err.print(f"note: {result.truncated:,} texts were cut to {result.max_length} tokens")
