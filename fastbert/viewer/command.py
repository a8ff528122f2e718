"""Load a model folder for ``fastbert view``, with the head that its checkpoint was saved with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastbert import modules
from fastbert.config import OWN_TYPES
from fastbert.data import WordPieceTokenizer
from fastbert.io import checkpoint
from fastbert.modules import BertModel
from fastbert.viewer.model_name import model_name
from fastbert.viewer.show import Page, view


def page_of(
    model: str,
    text: str,
    pair: str | None,
    *,
    layers: str | None,
    output: int | None,
    place: int | None,
    pad_to: int | None,
    backend: str | None,
) -> Page:
    """Load a model with its tokenizer, and return the page that shows its attention for a text.

    Args:
        model: Folder or hub id of a checkpoint.
        text: The text, or the first text of a pair.
        pair: The second text of a pair, or None.
        layers: Numbers of layers, separated by commas; None means all.
        output: The output whose gradient is shown, as in `view`.
        place: The position of the token whose output is shown, as in `view`.
        pad_to: Number of tokens up to which the text is padded, as in `view`.
        backend: Backend of the model; None lets each operation choose.

    Returns:
        The page.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the model or an argument is not allowed.
    """
    for name, value in (("TEXT", text), ("--pair", pair)):
        if value is not None and not value.strip():
            raise ValueError(f"{name}: got {value!r}, allowed: a text that is not empty")
    numbers = None if layers is None else _numbers(layers)
    folder = checkpoint.find(model)
    config, architectures = checkpoint.read_settings(folder)
    if config.model_type in OWN_TYPES:
        kind: Any = next((getattr(modules, n, None) for n in architectures), None) or BertModel
        loaded: Any = kind.from_pretrained(folder, backend=backend)
        tokenizer: Any = WordPieceTokenizer.load(folder)
    else:
        from fastbert.integrations import stock_heads

        if backend is not None:
            raise ValueError(
                f"--backend: got {backend!r}, allowed: none for {config.model_type}, whose model "
                "is that of transformers"
            )
        loaded, tokenizer = stock_heads.as_saved(folder, architectures)
    name = model_name(model, checkpoint.read_source(folder)) or Path(model).name
    return view(
        loaded,
        tokenizer,
        text,
        pair,
        layers=numbers,
        output=output,
        place=place,
        pad_to=pad_to,
        title=f"Attention of {name}",
    )


def _numbers(layers: str) -> list[int]:
    try:
        return [int(number) for number in layers.split(",")]
    except ValueError as error:
        raise ValueError(
            f"--layers: got {layers!r}, allowed: numbers separated by commas, such as 0,-1"
        ) from error
