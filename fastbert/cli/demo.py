"""``fastbert demo``: the whole journey on a small model, from text to a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastbert import json_file
from fastbert.cli.common import err, new_table, out, print_json

if TYPE_CHECKING:
    from fastbert.training.report import DemoReport


def demo(
    output: Annotated[
        Path, typer.Option("--out", help="Folder for report.md, the plots and model/.")
    ] = Path("demo"),
    corpus: Annotated[
        Path | None,
        typer.Option(help="Your own text (as for pretrain); else stories made up from the seed."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds everything.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report's figures as JSON on stdout.")
    ] = False,
) -> None:
    """Train a tokenizer and a small BERT, evaluate, reopen in transformers, check and time.

    Takes under ten minutes on two cores and needs no network. Exits 1 when a
    target is missed. What an earlier demo left in the folder is replaced.
    """
    from fastbert.training.demo import run_demo

    report = run_demo(output, corpus=corpus, seed=seed, console=err)
    if as_json:
        print_json({"passed": report.passed, **json_file.jsonable(report)})
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _print(report: DemoReport) -> None:
    table = new_table("what the demo promises")
    for heading in ("target", "figure", "needed"):
        table.add_column(heading, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for target in report.targets:
        verdict = "[green]ok[/]" if target.passed else "[bold red]MISSED[/]"
        table.add_row(target.name, target.figure, target.needed, verdict)
    out.print(table)
    out.print(
        f"report: {report.report} ({sum(report.seconds.values()):.0f} s)",
        highlight=False,
        soft_wrap=True,
    )
