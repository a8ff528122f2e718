"""The output of all commands: text, tables, JSON, progress, and messages about user errors."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from fastbert import json_file
from fastbert.cli import streams
from fastbert.cli.arguments import name_as_typed, typed_names
from fastbert.jobs.reporter import Reporter

# Results go to stdout. Progress, notes and errors go to stderr, so that `fastbert ... --json | jq`
# reads JSON only. For a pipe or a file, rich would assume 80 columns, which are too few for the
# tables, so 120 columns are set.
out = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 120)
err = Console(stderr=True)

# These are copies of the names in fastbert.ops and fastbert.testing, because an import of these
# packages would import torch. A test compares the copies.
BACKENDS = ("reference", "triton", "cuda", "cpu")
DTYPES = ("float32", "float16", "bfloat16")

# A user can cause these errors, so a command prints only their message, on one line. Other errors
# are bugs, and Python prints their traceback. FloatingPointError means that a training diverged.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)
# The key under which click's shared dictionary `Context.meta` has the command that the user typed.
COMMAND = "fastbert.command"

Row = TypeVar("Row")


class FriendlyGroup(TyperGroup):
    """A command group that turns a user's mistake into one line on stderr and exit status 2.

    Warnings become one-line notes on stderr, without a file name and line number. Messages name
    arguments as the user typed them.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        streams.prepare()
        return super().main(*arguments, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        resolved = super().resolve_command(ctx, args)
        ctx.meta[COMMAND] = resolved[1]
        return resolved

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _print_warning
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # The reader has ended, as in `| head`; click then exits without a message.
        except USER_ERRORS as error:
            if isinstance(error, ImportError) and (error.name or "").startswith("fastbert"):
                raise  # A missing part of fastbert is not a mistake of the user.
            message = " ".join(str(error).split()) or type(error).__name__
            command = ctx.meta.get(COMMAND)
            message = name_as_typed(message, typed_names(command.params if command else ()))
            err.print(
                f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(2) from error


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = " ".join(str(message).split())
    err.print(f"note: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Write ``value`` as JSON, and nothing else, to stdout."""
    _write_json(json_file.text(value))


def _write_json(text: str) -> None:
    r"""Write JSON text; if the encoding of stdout lacks a character, escape non-ASCII as ``\u``."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # In JSON text, characters that are not ASCII are inside strings only.
        text = re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], text)
    sys.stdout.write(text)


def print_json_rows(
    name: str, rows: Iterable[Row], rest: Callable[[list[Row]], dict[str, Any]]
) -> list[Row]:
    """Write a JSON object with a list of rows to stdout, each row as soon as it is computed.

    Each row is written on a line of its own, so that the rows can be read even if the command hangs
    or is killed.

    Args:
        name: Key of the list of rows.
        rows: The rows, which are computed one after another.
        rest: Function that takes all rows and returns the other entries of the object.

    Returns:
        The rows. If there are no rows, nothing is written.
    """
    known: list[Row] = []
    for row in rows:
        _write_json(",\n" if known else f"{{{json_file.line(name)}: [\n")
        _write_json(f"{json_file.line(row)}\n")
        sys.stdout.flush()
        known.append(row)
    if known:
        entries = (f"{json_file.line(k)}: {json_file.line(v)}" for k, v in rest(known).items())
        _write_json("".join(["]", *(f",\n{entry}" for entry in entries), "}\n"]))
    return known


def new_table(title: str | None = None) -> Table:
    """Return an empty table in the style of all commands, with one line below the headings."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def one_of(argument: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    """Return ``value`` if it is None or allowed; otherwise raise ValueError."""
    if value is not None and value not in allowed:
        raise ValueError(f"{argument}: got {value!r}, allowed: {', '.join(allowed)}")
    return value


def print_summary(summary: dict[str, Any], detail: str, *, as_json: bool) -> None:
    """Print the summary of a job that computes a row for each line of a file.

    Args:
        summary: The result of ``fastbert.jobs.batch_job.compute``.
        detail: Text after the name of the output file.
        as_json: Whether the summary is printed as JSON instead of a line of text.
    """
    if as_json:
        print_json(summary)
        return
    out.print(
        f"{summary['texts']:,} texts, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s "
        f"({summary['tokens_per_second']:,.0f} tokens/s) → {summary['output']} {detail}",
        highlight=False,
        soft_wrap=True,
    )
    if summary["truncated"]:
        err.print(
            f"note: {summary['truncated']:,} texts were cut to {summary['max_length']} tokens"
        )


def is_first_process() -> bool:
    """Return whether this process has rank 0, which prints the result of a distributed training."""
    from torch import distributed

    several = distributed.is_available() and distributed.is_initialized()
    return not several or distributed.get_rank() == 0


def progress_bar() -> Progress:
    """Return a bar on stderr with a description, the number of steps and the remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err)


class ConsoleReporter(Reporter):
    """A reporter that shows notes, a spinner and a progress bar on stderr."""

    def note(self, text: str) -> None:
        err.print(f"note: {text}", soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        with err.status(f"reading {path}"):
            yield

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[Callable[[int], None]]:
        with progress_bar() as bar:
            task = bar.add_task("texts", total=total, completed=done)
            yield lambda count: bar.advance(task, count)
