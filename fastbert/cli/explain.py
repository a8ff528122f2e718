"""``fastbert explain``: explanations of one prediction by five methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fastbert.cli.arguments import typed_text
from fastbert.cli.common import err, new_table, out, print_json

if TYPE_CHECKING:
    from fastbert.analysis import Explanation


def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a checkpoint with a classification head."
        ),
    ],
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The text to classify.", callback=typed_text)
    ],
    pair: Annotated[
        str | None, typer.Option(help="The second text of a pair.", callback=typed_text)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A .html file that receives heat maps and tables."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Label to explain; by default the predicted label.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of integrated gradients.", min=1)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Explain the label that a classifier gives TEXT, or the pair of TEXT and --pair.

    The methods are gradient × input, integrated gradients, attention, rollout
    and leave-one-out. The command prints their values for each word, and their
    rank correlations. Attention and rollout have no sign.
    """
    from fastbert.analysis import explain as compute
    from fastbert.analysis import page, write_page

    if output is not None:
        page.check_output(output)
    explanation = compute(model, text, pair, target=target, steps=steps)
    if output is not None:
        write_page(explanation, output)
        err.print(f"note: wrote {output}", soft_wrap=True, highlight=False, markup=False)
    if as_json:
        print_json(explanation)
    else:
        _print(explanation)


def _print(explanation: Explanation) -> None:
    difference = explanation.logit - explanation.baseline
    out.print(
        f"label {explanation.label}, logit {explanation.logit:.4f}; "
        f"integrated gradients: {explanation.steps} steps, "
        f"completeness error {explanation.completeness_error:.2g} of {difference:.4f}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    values = new_table()
    values.add_column("word", style="bold")
    for name in explanation.attributions:
        values.add_column(name, justify="right")
    columns = [attribution.words for attribution in explanation.attributions.values()]
    for place, (word, *row) in enumerate(zip(explanation.words, *columns, strict=True)):
        if place == explanation.second:
            values.add_section()
        # Rich interprets brackets in a str as markup, but not in a Text.
        values.add_row(Text(word), *(f"{value:.4f}" for value in row))
    out.print(values)
    matrix = new_table("Spearman's rank correlation of the absolute values")
    matrix.add_column("method", style="bold")
    for name in explanation.spearman:
        matrix.add_column(name, justify="right")
    for name, correlations in explanation.spearman.items():
        cells = ("undefined" if v != v else f"{v:.2f}" for v in correlations.values())
        matrix.add_row(name, *cells)
    out.print(matrix)
