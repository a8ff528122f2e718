"""The tokenizer of any model folder: BERT's WordPiece, or whatever its tokenizer.json describes."""

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
    """A ``tokenizers.Tokenizer`` of any kind; its own post-processor adds the special tokens.

    ``token_types`` False: the model has no token types, so pairs get zeros.
    """

    def __init__(self, tokenizer: Tokenizer, *, token_types: bool = True) -> None:
        tokenizer.no_padding()
        self.backend = tokenizer
        self.token_types = token_types

    def encode(self, text: str, *, max_length: int | None = None) -> list[int]:
        """Ids of ``text`` with special tokens, cut at the right to ``max_length``."""
        return self._encode(text, None, max_length).ids

    def encode_pair(
        self, first: str, second: str, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of both with special tokens, and their token types.

        When the result would be longer than ``max_length``, the longer text is cut at its right.
        """
        encoding = self._encode(first, second, max_length)
        types = encoding.type_ids if self.token_types else [0] * len(encoding.ids)
        return encoding.ids, types

    def encode_within(self, max_length: int, first: str, second: str | None = None) -> Encoded:
        """``encode`` or ``encode_pair`` of texts of any length, tokenised once, and whether they
        were cut."""
        self._limit(max_length, second is not None)
        text = first if second is None else (first, second)
        with rust_errors("tokenizer: it fails"):
            # Without the offsets, which take most of the time.
            (encoding,) = self.backend.encode_batch_fast([text])
        paired = self.token_types and second is not None
        types = encoding.type_ids if paired and any(encoding.type_ids) else []
        return Encoded(encoding.ids, types, bool(encoding.overflowing))

    def lowercase(self) -> None:
        """Lower-cases every text from now on, whatever the vocabulary's casing is."""
        lowercase_first(self.backend)

    def is_added(self, index: int) -> bool:
        """Whether an id is that of a special token."""
        token = self.backend.get_added_tokens_decoder().get(index)
        return token is not None and token.special

    def _encode(self, first: str, second: str | None, max_length: int | None) -> Encoding:
        self._limit(max_length, second is not None)
        with rust_errors("tokenizer: it fails"):
            return self.backend.encode(first, second)

    def _limit(self, max_length: int | None, is_pair: bool) -> None:
        """Switches the cutting to ``max_length`` on, or with None off."""
        if max_length is None:
            self.backend.no_truncation()
        else:
            special = self.backend.num_special_tokens_to_add(is_pair)
            if max_length < special:
                raise ValueError(f"max_length: got {max_length}, allowed: at least {special}")
            self.backend.enable_truncation(max_length)


def load_tokenizer(folder: str | os.PathLike[str]) -> WordPieceTokenizer | JsonTokenizer:
    """WordPieceTokenizer for a WordPiece ``tokenizer.json`` or a ``vocab.txt``, else JsonTokenizer.

    Raises FileNotFoundError when neither file is there, ValueError when a file is broken.
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
    """The longest input that ``tokenizer_config.json`` names; None when it names none.

    Raises ValueError when it names something else than a length.
    """
    length = read_config(Path(folder)).get("model_max_length")
    if length is None:
        return None
    is_number = isinstance(length, (int, float)) and not isinstance(length, bool)
    if not is_number or not length >= 1:
        place = Path(folder) / CONFIG
        raise ValueError(f"{place}: model_max_length: got {length!r:.200}, allowed: a number >= 1")
    # Folders without a limit hold 1e30.
    return None if length > 1 << 30 else int(length)
