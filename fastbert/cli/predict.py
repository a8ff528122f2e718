"""``fastbert predict``: the prediction of a fine-tuned model for each example of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.common import BACKENDS, ConsoleReporter, err, one_of, out, print_json


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
        Path,
        typer.Argument(
            metavar="OUT",
            help="A .jsonl that receives a line per example, or for questions a .json in the "
            "layout of SQuAD's predictions.json.",
        ),
    ],
    text_field: Annotated[
        str, typer.Option(help="Column or field that has the text of a classification.")
    ] = "text",
    pair_field: Annotated[
        str | None, typer.Option(help="Column or field that has a second text.")
    ] = None,
    words_field: Annotated[
        str,
        typer.Option(
            help="Field of a .jsonl or .parquet, or number of a column, that has the words of a "
            "sentence, or a plain sentence."
        ),
    ] = "tokens",
    id_field: Annotated[
        str | None,
        typer.Option(help="Column or field whose value becomes the id of a line of OUT."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Score above which a label of several is chosen; by default 0.5."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens that two windows of a context share; by default as trained."),
    ] = None,
    longest_answer: Annotated[
        int | None,
        typer.Option(help="Largest number of tokens of an answer; by default as trained."),
    ] = None,
    no_answer_threshold: Annotated[
        float | None,
        typer.Option(
            help="Give no answer if its score is larger than that of the best answer by more than "
            "this; by default as trained."
        ),
    ] = None,
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

    The class in config.json decides the task, and its problem_type whether the
    scores are those of one label, of several labels, or numbers. Line i of OUT
    belongs to example i.

    OUT appears when it is complete; until then OUT.partial keeps the finished
    part. After an interruption, the same command continues from there.
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
        id_field=id_field,
        threshold=threshold,
        stride=stride,
        longest_answer=longest_answer,
        no_answer_threshold=no_answer_threshold,
        max_length=max_length,
        backend=backend,
        reporter=ConsoleReporter(),
    )
    if as_json:
        print_json(result)
        return
    out.print(f"{result.examples:,} examples → {result.output}", highlight=False, soft_wrap=True)
    if result.truncated:
        err.print(f"note: {result.truncated:,} texts were cut to {result.max_length} tokens")
