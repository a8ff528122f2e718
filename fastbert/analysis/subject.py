"""The subject of an analysis: a model with a classification head, and texts as tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.io import checkpoint
from fastbert.jobs.classify import Classifier
from fastbert.modules import BertForSequenceClassification

# Number of tokens of a batch in inference; the results do not depend on this number.
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Pieces:
    """The tokens of a text, or of a pair of texts.

    Attributes:
        text: The text, or the first text of a pair.
        ids: Ids of the tokens, special tokens included.
        pieces: The tokens as the vocabulary spells them.
        words: The words of both texts. The tokenizer decides where a word ends.
        word_of: Index in `words` of the word of each token; None for special tokens.
        types: Token types; empty if all are 0.
        second: Index in `words` of the first word of the second text; None without a pair.
    """

    text: str
    ids: list[int]
    pieces: list[str]
    words: list[str]
    word_of: list[int | None]
    types: list[int] = field(default_factory=list)
    second: int | None = None

    @property
    def inside(self) -> list[int]:
        """Positions of the tokens of the text, without special tokens."""
        return [i for i, word in enumerate(self.word_of) if word is not None]

    def of_word(self, word: int) -> list[int]:
        """Return the positions of the tokens of the word with the index `word` in `words`."""
        return [i for i, index in enumerate(self.word_of) if index == word]


def split(tokenizer: Any, text: str, pair: str | None = None) -> Pieces:
    """Encode a text or a pair of texts, and assign each token to its word.

    Args:
        tokenizer: A tokenizer of `fastbert.data.load_tokenizer`.
        text: The text, or the first text of a pair.
        pair: The second text of a pair, or None.

    Returns:
        The tokens with their words.

    Raises:
        ValueError: If a text is blank, has no tokens, or contains an unpaired surrogate.
    """
    texts = {"TEXT": text} if pair is None else {"TEXT": text, "--pair": pair}
    for name, each in texts.items():
        _check_text(name, each)
    ids, types = (tokenizer.encode(text), []) if pair is None else tokenizer.encode_pair(text, pair)
    word_of: list[int | None] = [None] * len(ids)
    words: list[str] = []
    place, second = 0, None
    for name, each in texts.items():
        inner = tokenizer.backend.encode(each, add_special_tokens=False)
        if not inner.ids:
            raise ValueError(
                f"{name}: got {each!r:.200}, which has no tokens, allowed: at least one"
            )
        second = None if name == "TEXT" else len(words)
        places = range(place, len(ids) - len(inner.ids) + 1)
        start = next(i for i in places if ids[i : i + len(inner.ids)] == inner.ids)
        # A token that belongs to no word, such as a special token in the text, is a word itself.
        keys = [(-1 - i if w is None else w) for i, w in enumerate(inner.word_ids)]
        for _, group in groupby(range(len(keys)), key=keys.__getitem__):
            members = list(group)
            spans = [inner.offsets[i] for i in members]
            spelled = each[spans[0][0] : spans[-1][1]].strip()
            words.append(spelled or inner.tokens[members[0]])
            for i in members:
                word_of[start + i] = len(words) - 1
        place = start + len(inner.ids)
    pieces = [str(tokenizer.backend.id_to_token(i)) for i in ids]
    return Pieces(text, ids, pieces, words, word_of, types if any(types) else [], second)


def _check_text(name: str, text: str) -> None:
    if not text.strip():
        raise ValueError(f"{name}: got {text!r}, allowed: a text that is not blank")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got {text!r:.200}, allowed: Unicode text ({error})") from error


class Subject:
    """A classifier in fp32 whose logits, gradients and attention weights an analysis reads.

    Attributes:
        model: The classifier. `load` gives a `BertForSequenceClassification` for BERT, and an
            accelerated model of transformers for other families.
        labels: Names of the labels.
        tokenizer: The tokenizer of the model.
        limit: Number of positions of the model, in tokens.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, labels: Sequence[str], limit: int, name: str = ""
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: A model with the arguments and outputs of transformers' sequence classifiers.
            tokenizer: A tokenizer of `fastbert.data.load_tokenizer`.
            labels: Names of the labels.
            limit: Largest number of tokens of a text.
            name: Name of the model in error messages; if empty, the name of its class.
        """
        self.model, self.tokenizer = model.float().eval(), tokenizer
        self.labels, self.limit, self.name = list(labels), limit, name or type(model).__name__
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Subject:
        """Load a folder with a classification head.

        Args:
            folder: Folder or hub id of a checkpoint, such as ``OUT/model`` of ``fastbert finetune
                classify``, or of a sequence classifier of transformers.

        Returns:
            The subject, on a CUDA device if there is one.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the checkpoint has no complete classification head, has a default prompt,
                or is of a family that fastbert does not support.
        """
        loaded = Classifier(os.fspath(folder), max_length=None, backend=None)
        if loaded.tokenizer.prompt:
            raise ValueError(
                f"MODEL: {loaded.folder} has a default prompt, allowed: a model without"
            )
        model: Any = loaded.model
        if not isinstance(model, BertForSequenceClassification):
            model = model.model
        config, _ = checkpoint.read_settings(loaded.tokenizer.folder)
        tokenizer = loaded.tokenizer.tokenizer
        return cls(model, tokenizer, loaded.labels, config.max_length, str(loaded.folder))

    def split(self, text: str, pair: str | None = None) -> Pieces:
        """Encode a text or a pair of texts, and assign each token to its word.

        Args:
            text: The text, or the first text of a pair.
            pair: The second text of a pair, or None.

        Returns:
            The tokens with their words.

        Raises:
            ValueError: If a text is blank, has no tokens or contains an unpaired surrogate, or if
                there are more tokens than the model has positions.
        """
        pieces = split(self.tokenizer, text, pair)
        if len(pieces.ids) > self.limit:
            raise ValueError(
                f"TEXT: got {len(pieces.ids)} tokens, allowed: at most {self.limit}, the positions "
                f"of {self.name}"
            )
        if getattr(self.model.config, "type_vocab_size", 1) < 2:
            return replace(pieces, types=[])
        return pieces

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the word embeddings of tokens, detached, of shape ``(1, L, H)``."""
        table: Any = self.model.get_input_embeddings()
        return table(torch.tensor([list(ids)], device=self.device)).detach()

    def from_embeddings(self, embeddings: Tensor, types: Sequence[int] = (), **options: Any) -> Any:
        """Call the model on word embeddings ``(B, L, H)`` without padding, and on token types."""
        mask = torch.ones(embeddings.shape[:2], dtype=torch.int64, device=self.device)
        if types:
            row = torch.tensor(list(types), device=self.device)
            options["token_type_ids"] = row.expand(len(embeddings), -1)
        return self.model(inputs_embeds=embeddings, attention_mask=mask, **options)

    @torch.no_grad()
    def logits(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """Compute the logits of sequences of any lengths.

        Args:
            sequences: N sequences of ids, special tokens included.
            types: N sequences of token types; if there are none, all token types are 0.

        Returns:
            Logits of shape ``(N, labels)``, fp32 on the CPU.
        """
        longest = max(map(len, sequences))
        count = max(1, TOKENS_PER_BATCH // longest)
        rows = []
        for start in range(0, len(sequences), count):
            ids, mask = padded(sequences[start : start + count], self._pad())
            inputs = {"input_ids": ids, "attention_mask": mask}
            if any(map(any, types)):
                inputs["token_type_ids"] = padded(types[start : start + count], 0)[0]
            output = self.model(**{name: rows.to(self.device) for name, rows in inputs.items()})
            rows.append(output.logits.float().cpu())
        return torch.cat(rows)

    def attentions(self, ids: Sequence[int], types: Sequence[int] = ()) -> list[Tensor]:
        """Compute the attention weights of each layer.

        Args:
            ids: Ids of the L tokens of a text, special tokens included.
            types: Token types; if empty, all token types are 0.

        Returns:
            The weights of each layer, of shape ``(1, heads, L, L)``.

        Raises:
            ValueError: If the model returns no attention weights.
        """
        with torch.no_grad():
            tensor = torch.tensor([list(ids)], device=self.device)
            inputs = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
            if types:
                inputs["token_type_ids"] = torch.tensor([list(types)], device=self.device)
            output = self.model(**inputs, output_attentions=True)
        attentions = list(getattr(output, "attentions", None) or ())
        if not attentions or any(weights is None for weights in attentions):
            raise ValueError(
                f"MODEL: {self.name} returns no attention weights, allowed: a model with attention "
                "(in transformers with attn_implementation='eager')"
            )
        return attentions

    def reading(self, weights: Tensor) -> Tensor:
        """Return the weights by which the classifier reads the tokens, of shape ``(L,)``.

        Args:
            weights: Weights of shape ``(L, L)``, one row for each query.

        Returns:
            The row of the first token, or the mean of the rows if the head pools the mean of all
            tokens, as ModernBERT may.
        """
        if getattr(self.model.config, "classifier_pooling", "cls") == "mean":
            return weights.mean(0)
        return weights[0]

    def target(self, name: str | None, logits: Tensor) -> int:
        """Return the index of a label.

        Args:
            name: Name of the label; None means the label with the largest logit.
            logits: Logits of shape ``(labels,)``.

        Returns:
            The index of the label in `labels`.

        Raises:
            ValueError: If there is no such label.
        """
        if name is None:
            return int(logits.argmax())
        if name not in self.labels:
            raise ValueError(f"target: got {name!r}, allowed: {', '.join(self.labels)}")
        return self.labels.index(name)

    def _pad(self) -> int:
        return getattr(self.model.config, "pad_token_id", None) or 0


def padded(sequences: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Pad sequences at the right to the length of the longest sequence.

    Args:
        sequences: B sequences of ids.
        pad: Id of the padding.

    Returns:
        Ids and mask, int64 of shape ``(B, L)``; the mask is 1 at tokens and 0 at padding.
    """
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(list(sequence))
        mask[row, : len(sequence)] = 1
    return ids, mask
