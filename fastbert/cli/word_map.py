"""``fastbert word-map``: a map of the sentences that contain a word, as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.arguments import typed_text
from fastbert.cli.common import out, print_json


def word_map(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint.")
    ],
    texts: Annotated[
        Path, typer.Argument(metavar="TEXTS", help="A .txt file, or a folder of .txt files.")
    ],
    word: Annotated[str, typer.Argument(metavar="WORD", help="A word.", callback=typed_text)],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A .html file that receives the map.")
    ],
    layer: Annotated[
        int, typer.Option(help="0 is the embedding output; a negative number counts from the last.")
    ] = -1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the sentences and coordinates as JSON.")
    ] = False,
) -> None:
    """Draw the vectors of a word in all sentences of TEXTS as points.

    The points are the first two principal components. The page shows the sentence
    of a point, and has a table of all sentences.
    """
    from fastbert.analysis import page, write_map
    from fastbert.analysis import word_map as compute

    page.check_output(output)
    result = compute(model, texts, word, layer=layer)
    write_map(result, output)
    if as_json:
        print_json(result)
        return
    shares = sum(result.explained)
    out.print(
        f"{len(result.occurrences)} of {result.found} sentences, {shares:.1%} of the variance "
        f"→ {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
