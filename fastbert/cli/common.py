"""What the commands share: where text and JSON go, and how a user's mistake is reported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from fastbert import json_file
from fastbert.jobs.reporter import Reporter

# Results go to stdout, everything about the run (progress, notes, errors) to stderr, so that
# `fastbert ... --json | jq` never meets a progress bar.
# Into a pipe or a file, where rich would assume 80 columns, tables get the width they need.
out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True)

# Spelled out, because importing fastbert.ops to read them would import torch; a test compares the
# two.
BACKENDS = ("reference", "triton", "cuda", "cpu")
DTYPES = ("float32", "float16", "bfloat16")

# What a user can cause and a one-line message can explain. Anything else is a bug and keeps its
# traceback.
USER_ERRORS = (ValueError, OSError, ImportError)


class FriendlyGroup(TyperGroup):
    """A command group that turns a user's mistake into one line on stderr and exit status 2.

    Warnings become one-line notes on stderr, without the place in the source that a user cannot act
    on.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _print_warning
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `fastbert ... | head`: the framework ends quietly
        except USER_ERRORS as error:
            if isinstance(error, ImportError) and (error.name or "").startswith("fastbert"):
                raise  # a part of fastbert itself is missing: not the user's doing
            message = " ".join(str(error).split()) or type(error).__name__
            err.print(
                f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(2) from error


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = " ".join(str(message).split())
    err.print(f"note: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Writes ``value`` and nothing else to stdout."""
    sys.stdout.write(json_file.text(value))


def new_table(title: str | None = None) -> Table:
    """An empty table in the one style that all commands share: rules under the headings only."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def one_of(argument: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    """``value`` when it is None or allowed. Raises ValueError naming what is allowed otherwise."""
    if value is not None and value not in allowed:
        raise ValueError(f"{argument}: got {value!r}, allowed: {', '.join(allowed)}")
    return value


def print_summary(summary: dict[str, Any], detail: str, *, as_json: bool) -> None:
    """What a job over the lines of a file has done."""
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


class ConsoleReporter(Reporter):
    """Notes, a spinner and a progress bar on stderr."""

    def note(self, text: str) -> None:
        err.print(f"note: {text}", soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        with err.status(f"reading {path}"):
            yield

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=err) as bar:
            task = bar.add_task("texts", total=total, completed=done)
            yield lambda count: bar.advance(task, count)
