"""The tokens and labels that a CUDA graph of a training step reads from fixed addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.graphs.buckets import Bucket, PaddedBucket
from fastbert.graphs.static_batch import StaticBatch, StaticPadded
from fastbert.modules import (
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.heads import IGNORED
from fastbert.modules.inputs import EncoderInput, check_range
from fastbert.ops.arguments import require_shape


class Labels(NamedTuple):
    """The properties of one label argument of a model's forward, such as ``labels``.

    Attributes:
        per_token: Whether each token has a label; otherwise each sequence has a label.
        classes: Number of classes, or the name of the configuration field with this number.
    """

    per_token: bool
    classes: str | int

    def check(self, name: str, labels: Tensor, layout: BatchLayout, config: BertConfig) -> Tensor:
        """Check labels, and flatten the labels of sequences.

        Args:
            name: Name of the argument, for messages.
            labels: The labels from the caller.
            layout: Layout of the batch.
            config: Configuration of the model.

        Returns:
            Labels of sequences have the shape ``(B,)``. Labels of tokens keep their shape, which is
            ``(T,)`` for a packed batch and ``(B, L)`` for a padded batch.

        Raises:
            ValueError: If the shape or a label is not allowed.
            TypeError: If the labels are not integers.
        """
        size = self.classes
        check_range(
            name, labels, size if isinstance(size, int) else getattr(config, size), ignored=IGNORED
        )
        if not self.per_token:
            labels = labels.view(-1)
            require_shape(name, labels, (layout.batch,))
        elif not layout.packed:
            require_shape(name, labels, (layout.batch, layout.length))
        return labels


# The labels of each model whose loss leaves out the label IGNORED. Rows and sequences of a bucket
# that have no token have this label, so they do not change the loss.
LABELS: dict[type, dict[str, Labels]] = {
    BertForPreTraining: {
        "labels": Labels(per_token=True, classes="vocab_size"),
        "next_sentence_label": Labels(per_token=False, classes=2),
    },
    BertForMaskedLM: {"labels": Labels(per_token=True, classes="vocab_size")},
    BertForNextSentencePrediction: {"labels": Labels(per_token=False, classes=2)},
    BertForSequenceClassification: {"labels": Labels(per_token=False, classes="num_labels")},
    BertForTokenClassification: {"labels": Labels(per_token=True, classes="num_labels")},
}


class StepInput:
    """The memory that a recorded step reads: a batch in the shape of its bucket, with labels.

    Args:
        bucket: The shape of the batch.
        labels: The labels of the model, from `LABELS`.
        device: The device of the memory.
    """

    def __init__(
        self, bucket: Bucket | PaddedBucket, labels: dict[str, Labels], device: torch.device
    ) -> None:
        """Allocate the memory, which holds a batch without tokens and without labels."""
        self.batch: StaticBatch | StaticPadded
        if isinstance(bucket, Bucket):
            self.batch = StaticBatch(bucket, device)
            of_tokens: tuple[int, ...] = (bucket.tokens,)
        else:
            self.batch = StaticPadded(bucket, device)
            of_tokens = tuple(bucket)
        self.labels = {
            name: torch.full(
                of_tokens if kind.per_token else (bucket.batch,), IGNORED, device=device
            )
            for name, kind in labels.items()
        }

    def fill(self, tokens: EncoderInput, mask: Tensor | None, labels: dict[str, Tensor]) -> None:
        """Copy a batch into the memory.

        Args:
            tokens: The tokens: packed for a `Bucket`, or padded without a mask for a
                `PaddedBucket`.
            mask: Mask of a padded batch of shape ``(B, L)``; None for a `Bucket`.
            labels: Labels from `Labels.check`; labels of tokens are packed or padded like `tokens`.
        """
        if mask is None:
            assert isinstance(self.batch, StaticBatch)
            self.batch.fill(tokens)
        else:
            assert isinstance(self.batch, StaticPadded)
            self.batch.fill(tokens, mask)
        for name, given in labels.items():
            memory = self.labels[name]
            # The labels of an earlier batch must not count in the loss.
            memory.fill_(IGNORED)
            memory[tuple(map(slice, given.shape))].copy_(given, non_blocking=True)

    def arguments(self) -> dict[str, Any]:
        """Return the packed arguments of the model's forward; a CUDA graph records this method."""
        tokens, labels = self._rows()
        arguments: dict[str, Any] = {
            "input_ids": tokens.ids,
            "position_ids": tokens.positions,
            "cu_seqlens": tokens.layout.cu_seqlens,
            "max_seqlen": tokens.layout.max_seqlen,
            "token_type_ids": tokens.token_types,
        }
        return arguments | labels

    def _rows(self) -> tuple[EncoderInput, dict[str, Tensor]]:
        if isinstance(self.batch, StaticBatch):
            return self.batch.input, self.labels
        tokens, _ = self.batch.unpadded()
        indices = tokens.layout.indices
        assert indices is not None
        # The padding of a batch may have labels, which must not count in the loss.
        rows = {
            name: x.masked_fill(~self.batch.exists, IGNORED).flatten().index_select(0, indices)
            if x.dim() == 2
            else x
            for name, x in self.labels.items()
        }
        return tokens, rows
