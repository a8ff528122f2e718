"""``fastbert.view``: a page that shows the attention of a model for one text."""

from __future__ import annotations

import html as markup
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastbert.atomic_file import write_atomically
from fastbert.viewer import page
from fastbert.viewer.collect import collect
from fastbert.viewer.predictions import Output
from fastbert.viewer.text import tokenize


class Page:
    """A page in one HTML file, which a notebook shows inline.

    Attributes:
        html: The HTML document.
    """

    def __init__(self, html: str) -> None:
        """Store the document."""
        self.html = html

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the document to a file, which appears complete or not at all.

        Args:
            path: Path of the file; its folder is created if it does not exist.

        Returns:
            The path of the file.

        Raises:
            ValueError: If `path` is a folder.
            OSError: If the file cannot be written.
        """
        target = Path(path)
        if target.is_dir():
            raise ValueError(f"path: got {str(path)!r}, a folder; allowed: the name of a file")
        content = self.html.encode()
        write_atomically(target, lambda temporary: temporary.write_bytes(content))
        return target

    def _repr_html_(self) -> str:
        """Return a frame with the document, for notebooks."""
        inside = markup.escape(self.html, quote=True)
        style = "width:100%;height:720px;border:1px solid #888"
        return (
            f'<iframe title="Attention" sandbox="allow-scripts allow-downloads" '
            f'style="{style}" srcdoc="{inside}"></iframe>'
        )

    def __repr__(self) -> str:
        """Return a short description."""
        return f"Page({len(self.html):,} characters)"


def view(
    model: Any,
    tokenizer: Any,
    text: str,
    pair: str | None = None,
    *,
    layers: Sequence[int] | None = None,
    output: int | None = None,
    place: int | None = None,
    pad_to: int | None = None,
    title: str | None = None,
) -> Page:
    """Show what the attention of a model does for one text.

    The page has the weights of all heads, the queries and keys, measures of each head, attention
    rollout, value-weighted norms, the model's prediction, and gradient × attention of one output.
    It is one file, which loads no other file.

    Args:
        model: A model of fastbert, a model of transformers with any head or with none, a
            ``SentenceTransformer`` or a pipeline; accelerated or not. After the call, the model is
            unchanged.
        tokenizer: A tokenizer of fastbert or a fast tokenizer of transformers. None means the
            tokenizer of `model`, which must be a ``SentenceTransformer`` or a pipeline.
        text: The text, or the first text of a pair.
        pair: The second text of a pair, or None.
        layers: Numbers of the layers, from 0; a negative number counts from the end. None means
            all.
        output: The output whose gradient is shown: the id of a token of the vocabulary for a mask,
            the number of a class, or the position of the first token of an answer. None means the
            likeliest output.
        place: Position of a token, counted from 0. For a mask or a classified token, it chooses the
            token whose output is shown, and None means the first one. For an answer, it is the last
            token, and None means the likeliest.
        pad_to: Number of tokens up to which the text is padded, to see what padding does. None
            means no padding.
        title: Title of the page; None means the name of the model.

    Returns:
        The page.

    Raises:
        TypeError: If `model`, `tokenizer` or a text has a wrong type.
        ValueError: If a text is empty or has more tokens than the model has positions, if the model
            has no attention that fastbert can compute, or if a layer or an output does not exist.

    Examples:
        >>> import fastbert
        >>> from fastbert.data import stories, train_tokenizer
        >>> tokenizer = train_tokenizer(stories(20, seed=0), 200)
        >>> config = fastbert.BertConfig.preset("tiny", vocab_size=len(tokenizer))
        >>> page = fastbert.view(fastbert.BertModel(config), tokenizer, "The old mill.")
        >>> page.html.startswith("<!DOCTYPE html>")
        True
    """
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    tokens = tokenize(tokenizer, text, pair)
    if pad_to is not None:
        tokens.pad(pad_to, _pad_id(model, tokenizer))
    collected = collect(model, tokens, layers=layers, output=Output(output, place))
    return Page(page.build(collected, tokens, title or f"Attention of {collected.name}"))


def _pad_id(model: Any, tokenizer: Any) -> int:
    for value in (getattr(tokenizer, "pad_id", None), getattr(tokenizer, "pad_token_id", None)):
        if value is not None:
            return int(value)
    config = getattr(model, "config", None)
    return int(getattr(config, "pad_token_id", None) or 0)
