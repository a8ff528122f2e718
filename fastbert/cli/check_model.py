"""``fastbert check MODEL``: compare the user's model in stock code with the accelerated model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastbert.cli.arguments import typed_names
from fastbert.cli.common import ConsoleReporter, err, new_table, out, print_json_rows
from fastbert.jobs.texts import Texts

if TYPE_CHECKING:
    from fastbert.parity import LeftOut, Report, Row

# The parameters of the command that are allowed with MODEL, and the parameters that need TEXTS.
OF_MODEL = {"model", "texts", "field", "pair_field", "dtype", "seed", "as_json"}
OF_TEXTS = ("field", "pair_field")


def refuse_together(ctx: typer.Context, model: str | None, texts: Path | None) -> None:
    """Raise ValueError if the user typed an option that MODEL excludes, or that needs TEXTS.

    Args:
        ctx: The click context of the command, which says what the user typed.
        model: Value of the argument MODEL; None if it is absent.
        texts: Value of the argument TEXTS; None if it is absent.
    """
    names = typed_names(ctx.command.params)
    given = [n for n in ctx.params if _is_typed(ctx, n)]
    if model is not None:
        for name in given:
            if name not in OF_MODEL:
                raise ValueError(
                    f"{names[name]}: got {ctx.params[name]!r} with MODEL {model}, allowed: one of "
                    "the two"
                )
    for name in given:
        if name in OF_TEXTS and texts is None:
            raise ValueError(
                f"{names[name]}: got {ctx.params[name]!r} without TEXTS, allowed: with TEXTS"
            )


def _is_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_model(
    model: str,
    texts: Path | None,
    fields: tuple[str, ...],
    dtype: str | None,
    seed: int,
    *,
    as_json: bool,
) -> bool:
    """Check a model and print the results.

    Args:
        model: Folder or hub id of the model.
        texts: File of texts, or None for generated batches.
        fields: Name of the field with the text. For pairs, also the name of the field with the
            second text.
        dtype: The dtype to check; None checks fp32 and bf16.
        seed: Seed of generated batches.
        as_json: Whether JSON is printed instead of a table.

    Returns:
        Whether every row passes.
    """
    read = None if texts is None else list(Texts(texts, fields, ConsoleReporter()))
    lines = None if read is None else [row[0] if len(row) == 1 else row for row in read]
    left_out: list[LeftOut] = []
    from fastbert.parity import Report

    rows = _rows(model, lines, dtype, seed, left_out)
    if as_json:

        def rest(known: list[dict[str, Any]]) -> dict[str, Any]:
            passed = all(row["passed"] for row in known)
            return {
                "left_out": [each._asdict() for each in left_out],
                "model": model,
                "passed": passed,
            }

        known = print_json_rows("rows", (row._asdict() for row in rows), rest)
        if not known:
            raise ValueError(f"MODEL: got {model!r}, of which nothing can be compared here")
        return all(row["passed"] for row in known)
    report = Report(model, tuple(rows), tuple(left_out))
    _print(report)
    return report.passed


def _rows(
    model: str, texts: list[Any] | None, dtype: str | None, seed: int, left_out: list[LeftOut]
) -> Iterator[Row]:
    """Yield each `Row` as soon as it is known, and append each `LeftOut` to `left_out`."""
    import torch

    from fastbert.io import checkpoint

    folder = checkpoint.find(model)
    from fastbert.integrations import stock_models
    from fastbert.parity import Row, findings

    loaded, tokenizer = stock_models.whole_model(folder)
    if torch.cuda.is_available():
        loaded = loaded.to("cuda")
    dtypes = ("float32", "bfloat16") if dtype is None else (dtype,)
    with err.status("check") as status:
        results = findings(
            loaded,
            texts=texts,
            tokenizer=None if texts is None else tokenizer,
            dtypes=dtypes,
            seed=seed,
            notify=lambda text: status.update(f"check {text}"),
        )
        for each in results:
            if isinstance(each, Row):
                yield each
            else:
                left_out.append(each)


def _print(report: Report) -> None:
    from fastbert.parity.report import HEADINGS, summary_cells

    table = new_table(
        "error: the largest error of the worst batch against float64\n"
        "allowed: by the tolerance rule, from the error of stock code in the same dtype"
    )
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="left")
    for *cells, result in summary_cells(report.rows):
        table.add_row(*cells, "[green]ok[/]" if result == "ok" else f"[bold red]{result}[/]")
    out.print(table)
    for line in report.remarks():
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    out.print(report.conclusion(), markup=False, highlight=False, soft_wrap=True)
