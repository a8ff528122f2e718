"""The tokenizer of any model folder: BERT's WordPiece, or whatever its tokenizer.json describes."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Encoding, Tokenizer, models

from fastbert.data.tokenizer import WordPieceTokenizer, read_config, read_tokenizer


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

    def _encode(self, first: str, second: str | None, max_length: int | None) -> Encoding:
        if max_length is None:
            self.backend.no_truncation()
        else:
            special = self.backend.num_special_tokens_to_add(second is not None)
            if max_length < special:
                raise ValueError(f"max_length: got {max_length}, allowed: at least {special}")
            self.backend.enable_truncation(max_length)
        return self.backend.encode(first, second)


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
            return JsonTokenizer(tokenizer, token_types="token_type_ids" in names)
    return WordPieceTokenizer.load(folder)


def model_max_length(folder: str | os.PathLike[str]) -> int | None:
    """The longest input that ``tokenizer_config.json`` names; None when it names none."""
    length = read_config(Path(folder)).get("model_max_length")
    # Folders without a limit hold 1e30.
    return None if length is None or length > 1 << 30 else int(length)
