"""What the commands share: where text and JSON go, and how a user's mistake is reported."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

if TYPE_CHECKING:
    from fastbert.modules.pretrained import BertPreTrainedModel

Model = TypeVar("Model", bound="BertPreTrainedModel")

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


def jsonable(value: Any) -> Any:
    """``value`` with dataclasses as dicts, paths as strings, non-finite numbers as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def print_json(value: Any) -> None:
    """Writes ``value`` and nothing else to stdout."""
    sys.stdout.write(json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` to ``path``; the file appears complete or not at all."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` on a temporary file beside ``path`` and then renames it into place.

    The temporary file keeps the suffix of ``path``: numpy and matplotlib choose a format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def new_table(title: str | None = None) -> Table:
    """An empty table in the one style that all commands share: rules under the headings only."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def one_of(argument: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    """``value`` when it is None or allowed. Raises ValueError naming what is allowed otherwise."""
    if value is not None and value not in allowed:
        raise ValueError(f"{argument}: got {value!r}, allowed: {', '.join(allowed)}")
    return value


def refuse_backend(backend: str | None, model_type: str) -> None:
    """For a model whose head is transformers'. Raises ValueError when a backend was asked for."""
    if backend is not None:
        raise ValueError(
            f"--backend: got {backend!r}, allowed: none for a head of {model_type}, which is "
            "transformers' (the environment variable FASTBERT_BACKEND is a preference)"
        )


def load_whole(
    kind: type[Model], folder: Path, backend: str | None, parts: tuple[str, ...], head: str
) -> Model:
    """The model, refused when one of ``parts`` would be random: results of it mean nothing.

    ``parts`` are beginnings of names of weights, ``head`` is what they are called together.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind.from_pretrained(folder, backend=backend)
    for warning in caught:
        if any(part in str(warning.message) for part in parts):
            raise ValueError(f"MODEL: no whole {head}: {warning.message}")
        warnings.warn(warning.message, stacklevel=2)
    return model
