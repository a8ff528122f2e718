"""Tokenization for fine-tuning: texts, sentences as lists of words, questions with contexts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding

from fastbert.data.json_tokenizer import load_tokenizer
from fastbert.data.tokenizer import (
    CONFIG,
    MOST_TOKENIZER_BYTES,
    Encoded,
    read_config,
    rust_errors,
)
from fastbert.file_size import check_file

FILES = ("tokenizer.json", "vocab.txt", "special_tokens_map.json", "added_tokens.json")
LENGTH = "model_max_length"
# The largest length of a question, in tokens; a longer question is cut (Devlin et al. 2019).
LONGEST_QUESTION = 64


class Words(NamedTuple):
    """Consecutive words of a sentence that fit into one sequence.

    Attributes:
        ids: Ids of the tokens, special tokens included.
        first: Index in the sentence of the first of these words.
        places: For each word, the index in `ids` of its first token.
    """

    ids: list[int]
    first: int
    places: list[int]


class Window(NamedTuple):
    """A question with a part of its context.

    Attributes:
        ids: Ids of the tokens, special tokens included.
        token_types: Token type of each id.
        offsets: Start and end of each token in the context, as indices of characters; None for
            tokens outside of the context.
    """

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int] | None]


class ModelTokenizer:
    """The tokenizer of a model folder; `save` copies the tokenizer into the folder of a new model.

    Attributes:
        folder: The model folder.
        limit: Largest number of tokens of a sequence.
        size: Largest id of the vocabulary plus 1.
        truncated: Number of texts, or pairs of texts, that `encode` has cut.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Load the tokenizer.

        Args:
            folder: Folder with ``tokenizer.json`` or ``vocab.txt``.
            limit: Largest number of tokens of a sequence.

        Raises:
            FileNotFoundError: If the folder has neither file.
            ValueError: If a file is broken.
        """
        self.folder, self.limit, self.truncated = folder, limit, 0
        self._tokenizer = load_tokenizer(folder)
        self._backend = self._tokenizer.backend
        self._config = read_config(folder)
        self.size = max(self._backend.get_vocab().values()) + 1
        paths = [folder / name for name in FILES if (folder / name).is_file()]
        for path in paths:
            check_file(path, MOST_TOKENIZER_BYTES)
        self._files = {path.name: path.read_bytes() for path in paths}
        # `_begin` and `_end` are empty if the tokenizer has no post-processor that adds special
        # tokens.
        self._begin, self._end = self._special()

    def _special(self) -> tuple[list[int], list[int]]:
        """Return the ids of the special tokens before and after a text."""
        ids = self._tokenizer.encode("a")
        inner = self._backend.encode("a", add_special_tokens=False).ids
        starts = range(len(ids) - len(inner) + 1)
        start = next((i for i in starts if ids[i : i + len(inner)] == inner), 0)
        return ids[:start], ids[start + len(inner) :]

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode a text or a pair of texts in at most `limit` tokens.

        If there are more tokens, the texts are cut at their ends, the longer text first.

        Args:
            texts: One text or two.

        Returns:
            The ids, the token types and whether a text was cut.

        Raises:
            ValueError: If `limit` leaves no room for the special tokens, or if the tokenizer fails.
        """
        encoded = self._tokenizer.encode_within(self.limit, *texts)
        self.truncated += encoded.truncated
        return encoded

    def encode_words(self, words: Sequence[str]) -> Iterator[Words]:
        """Encode a sentence of words, and divide it if it has more than `limit` tokens.

        A division is between two words, so that each word has its tokens in one sequence. Only a
        word that alone does not fit into a sequence loses its last tokens. A word that has no
        tokens, such as a control character, is encoded as the unknown token.

        Args:
            words: The words of the sentence.

        Yields:
            The sequences, in the order of the words.

        Raises:
            ValueError: If the tokenizer fails, or if a word has no tokens and the tokenizer has no
                unknown token.
        """
        room = self.limit - len(self._begin) - len(self._end)
        ids, first = list(self._begin), 0
        places: list[int] = []
        for index, pieces in enumerate(self._pieces(words)):
            pieces = pieces[:room]
            if places and len(ids) + len(pieces) + len(self._end) > self.limit:
                yield Words([*ids, *self._end], first, places)
                ids, places, first = list(self._begin), [], index
            places.append(len(ids))
            ids += pieces
        if places:
            yield Words([*ids, *self._end], first, places)

    def _pieces(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of each word."""
        self._backend.no_truncation()
        with rust_errors(f"{self.folder}: the tokenizer fails"):
            encoding = self._backend.encode(
                list(words), is_pretokenized=True, add_special_tokens=False
            )
        pieces: list[list[int]] = [[] for _ in words]
        for index, word in zip(encoding.ids, encoding.word_ids, strict=True):
            if word is not None:
                pieces[word].append(index)
        return [ids or [self._unknown()] for ids in pieces]

    def _unknown(self) -> int:
        token = getattr(self._backend.model, "unk_token", None)
        index = None if token is None else self._backend.token_to_id(token)
        if index is None:
            raise ValueError(
                f"{self.folder}: a word has no tokens, and the tokenizer has no unknown token"
            )
        return index

    def encode_windows(self, question: str, context: str, stride: int) -> list[Window]:
        """Encode a question with each window of its context.

        The windows have at most `limit` tokens. Two consecutive windows share `stride` tokens of
        the context, so that an answer of up to `stride` tokens is whole in one of them. A question
        of more than 64 tokens is cut.

        Args:
            question: The question.
            context: The context.
            stride: Number of context tokens that two consecutive windows share.

        Returns:
            The windows, at least one.

        Raises:
            ValueError: If `limit` leaves no room for more than `stride` tokens of the context, or
                if the tokenizer fails or adds no special tokens.
        """
        backend = self._backend
        with rust_errors(f"{self.folder}: the tokenizer fails"):
            backend.no_truncation()
            asked = backend.encode(question, add_special_tokens=False)
            if len(asked.ids) > LONGEST_QUESTION:
                question = question[: asked.offsets[LONGEST_QUESTION - 1][1]]
                asked = backend.encode(question, add_special_tokens=False)
            special = backend.num_special_tokens_to_add(True)
            if special == 0:
                raise ValueError("it adds no special tokens between a question and a context")
            room = self.limit - len(asked.ids) - special
            if room <= stride:
                raise ValueError(
                    f"max_length: got {self.limit}, which leaves {room} tokens for a context, "
                    f"allowed: more than the stride, {stride}"
                )
            backend.enable_truncation(self.limit, stride=stride, strategy="only_second")
            encoding = backend.encode(question, context)
            backend.no_truncation()
        return [_window(part) for part in (encoding, *encoding.overflowing)]

    def save(self, folder: str | os.PathLike[str], *, max_length: int | None = None) -> None:
        """Write the files of the tokenizer as they were loaded, and ``tokenizer_config.json``.

        Args:
            folder: Folder, which must exist.
            max_length: With any number, ``model_max_length`` is `limit`, so that other programs cut
                texts to this length. With None, ``tokenizer_config.json`` has the loaded values.
        """
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)
        config = self._config if max_length is None else {**self._config, LENGTH: self.limit}
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (Path(folder) / CONFIG).write_text(text, encoding="utf-8")


def _window(part: Encoding) -> Window:
    offsets = [
        offset if sequence == 1 else None
        for offset, sequence in zip(part.offsets, part.sequence_ids, strict=True)
    ]
    return Window(part.ids, part.type_ids, offsets)
