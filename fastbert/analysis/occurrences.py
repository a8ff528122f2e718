"""The vectors of words in their contexts, after each layer of an encoder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fastbert.analysis.subject import Pieces, padded, split
from fastbert.data import load_tokenizer
from fastbert.io import checkpoint
from fastbert.modules import BertModel

BATCH = 32


class ContextEncoder:
    """An encoder that gives a vector for each word of a text.

    Attributes:
        states: Number of states: the embedding output and the output of each layer.
        limit: Number of positions of the model, in tokens.
        folder: The folder of the model.
    """

    def __init__(self, model: str | os.PathLike[str]) -> None:
        """Load an encoder in fp32, on a CUDA device if there is one.

        Args:
            model: Folder or hub id of a checkpoint of a family that fastbert supports.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the checkpoint is damaged, or of a family that fastbert does not support.
        """
        self.folder = checkpoint.find(model)
        with warnings.catch_warnings():
            # The pooler is not used, so it may be random.
            warnings.filterwarnings("ignore", message=".*pooler.*")
            self.model = BertModel.from_pretrained(self.folder, dtype=torch.float32)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(self.folder)
        self.limit = self.model.config.max_length
        self.states = self.model.config.num_hidden_layers + 1

    def split(self, text: str) -> Pieces:
        """Encode a text, and assign each token to its word; see `Subject.split`."""
        pieces = split(self.tokenizer, text)
        if len(pieces.ids) > self.limit:
            raise ValueError(
                f"TEXT: got {len(pieces.ids)} tokens, allowed: at most {self.limit}, the positions "
                f"of {self.folder}"
            )
        return pieces

    @torch.no_grad()
    def words(self, texts: Sequence[Pieces]) -> list[Tensor]:
        """Compute the vectors of all words; a word of several tokens has the mean of their states.

        Args:
            texts: Encoded texts.

        Returns:
            For each text, a tensor of shape ``(states, words, H)``, fp32 on the CPU.
        """
        vectors = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            ids, mask = padded(
                [pieces.ids for pieces in batch], self.model.config.pad_token_id or 0
            )
            device = self.model.device
            output = self.model(ids.to(device), mask.to(device), output_hidden_states=True)
            rows = torch.stack(output.hidden_states, 1).cpu()
            vectors += [_of_words(row, pieces) for row, pieces in zip(rows, batch, strict=True)]
        return vectors

    def layer(self, number: int) -> int:
        """Return the index of a state, from 0; a negative number counts from the last state.

        Args:
            number: 0 is the embedding output, and N the output of layer N.

        Returns:
            The index of the state.

        Raises:
            ValueError: If there is no such state.
        """
        if not -self.states <= number < self.states:
            raise ValueError(
                f"layer: got {number}, allowed: from {-self.states} to {self.states - 1}"
            )
        return number % self.states


def _of_words(states: Tensor, pieces: Pieces) -> Tensor:
    """Average the states ``(states, L, H)`` of the tokens of each word."""
    vectors = [states[:, pieces.of_word(word)].mean(1) for word in range(len(pieces.words))]
    return torch.stack(vectors, 1)


def places(pieces: Pieces, word: str) -> list[int]:
    """Return the indices of a word among the words of a text, regardless of upper and lower case.

    Args:
        pieces: The text, divided into words.
        word: The word to find.

    Returns:
        The index of each occurrence in ``pieces.words``.
    """
    return [i for i, piece in enumerate(pieces.words) if piece.lower() == word.lower()]
