"""Comparison of a checkpoint in fastbert and in transformers by the tolerance rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbert.data import WordPieceTokenizer
from fastbert.integrations import stock_models
from fastbert.modules import BertForPreTraining
from fastbert.testing.compare import Comparison, compare
from fastbert.testing.yardstick import Yardstick

Pair = tuple[str, str]


@dataclass(frozen=True)
class Reopened:
    """The comparison of a checkpoint in fastbert and in transformers.

    Attributes:
        transformers: Version of transformers.
        pairs: Number of pairs of texts.
        longest: Length of the longest pair, in tokens.
        same_ids: Whether both tokenizers gave the same ids.
        tensors: Comparison of each output tensor.
    """

    transformers: str
    pairs: int
    longest: int
    same_ids: bool
    tensors: list[Comparison]

    @property
    def passed(self) -> bool:
        """Whether the ids are the same and all tensors are within the tolerance rule."""
        return self.same_ids and all(tensor.passed for tensor in self.tensors)

    @property
    def largest_difference(self) -> float:
        """The largest error of all tensors, against transformers in float64."""
        return max(tensor.error for tensor in self.tensors)


def pad_pairs(
    tokenizer: WordPieceTokenizer, pairs: Sequence[Pair], max_length: int
) -> dict[str, Tensor]:
    """Encode pairs of texts and pad them to the longest pair.

    Args:
        tokenizer: The tokenizer.
        pairs: Pairs of texts.
        max_length: Largest number of tokens of a pair.

    Returns:
        ``input_ids``, ``token_type_ids`` and ``attention_mask``, int64 of shape ``(B, L)``.
    """
    encoded = [tokenizer.encode_pair(a, b, max_length=max_length) for a, b in pairs]
    longest = max(len(ids) for ids, _ in encoded)
    batch = {
        "input_ids": torch.full((len(pairs), longest), tokenizer.pad_id),
        "token_type_ids": torch.zeros(len(pairs), longest, dtype=torch.int64),
        "attention_mask": torch.zeros(len(pairs), longest, dtype=torch.int64),
    }
    for row, (ids, types) in enumerate(encoded):
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        batch["token_type_ids"][row, : len(ids)] = torch.tensor(types)
        batch["attention_mask"][row, : len(ids)] = 1
    return batch


def _tensors(output: Any, mask: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a model by name; outputs at padding, without meaning, are left out."""
    real = mask.bool()
    return {
        "next-sentence logits": output.seq_relationship_logits,
        "masked-LM logits": output.prediction_logits[real],
        **{f"hidden state {i}": state[real] for i, state in enumerate(output.hidden_states)},
    }


def _same_ids(ours: WordPieceTokenizer, stock: Any, pairs: Sequence[Pair]) -> bool:
    """Return whether both tokenizers give the same ids and token types, without truncation."""
    for a, b in pairs:
        encoded = stock(a, b)
        if ours.encode_pair(a, b) != (encoded["input_ids"], encoded["token_type_ids"]):
            return False
    return True


@torch.no_grad()
def compare_with_transformers(
    checkpoint: Path, pairs: Sequence[Pair], *, max_length: int
) -> Reopened | None:
    """Compare the outputs of a checkpoint in fastbert and in transformers.

    Both models run in fp32 on the CPU, on one padded batch. Errors are measured against the model
    of transformers in float64. The error of transformers in fp32 sets the limit for fastbert. The
    models of transformers use the ``"eager"`` attention.

    Args:
        checkpoint: Folder of the checkpoint.
        pairs: Pairs of texts.
        max_length: Largest number of tokens of a pair.

    Returns:
        The comparison, or None if transformers is not installed.
    """
    if not stock_models.installed():
        return None
    tokenizer = WordPieceTokenizer.load(checkpoint)
    batch = pad_pairs(tokenizer, pairs, max_length)
    asked = {"output_hidden_states": True}
    ours = BertForPreTraining.from_pretrained(checkpoint).eval()
    stock = stock_models.pretraining_model(checkpoint)
    mask = batch["attention_mask"]
    actual = _tensors(ours(**batch, **asked), mask)
    exact = copy.deepcopy(stock).double()
    oracle = _tensors(exact(**batch, **asked), mask)
    yardstick = Yardstick(lambda: _tensors(stock(**batch, **asked), mask))
    return Reopened(
        transformers=stock_models.version(),
        pairs=len(pairs),
        longest=mask.shape[1],
        same_ids=_same_ids(tokenizer, stock_models.tokenizer(checkpoint), pairs),
        tensors=[compare(name, actual[name], oracle[name], yardstick[name]) for name in oracle],
    )
