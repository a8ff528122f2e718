"""``fastbert demo``: pre-training, checks and timing of a small model, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastbert import json_file
from fastbert.cli.common import err, new_table, out, print_json

if TYPE_CHECKING:
    from fastbert.demo.report import DemoReport


def demo(
    output: Annotated[
        Path, typer.Option("--out", help="Folder that receives report.md, the plots and model/.")
    ] = Path("demo"),
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="A file or folder of text, as for pretrain; by default, generated stories."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the stories and the training.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures of the report as JSON on stdout.")
    ] = False,
) -> None:
    """Pre-train a small BERT, reopen it in transformers, check and time fastbert, and report.

    The demo needs no network and takes two to four minutes on two idle cores.
    The exit status is 1 if a target is missed. The results of an earlier demo
    in the folder are replaced.
    """
    from fastbert.demo.demo import run_demo

    report = run_demo(output, corpus=corpus, seed=seed, console=err)
    if as_json:
        print_json({"passed": report.passed, **json_file.jsonable(report)})
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _print(report: DemoReport) -> None:
    table = new_table("targets of the demo")
    for heading in ("target", "measured", "required"):
        table.add_column(heading, overflow="fold")
    table.add_column("result", no_wrap=True)
    for target in report.targets:
        result = "[green]ok[/]" if target.passed else "[bold red]MISSED[/]"
        table.add_row(target.name, target.figure, target.needed, result)
    out.print(table)
    out.print(
        f"report: {report.report} ({sum(report.seconds.values()):.0f} s)",
        highlight=False,
        soft_wrap=True,
    )
