"""The tokenizer of any model folder: BERT's WordPiece, or any other ``tokenizer.json``."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Encoding, Tokenizer, models

from fastbert.data.tokenizer import (
    CONFIG,
    Encoded,
    WordPieceTokenizer,
    lowercase_first,
    read_config,
    read_tokenizer,
    rust_errors,
)


class JsonTokenizer:
    """A tokenizer with a model of any kind; its own post-processor adds the special tokens.

    Attributes:
        backend: The ``tokenizers.Tokenizer``.
        token_types: Whether the model has token types.
    """

    def __init__(self, tokenizer: Tokenizer, *, token_types: bool = True) -> None:
        """Wrap a tokenizer and disable its padding.

        Args:
            tokenizer: The tokenizer, which is changed in place.
            token_types: Whether the model has token types; if not, `encode_pair` returns token
                types of zero.
        """
        tokenizer.no_padding()
        self.backend = tokenizer
        self.token_types = token_types

    def encode(self, text: str, *, max_length: int | None = None) -> list[int]:
        """Return the ids of a text with special tokens.

        Args:
            text: The text.
            max_length: Largest number of ids; the end of a longer text is cut. None cuts nothing.

        Returns:
            The ids.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        return self._encode(text, None, max_length).ids

    def encode_pair(
        self, first: str, second: str, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a pair of texts with special tokens, and their token types.

        Args:
            first: The first text.
            second: The second text.
            max_length: Largest number of ids; if there are more, the texts are cut at their ends,
                the longer text first. None cuts nothing.

        Returns:
            The ids and the token types, of the same length.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        encoding = self._encode(first, second, max_length)
        types = encoding.type_ids if self.token_types else [0] * len(encoding.ids)
        return encoding.ids, types

    def encode_within(self, max_length: int, first: str, second: str | None = None) -> Encoded:
        """Encode a text or a pair, and report whether it was cut.

        Args:
            max_length: Largest number of ids.
            first: The text, or the first text of a pair.
            second: The second text of a pair; None encodes a single text.

        Returns:
            The ids, the token types and whether a text was cut. The list of token types is empty
            for a single text, for a model without token types, and if all token types are 0.

        Raises:
            ValueError: If `max_length` leaves no room for the special tokens, or if the tokenizer
                fails.
        """
        self._limit(max_length, second is not None)
        text = first if second is None else (first, second)
        with rust_errors("tokenizer: it fails"):
            # The fast method computes no offsets, which would take most of the time.
            (encoding,) = self.backend.encode_batch_fast([text])
        paired = self.token_types and second is not None
        types = encoding.type_ids if paired and any(encoding.type_ids) else []
        return Encoded(encoding.ids, types, bool(encoding.overflowing))

    def lowercase(self) -> None:
        """Convert every text that is encoded from now on to lower case."""
        lowercase_first(self.backend)

    def is_added(self, index: int) -> bool:
        """Return whether `index` is the id of a special token."""
        token = self.backend.get_added_tokens_decoder().get(index)
        return token is not None and token.special

    def _encode(self, first: str, second: str | None, max_length: int | None) -> Encoding:
        self._limit(max_length, second is not None)
        with rust_errors("tokenizer: it fails"):
            return self.backend.encode(first, second)

    def _limit(self, max_length: int | None, is_pair: bool) -> None:
        """Enable truncation to `max_length` ids, or disable truncation if `max_length` is None."""
        if max_length is None:
            self.backend.no_truncation()
        else:
            special = self.backend.num_special_tokens_to_add(is_pair)
            if max_length < special:
                raise ValueError(f"max_length: got {max_length}, allowed: at least {special}")
            self.backend.enable_truncation(max_length)


def load_tokenizer(folder: str | os.PathLike[str]) -> WordPieceTokenizer | JsonTokenizer:
    """Load the tokenizer of a model folder.

    Args:
        folder: Folder with ``tokenizer.json`` or ``vocab.txt``.

    Returns:
        A `JsonTokenizer` if ``tokenizer.json`` has another model than WordPiece, and a
        `WordPieceTokenizer` otherwise.

    Raises:
        FileNotFoundError: If the folder has neither file.
        ValueError: If a file is broken.

    Examples:
        >>> import tempfile
        >>> from fastbert.data import load_tokenizer, stories, train_tokenizer
        >>> tokenizer = train_tokenizer(stories(20, seed=0), 200)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tokenizer.save(folder)
        ...     loaded = load_tokenizer(folder)
        >>> loaded.encode("The old mill.") == tokenizer.encode("The old mill.")
        True
    """
    folder = Path(folder)
    whole = folder / "tokenizer.json"
    if whole.is_file():
        tokenizer = read_tokenizer(whole)
        if not isinstance(tokenizer.model, models.WordPiece):
            names = read_config(folder).get("model_input_names", ["token_type_ids"])
            if not isinstance(names, list):
                raise ValueError(
                    f"{folder / CONFIG}: model_input_names: got {names!r:.200}, allowed: names"
                )
            return JsonTokenizer(tokenizer, token_types="token_type_ids" in names)
    return WordPieceTokenizer.load(folder)


def model_max_length(folder: str | os.PathLike[str]) -> int | None:
    """Read the largest number of tokens of an input from ``tokenizer_config.json``.

    Args:
        folder: Model folder.

    Returns:
        The value of ``model_max_length``; None if it is absent or means that there is no limit.

    Raises:
        ValueError: If the value is not a number of at least 1, or if the file is broken.
    """
    length = read_config(Path(folder)).get("model_max_length")
    if length is None:
        return None
    is_number = isinstance(length, (int, float)) and not isinstance(length, bool)
    if not is_number or not length >= 1:
        place = Path(folder) / CONFIG
        raise ValueError(f"{place}: model_max_length: got {length!r:.200}, allowed: a number >= 1")
    # transformers writes the value 1e30 if there is no limit.
    return None if length > 1 << 30 else int(length)
