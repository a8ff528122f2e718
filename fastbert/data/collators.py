"""Collate functions that concatenate the sequences of a batch instead of padding them.

A collator is the ``collate_fn`` of a ``torch.utils.data.DataLoader`` or the ``data_collator`` of
transformers' ``Trainer``. A feature is one example: a mapping from column names to lists, numpy
arrays or tensors. A feature of n tokens has the column ``input_ids`` of shape ``(n,)``, and may
have ``token_type_ids`` and ``attention_mask`` of the same shape. Tokens whose ``attention_mask`` is
0 are dropped, so padded and unpadded features give the same batch. A collator ignores columns that
its documentation does not name.

All ids in a batch are int64, and a batch has ``token_type_ids`` only if the features have that
column. The argument `layout` decides the names and shapes of a batch, which has B sequences with T
tokens in total.

- ``"fastbert"`` is for ``fastbert.BertFor*``. The ids have the shape ``(T,)``. The batch has
  ``cu_seqlens``, int32 of shape ``(B + 1,)``, and ``max_seqlen``, an int.
- ``"transformers"`` is for a model of transformers with ``attn_implementation="fastbert"`` or after
  ``fastbert.accelerate(model)``. The ids and ``position_ids`` have the shape ``(1, T)``. The batch
  has ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 of shape ``(B + 1,)``, and ``max_length_q`` and
  ``max_length_k``, ints.

Labels of tokens have the shape of the ids, and labels of sequences have the shape ``(B,)`` in both
layouts. With ``attn_implementation="fastbert"`` alone, the pooler of transformers treats ``(1, T)``
as one sequence. A head on top of the pooler then needs ``fastbert.accelerate`` or
``fastbert.modules.pool``.

Errors are of type ValueError. The message for a wrong value names the column, the number of the
example in the batch (from 0), the value and the allowed values. Collators can be pickled.
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
        """Check the options."""
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
        """Build a batch with `ids`, and with `labels` of the tokens unless `labels` is None.

        The lengths and the token types of the batch are those of `sequences`.
        """
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
    """Pack sequences that have one label each.

    The labels are in the column ``labels``, ``label`` or ``label_ids``. The batch has no ``labels``
    if no feature has such a column, as for prediction.

    Args:
        layout: Names and shapes of the batch: ``"fastbert"`` for ``fastbert.BertFor*``, or
            ``"transformers"`` for a model of transformers.
        max_length: Largest number of tokens of a feature; None allows any number.
        position_ids_start: First position of each sequence with ``layout="transformers"``. It is 0
            for BERT, DistilBERT, ALBERT, ELECTRA and ModernBERT. For RoBERTa, XLM-R and CamemBERT
            it is ``pad_token_id + 1``; this number is 2 for their published checkpoints.

    Raises:
        ValueError: If an argument is not allowed.

    Examples:
        >>> from fastbert.data import PackedCollatorForSequenceClassification
        >>> collate = PackedCollatorForSequenceClassification()
        >>> features = [
        ...     {"input_ids": [101, 7592, 102], "label": 1},
        ...     {"input_ids": [101, 102], "label": 0},
        ... ]
        >>> batch = collate(features)
        >>> batch["input_ids"].tolist()
        [101, 7592, 102, 101, 102]
        >>> batch["cu_seqlens"].tolist(), batch["max_seqlen"], batch["labels"].tolist()
        ([0, 3, 5], 3, [1, 0])
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        """Build a batch.

        Args:
            features: Mappings with ``input_ids`` and optionally ``token_type_ids``,
                ``attention_mask`` and labels.

        Returns:
            The packed batch. Its ``labels`` are int64 ``(B,)`` for integers, float32 ``(B,)`` for
            floats, and float32 ``(B, C)`` for vectors of C floats.

        Raises:
            ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
        """
        texts = as_texts(features)
        sequences = flatten(texts, self.max_length)
        batch = self._batch(sequences, sequences.ids, None)
        name = label_column(texts)
        return batch if name is None else batch | {"labels": sequence_labels(texts, name)}


@dataclass(kw_only=True)
class PackedCollatorForTokenClassification(_PackedCollator):
    """Pack sequences that have one label for each token.

    For n tokens, the labels are in the column ``labels``, ``label`` or ``label_ids`` of shape
    ``(n,)``. The label -100 marks a token that the loss ignores. The batch has no ``labels`` if no
    feature has such a column, as for prediction.

    Args:
        layout: As in `PackedCollatorForSequenceClassification`.
        max_length: As in `PackedCollatorForSequenceClassification`.
        position_ids_start: As in `PackedCollatorForSequenceClassification`.

    Raises:
        ValueError: If an argument is not allowed.
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        """Build a batch.

        Args:
            features: Mappings with ``input_ids`` and optionally ``token_type_ids``,
                ``attention_mask`` and labels, all of shape ``(n,)`` for n tokens.

        Returns:
            The packed batch. Its ``labels`` are int64 of shape ``(T,)``, or ``(1, T)`` with
            ``layout="transformers"``.

        Raises:
            ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
        """
        texts = as_texts(features)
        sequences = flatten(texts, self.max_length, label_column(texts))
        return self._batch(sequences, sequences.ids, sequences.labels)


@dataclass(kw_only=True)
class PackedCollatorForMaskedLM(_PackedCollator):
    """Pack sequences and draw a new mask for them in every call.

    Of the predicted tokens, 80 % become the mask token, 10 % become a random token and 10 % stay
    unchanged (Devlin et al. 2019). Special tokens are never predicted.

    The masks depend on `generator` and, in a worker of a DataLoader, also on the seed of the
    worker. The masks are therefore reproducible from the seed of a run, and differ between workers
    and between epochs.

    Args:
        tokenizer: A ``WordPieceTokenizer``, or a tokenizer of transformers that has a mask token.
        probability: Share of the tokens that are predicted, in (0, 1].
        whole_word: Whether all pieces of a word are predicted together; True needs a
            ``WordPieceTokenizer``.
        generator: Source of randomness; None uses the default generator of torch.
        layout: As in `PackedCollatorForSequenceClassification`.
        max_length: As in `PackedCollatorForSequenceClassification`.
        position_ids_start: As in `PackedCollatorForSequenceClassification`.

    Raises:
        ValueError: If an argument is not allowed.

    Examples:
        >>> from fastbert.data import PackedCollatorForMaskedLM, stories, train_tokenizer
        >>> documents = list(stories(20, seed=0))
        >>> tokenizer = train_tokenizer(documents, 200)
        >>> collate = PackedCollatorForMaskedLM(tokenizer)
        >>> batch = collate([{"input_ids": tokenizer.encode(" ".join(documents[0]))}])
        >>> predicted = batch["labels"] != -100
        >>> bool(predicted.any()), batch["labels"].shape == batch["input_ids"].shape
        (True, True)
    """

    tokenizer: Any = field(kw_only=False)
    probability: float = 0.15
    whole_word: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Check the options."""
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
        """Build a batch and mask it.

        Args:
            features: Mappings with ``input_ids`` and optionally ``token_type_ids`` and
                ``attention_mask``. Labels in the features are ignored.

        Returns:
            The packed batch. In ``labels``, a predicted token has its original id, and all other
            tokens have -100. The labels are int64 of shape ``(T,)``, or ``(1, T)`` with
            ``layout="transformers"``.

        Raises:
            ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
        """
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
        # Every worker starts every epoch with the same copy of the generator, so the seed of the
        # worker makes the masks of workers and epochs differ.
        worker = torch.utils.data.get_worker_info()
        return (drawn,) if worker is None else (drawn, worker.seed)


@dataclass(kw_only=True)
class PackedCollatorForPreTraining(PackedCollatorForMaskedLM):
    """Pack next-sentence pairs and draw a new mask for them in every call.

    A feature has the column ``next_sentence_label`` in addition to the columns of
    `PackedCollatorForMaskedLM`. The label is 0 if the second text of a pair follows the first text
    in the corpus, 1 if it does not, and -100 if this is unknown.

    Args:
        tokenizer: As in `PackedCollatorForMaskedLM`.
        probability: As in `PackedCollatorForMaskedLM`.
        whole_word: As in `PackedCollatorForMaskedLM`.
        generator: As in `PackedCollatorForMaskedLM`.
        layout: As in `PackedCollatorForSequenceClassification`.
        max_length: As in `PackedCollatorForSequenceClassification`.
        position_ids_start: As in `PackedCollatorForSequenceClassification`.

    Raises:
        ValueError: If an argument is not allowed.
    """

    def __call__(self, features: Sequence[Feature]) -> Batch:
        """Build a batch and mask it.

        Args:
            features: Mappings as for `PackedCollatorForMaskedLM`, with ``next_sentence_label``.

        Returns:
            The batch of `PackedCollatorForMaskedLM` and ``next_sentence_label``, int64 of shape
            ``(B,)`` in both layouts.

        Raises:
            ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
        """
        texts = as_texts(features)
        labels = sequence_labels(texts, "next_sentence_label")
        for text, label in zip(texts, labels.tolist(), strict=True):
            if label not in (0, 1, IGNORED):
                raise text.wrong("next_sentence_label", str(label), f"0, 1 or {IGNORED}")
        return self._masked(texts) | {"next_sentence_label": labels.long()}


@dataclass(kw_only=True)
class PackedCollatorForBiEncoder(_PackedCollator):
    """Pack several texts of each feature into one batch.

    The batch holds the first text of every feature, then the second text of every feature, and so
    on. For B features of N texts each, the model encodes all ``N * B`` texts in one pass, and the
    method ``chunk`` of a tensor separates the embeddings of first texts, second texts and so on:

    ```python
    labels = batch.pop("labels", None)
    embeddings = pool(model(**batch).last_hidden_state, batch["cu_seqlens"])
    anchors, positives = embeddings.chunk(2)  # (B, H) each
    ```

    A ``Trainer`` needs ``remove_unused_columns=False`` if the columns are not arguments of the
    model.

    Args:
        prefixes: Prefixes of the columns, one per text: ``("anchor", "positive")`` reads
            ``anchor_input_ids``, ``positive_input_ids`` and so on. With None, ``input_ids`` and the
            other columns are lists of N lists, with the same N in every feature.
        layout: As in `PackedCollatorForSequenceClassification`.
        max_length: As in `PackedCollatorForSequenceClassification`.
        position_ids_start: As in `PackedCollatorForSequenceClassification`.

    Raises:
        ValueError: If an argument is not allowed.

    Examples:
        >>> from fastbert.data import PackedCollatorForBiEncoder
        >>> collate = PackedCollatorForBiEncoder(prefixes=("anchor", "positive"))
        >>> feature = {"anchor_input_ids": [101, 7592, 102], "positive_input_ids": [101, 102]}
        >>> collate([feature, feature])["cu_seqlens"].tolist()
        [0, 3, 6, 8, 10]
    """

    prefixes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.prefixes is not None and (isinstance(self.prefixes, str) or not self.prefixes):
            raise ValueError(
                f"prefixes: got {self.prefixes!r}, allowed: a sequence of prefixes, or None"
            )

    def __call__(self, features: Sequence[Feature]) -> Batch:
        """Build a batch.

        Args:
            features: Mappings, each with the columns of its N texts and optionally with labels in
                the column ``labels``, ``label``, ``label_ids``, ``score`` or ``scores``.

        Returns:
            The packed batch of ``N * B`` sequences. Its ``labels`` are int64 ``(B,)`` for integers,
            float32 ``(B,)`` for floats, and float32 ``(B, C)`` for vectors of C floats.

        Raises:
            ValueError: If a column is missing or has a shape, dtype or value that is not allowed.
        """
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
    """Return a `Text` for each text of each example.

    A column of an example has one list per text. The result has the first text of each example,
    then the second text of each example, and so on.
    """
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
    """A `MaskingTokenizer` for a tokenizer of transformers; it cannot find the starts of words."""

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
