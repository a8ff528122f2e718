"""``fastbert classify``: the label and the scores of each line of a file, or of one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fastbert.cli.arguments import typed_text
from fastbert.cli.common import (
    BACKENDS,
    ConsoleReporter,
    new_table,
    one_of,
    out,
    print_json,
    print_summary,
)
from fastbert.jobs import classify as job
from fastbert.jobs.texts import Texts, check_output


def classify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder (or hub id) of a checkpoint with a classification head."
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT",
            help="A .txt with one text per line, a .jsonl, a .csv, a .tsv or a .parquet.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="A .jsonl or .parquet that receives label, score, and the scores of all labels.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Classify this text instead of a file, and print its scores.", callback=typed_text
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field of the .jsonl, or column of another file, that has the text.")
    ] = "text",
    pair_field: Annotated[
        str | None,
        typer.Option(help="Field or column that has a second text; each line is then a pair."),
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(help="Field or column of ids, texts or integers, which OUT then has as id."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Cut a line to this number of tokens, \\[CLS] and \\[SEP] included; "
            "by default the limit of the model.",
            min=3,
        ),
    ] = None,
    tokens_per_batch: Annotated[
        int, typer.Option(help="Largest number of tokens of a batch.", min=1)
    ] = 8192,
    backend: Annotated[
        str | None,
        typer.Option(help="reference, triton, cuda or cpu; by default each operation chooses."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a summary, or the result of --text, as JSON on stdout."),
    ] = False,
) -> None:
    """Write the label and the scores of each line of INPUT to OUT, or print the result of --text.

    Row i of OUT belongs to line i of INPUT. Blank lines of a .txt count, too; the
    first line of a .csv or .tsv has the names of the columns and does not count. The
    label has the largest score. By default, scores are a softmax over all labels. They are
    a sigmoid of each label if config.json says multi_label_classification or has
    a single label, and plain numbers for regression. For the folder of a
    cross-encoder, the activation function that the folder names applies.

    OUT has label, score and scores, and id with --id-field. It appears when it is
    complete; until then OUT.partial keeps the finished rows. After an
    interruption, the same command continues from these rows.
    """
    one_of("--backend", backend, BACKENDS)
    others = {"INPUT": source, "--pair-field": pair_field, "--id-field": id_field}
    if text is not None and any(value is not None for value in others.values()):
        given = next(name for name, value in others.items() if value is not None)
        raise ValueError(f"--text: got a text and {given}, allowed: --text, or INPUT and OUT")
    if text is not None:
        result = job.classify_text(model, text, max_length=max_length, backend=backend)
        _print_result(text, result, as_json=as_json)
        return
    if source is None or target is None:
        missing = "INPUT" if source is None else "OUT"
        raise ValueError(f"{missing}: got none, allowed: INPUT and OUT, or --text")
    check_output(target, source, (".jsonl", ".parquet"))
    reporter = ConsoleReporter()
    fields = (field,) if pair_field is None else (field, pair_field)
    texts = Texts(source, fields, reporter, id_field)
    summary = job.run(
        job.Classifier(model, max_length=max_length, backend=backend),
        texts,
        target,
        tokens_per_batch=tokens_per_batch,
        reporter=reporter,
    )
    count = len(summary["labels"])
    labels = f"{count} label{'s' if count > 1 else ''}"
    print_summary(summary, f"({labels}, {summary['function']})", as_json=as_json)


def _print_result(text: str, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"text": text, **result})
        return
    table = new_table()
    table.add_column("label", style="bold")
    table.add_column("score", justify="right")
    for label, score in sorted(result["scores"].items(), key=lambda item: -item[1]):
        # Rich interprets brackets in a str as markup, but not in a Text.
        table.add_row(Text(label), f"{score:.4f}")
    out.print(table)
