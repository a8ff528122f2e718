"""``fastbert prepare``: text files become a corpus of token files for ``fastbert pretrain``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fastbert.cli.common import ConsoleReporter, err, new_table, out, print_json


class _ByteReporter(ConsoleReporter):
    """A reporter whose progress counts bytes of text."""

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        with err.status(f"training a vocabulary on {path}"):
            yield

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, TimeRemainingColumn(), console=err) as bar:
            task = bar.add_task("text", total=total, completed=done)
            yield lambda count: bar.advance(task, count)


# The defaults are copies of the defaults of PrepareOptions, because an import of PrepareOptions
# would import torch for --help. A test compares the copies.
def prepare(
    text: Annotated[
        Path,
        typer.Argument(
            metavar="TEXT", help="A .txt, .jsonl or .parquet file, or a folder of such files."
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder for the shards, the tokenizer and the summary."),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a WordPiece tokenizer; by default a vocabulary is trained."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Largest vocabulary of a tokenizer that is trained.")
    ] = 30522,
    lowercase: Annotated[
        bool, typer.Option("--lowercase/--cased", help="Remove case and accents, or keep them.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes; by default one per core.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the choice of text on which a vocabulary is trained.")
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew and replace an earlier corpus in OUT.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout.")
    ] = False,
) -> None:
    """Turn TEXT into a corpus of tokens that [bold]fastbert pretrain[/] reads without loading it.

    Headings, lists, tables and markup are left out. The same command continues a preparation that
    was stopped, and verifies the checksums of a finished one.
    """
    arguments = dict(locals())
    del arguments["as_json"]
    from fastbert.jobs.prepare import PrepareOptions
    from fastbert.jobs.prepare import prepare as run

    begun = time.perf_counter()
    summary = run(PrepareOptions(**arguments), _ByteReporter())
    if as_json:
        print_json(summary)
    else:
        _print(summary, output, time.perf_counter() - begun)


def _print(summary: dict[str, Any], output: Path, seconds: float) -> None:
    table = new_table()
    table.add_column("")
    table.add_column("number", justify="right")
    for name in ("files", "bytes", "shards", "documents", "sentences", "tokens"):
        table.add_row(name, f"{summary[name]:,}")
    table.add_row("pieces of the vocabulary", f"{summary['vocabulary']:,}")
    for part in ("sentence", "document"):
        table.add_row(f"tokens per {part}", f"{summary[f'tokens_per_{part}']:,.1f}")
    table.add_row("documents without a passage", f"{summary['documents_without_passage']:,}")
    for reason, count in summary["lines_left_out"].items():
        table.add_row(f"lines left out: {reason}", f"{count:,}")
    for reason, count in summary.get("markup_left_out", {}).items():
        table.add_row(f"left out: {reason}", f"{count:,}")
    out.print(table)
    out.print(
        f"{output} in {seconds:.1f} s; counts in summary.json, lengths in lengths.png",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
