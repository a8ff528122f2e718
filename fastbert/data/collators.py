"""Collate functions that flatten a batch instead of padding it: no token is computed in vain.

For a ``torch.utils.data.DataLoader`` (``collate_fn``) or transformers' ``Trainer``
(``data_collator``). A feature is a mapping of lists, numpy arrays or tensors: input_ids (n,), and
if there are any token_type_ids (n,) and attention_mask (n,), whose zeros are dropped, so features
that were padded before are right too. Columns that a collator does not name are left out.

All collators share three arguments:

layout: "fastbert" for ``fastbert.BertFor*``: input_ids and token_type_ids (T,), cu_seqlens int32
(B + 1,), max_seqlen (an int). "transformers" for its models with ``attn_implementation="fastbert"``
or after ``fastbert.accelerate(model)``: input_ids, token_type_ids and position_ids (1, T),
cu_seq_lens_q and cu_seq_lens_k int32 (B + 1,), max_length_q and max_length_k (ints). Labels of
tokens are (T,) or (1, T), labels of sequences (B,) in both. All ids are int64; token_type_ids are
absent where the features have none. With the attention alone, transformers' own pooler sees one
sequence in (1, T): heads on top of it need ``fastbert.accelerate``, or ``fastbert.modules.pool``.

max_length: a feature with more tokens is an error; None allows any length.

position_ids_start: the first position of each sequence, for layout="transformers". 0 for BERT,
DistilBERT, ALBERT, ELECTRA and ModernBERT; pad_token_id + 1 for RoBERTa, XLM-R and CamemBERT (2 in
their published checkpoints).

Whatever is wrong raises ValueError naming the column, the example's number in the batch (from 0),
what was got and what is allowed. Collators can be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastbert.data.features import (
    LABELS,
    Feature,
    Sequences,
    Text,
    as_texts,
    flatten,
    label_column,
    refuse,
    sequence_labels,
)
from fastbert.data.masking import IGNORED, MaskingTokenizer, mask_packed
from fastbert.data.tokenizer import WordPieceTokenizer

LAYOUTS = ("fastbert", "transformers")
Batch = dict[str, Any]


@dataclass(kw_only=True)
class _PackedCollator:
    layout: str = "fastbert"
    max_length: int | None = None
    position_ids_start: int = 0

    def __post_init__(self) -> None:
        start = self.position_ids_start
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout!r}, allowed: {', '.join(LAYOUTS)}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length: got {self.max_length}, allowed: at least 1, or None")
        if start < 0 or (start and self.layout == "fastbert"):
            raise ValueError(
                f"position_ids_start: got {start} with layout={self.layout!r}, allowed: 0, or more "
                "with layout='transformers'"
            )

    def _batch(self, sequences: Sequences, ids: np.ndarray, labels: np.ndarray | None) -> Batch:
        """The batch of ``sequences`` with these ids (T,) and labels of tokens (T,) or None."""
        columns = {"input_ids": ids, "token_type_ids": sequences.token_types, "labels": labels}
        batch: Batch = {k: torch.from_numpy(v) for k, v in columns.items() if v is not None}
        lengths = np.diff(sequences.cu_seqlens)
        cu_seqlens = torch.from_numpy(sequences.cu_seqlens.astype(np.int32))
        longest = int(lengths.max())
        if self.layout == "fastbert":
            return batch | {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
        starts = np.repeat(sequences.cu_seqlens[:-1] - self.position_ids_start, lengths)
        batch["position_ids"] = torch.from_numpy(np.arange(len(ids)) - starts)
        return {name: values.unsqueeze(0) for name, values in batch.items()} | {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }


@dataclass(kw_only=True)
class PackedCollatorForSequenceClassification(_PackedCollator):
    """Packs sequences with a label each: column labels, label or label_ids.

    labels: int64 (B,) of integers, float32 (B,) of floats, float32 (B, C) of vectors of floats.
    Without labels in any feature the batch has none, as for prediction.
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        texts = as_texts(features)
        sequences = flatten(texts, self.max_length)
        batch = self._batch(sequences, sequences.ids, None)
        name = label_column(texts)
        return batch if name is None else batch | {"labels": sequence_labels(texts, name)}


@dataclass(kw_only=True)
class PackedCollatorForTokenClassification(_PackedCollator):
    """Packs sequences with a label for each token: column labels, label or label_ids (n,), -100
    where there is nothing to learn.

    labels: int64 (T,), in transformers' layout (1, T). Without labels in any feature the batch has
    none, as for prediction.
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        texts = as_texts(features)
        sequences = flatten(texts, self.max_length, label_column(texts))
        return self._batch(sequences, sequences.ids, sequences.labels)


@dataclass(kw_only=True)
class PackedCollatorForMaskedLM(_PackedCollator):
    """Packs sequences and masks them afresh at every call; see ``mask_packed`` for the shares.

    tokenizer: a ``WordPieceTokenizer``, or one of transformers with a mask token (then
    ``whole_word`` must be False). labels: the true ids where a token is predicted, -100 elsewhere,
    int64 (T,), in transformers' layout (1, T); labels in the features are left out.

    Masks are drawn from ``generator``, by default torch's own, and in a worker of a DataLoader from
    the worker's seed as well: they follow from the seed of the run, and differ between workers and
    epochs.
    """

    tokenizer: Any = field(kw_only=False)
    probability: float = 0.15
    whole_word: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"probability: got {self.probability}, allowed: a number in (0, 1]")
        self._vocabulary = _vocabulary(self.tokenizer)
        if self.whole_word and not isinstance(self.tokenizer, WordPieceTokenizer):
            kind = type(self.tokenizer).__name__
            raise ValueError(
                f"whole_word: got True with a {kind}, allowed: False, or a WordPieceTokenizer"
            )

    def __call__(self, features: Sequence[Feature]) -> Batch:
        return self._masked(as_texts(features))

    def _masked(self, texts: list[Text]) -> Batch:
        sequences = flatten(texts, self.max_length)
        size = len(self._vocabulary.is_special)
        ids, cu_seqlens = sequences.ids, sequences.cu_seqlens
        allowed = f"less than {size}, the size of the tokenizer's vocabulary"
        refuse(texts, cu_seqlens, "input_ids", ids, ids >= size, allowed)
        masked, labels = mask_packed(
            ids,
            cu_seqlens,
            np.random.default_rng(self._seed()),
            self._vocabulary,
            probability=self.probability,
            whole_word=self.whole_word,
        )
        return self._batch(sequences, masked, labels)

    def _seed(self) -> tuple[int, ...]:
        drawn = int(torch.randint(1 << 62, (), generator=self.generator))
        # A worker has a copy of the generator, the same as the others' and in each epoch.
        worker = torch.utils.data.get_worker_info()
        return (drawn,) if worker is None else (drawn, worker.seed)


@dataclass(kw_only=True)
class PackedCollatorForPreTraining(PackedCollatorForMaskedLM):
    """``PackedCollatorForMaskedLM`` for pairs with the column next_sentence_label: 0 = the second
    half follows, 1 = it does not, -100 = unknown.

    next_sentence_label: int64 (B,) in both layouts.
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        texts = as_texts(features)
        labels = sequence_labels(texts, "next_sentence_label")
        for text, label in zip(texts, labels.tolist(), strict=True):
            if label not in (0, 1, IGNORED):
                raise text.wrong("next_sentence_label", str(label), f"0, 1 or {IGNORED}")
        return self._masked(texts) | {"next_sentence_label": labels.long()}


@dataclass(kw_only=True)
class PackedCollatorForBiEncoder(_PackedCollator):
    """Packs several texts of each feature, all of one text's place before those of the next.

    With ``prefixes``, say ("anchor", "positive"), the columns are anchor_input_ids,
    positive_input_ids and so on; without, input_ids (and the others) is a list of N lists, as many
    in each feature. One pass encodes all N · B texts, and ``chunk`` takes them apart again::

        labels = batch.pop("labels", None)
        embeddings = pool(model(**batch).last_hidden_state, batch["cu_seqlens"])
        anchors, positives = embeddings.chunk(2)  # (B, H) each

    cu_seqlens has N · B + 1 elements. labels: as in ``PackedCollatorForSequenceClassification``,
    (B, ...), of the columns labels, label, label_ids, score or scores. A Trainer needs
    ``remove_unused_columns=False`` where the model's arguments are named otherwise.
    """

    prefixes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefixes is not None and (isinstance(self.prefixes, str) or not self.prefixes):
            raise ValueError(
                f"prefixes: got {self.prefixes!r}, allowed: a sequence of prefixes, or None"
            )

    def __call__(self, features: Sequence[Feature]) -> Batch:
        examples = as_texts(features)
        if self.prefixes is None:
            texts = _by_place(examples)
        else:
            texts = [
                Text(example.columns, example.where, f"{prefix}_")
                for prefix in self.prefixes
                for example in examples
            ]
        sequences = flatten(texts, self.max_length)
        batch = self._batch(sequences, sequences.ids, None)
        name = label_column(examples, (*LABELS, "score", "scores"))
        return batch if name is None else batch | {"labels": sequence_labels(examples, name)}


def _by_place(examples: list[Text]) -> list[Text]:
    """The texts of columns that hold a list per text: the first of each example, then the
    second, …"""
    columns = ("input_ids", "token_type_ids", "attention_mask")
    places: list[list[Text]] = []
    for example in examples:
        given = {k: example.columns[k] for k in columns if example.columns.get(k) is not None}
        ids = given.get("input_ids")
        if ids is None or not hasattr(ids, "__len__") or not len(ids):
            got = "nothing" if ids is None else repr(ids)
            raise example.wrong("input_ids", got, "a list of the ids of each text")
        count = len(places) if places else len(ids)
        for name, values in given.items():
            if not hasattr(values, "__len__") or len(values) != count:
                got = f"{len(values)} texts" if hasattr(values, "__len__") else repr(values)
                raise example.wrong(name, got, f"{count} texts, as {examples[0].where} has")
        places = places or [[] for _ in range(count)]
        for place in range(count):
            parts = {name: values[place] for name, values in given.items()}
            places[place].append(Text(parts, f"{example.where}, text {place}"))
    return [text for texts in places for text in texts]


@dataclass
class _Vocabulary:
    """What masking asks of a tokenizer of transformers; see ``MaskingTokenizer``."""

    mask_id: int
    is_special: np.ndarray
    ordinary_ids: np.ndarray

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def _vocabulary(tokenizer: Any) -> MaskingTokenizer:
    if isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer
    if getattr(tokenizer, "mask_token_id", None) is None or not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"tokenizer: got {type(tokenizer).__name__} without a mask token, allowed: a "
            "WordPieceTokenizer, or a tokenizer of transformers with a mask token"
        )
    ids = np.array(list(tokenizer.get_vocab().values()))
    is_special = np.zeros(ids.max() + 1, dtype=bool)
    is_special[tokenizer.all_special_ids] = True
    return _Vocabulary(
        tokenizer.mask_token_id, is_special, np.setdiff1d(ids, tokenizer.all_special_ids)
    )
