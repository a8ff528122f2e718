"""``fastbert classify``: the labels of each line of a file, or of one text, with their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

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
        typer.Argument(metavar="INPUT", help=".txt (a text per line), .jsonl or .parquet."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help=".jsonl or .parquet: label, score, scores (of every label)."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Classify this text instead of a file, and print.")
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field of the .jsonl or column of the .parquet with the text.")
    ] = "text",
    pair_field: Annotated[
        str | None, typer.Option(help="Field or column of a second text: each line is a pair.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens kept of a line, \\[CLS] and \\[SEP] included.", min=3)
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Token budget of a batch.", min=1)] = 8192,
    backend: Annotated[
        str | None, typer.Option(help="reference, triton, cuda or cpu; chosen if not given.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary, or the result of --text, as JSON.")
    ] = False,
) -> None:
    """Label each line of INPUT; line i of OUT is line i of INPUT, blank lines too.

    Scores are probabilities: softmax over all labels, or a sigmoid of each
    where config.json says multi_label_classification or has a single label;
    for regression they are the numbers. A cross-encoder's folder says itself
    whether they are a sigmoid or the numbers. The label is that of the largest.

    OUT holds label, score and scores, and nothing else. It appears when it is
    whole; until then OUT.partial keeps what is done, and after an
    interruption the same command goes on from there.
    """
    one_of("--backend", backend, BACKENDS)
    if text is not None and (source is not None or pair_field is not None):
        given = "INPUT" if source is not None else "--pair-field"
        raise ValueError(f"--text: got one with {given}, allowed: --text, or INPUT and OUT")
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
    texts = Texts(source, fields, reporter)
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
        # Text, not str: a bracket in a label is no markup
        table.add_row(Text(label), f"{score:.4f}")
    out.print(table)
