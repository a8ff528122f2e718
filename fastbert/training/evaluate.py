"""Losses and accuracies of both pre-training tasks, without (tokens, vocabulary) logits."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastbert.modules import BertForPreTraining

Batch = dict[str, Any]
IGNORED = -100
# Rows of logits held at once: 1024 x 30522 in fp32 is 125 MB.
ROWS_AT_ONCE = 1024


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on ``device``; what is no tensor stays as it is."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


class MaskedPredictions:
    """Watches a model's masked-LM head for one forward pass and counts its hits.

    In training the model returns no logits. What the head's transform saw at the labelled positions
    is kept here instead, and only those rows meet the vocabulary. Use as a context manager around
    the call.
    """

    def __init__(self, model: BertForPreTraining) -> None:
        self._head = model.cls.predictions
        self._transformed: Tensor | None = None
        self._handle: Any = None

    def __enter__(self) -> MaskedPredictions:
        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            self._transformed = output.detach()

        self._handle = self._head.transform.register_forward_hook(keep)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.remove()

    @torch.no_grad()
    def hits(self, labels: Tensor) -> Tensor:
        """How many labelled positions of ``labels`` (any shape) were right; int64, shape ()."""
        labels = labels.reshape(-1)
        labels = labels[labels != IGNORED]
        if self._transformed is None or labels.numel() == 0:
            return labels.new_zeros(())
        hidden = self._transformed.reshape(-1, self._transformed.shape[-1])
        decoder = self._head.decoder
        weight, bias = decoder.weight.to(hidden.dtype), decoder.bias.to(hidden.dtype)
        right = labels.new_zeros(())
        for rows, wanted in zip(
            hidden.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True
        ):
            right += (torch.addmm(bias, rows, weight.t()).argmax(dim=-1) == wanted).sum()
        return right


@torch.no_grad()
def evaluate(model: BertForPreTraining, batches: Iterable[Batch]) -> dict[str, float]:
    """Evaluates ``model`` on ``batches`` (as ``fastbert.data.PretrainingBatches`` yields them).

    Returns the means over all labelled positions and all pairs: ``mlm_loss`` and ``nsp_loss`` in
    nats, ``mlm_accuracy`` and ``nsp_accuracy``; and ``mlm_baseline_accuracy``, what always
    answering the most frequent label of these very batches would score, which no constant answer
    can beat. The model is put into evaluation mode and back. Raises ValueError when there is no
    batch.
    """
    device = next(model.parameters()).device
    masked = pairs = mlm_hits = nsp_hits = 0
    mlm_sum = nsp_sum = 0.0
    counts = torch.zeros(model.config.vocab_size, dtype=torch.int64)
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            labels = batch["labels"][batch["labels"] != IGNORED]
            counts += torch.bincount(labels.cpu(), minlength=counts.numel())
            moved = to_device(batch, device)
            with MaskedPredictions(model) as predictions:
                output = model(**moved, output_logits=False)
            wanted = moved["next_sentence_label"]
            masked += labels.numel()
            pairs += wanted.numel()
            mlm_sum += float(output.mlm_loss) * labels.numel()
            nsp_sum += float(output.nsp_loss) * wanted.numel()
            mlm_hits += int(predictions.hits(moved["labels"]))
            nsp_hits += int((output.seq_relationship_logits.argmax(dim=-1) == wanted).sum())
    finally:
        model.train(was_training)
    if pairs == 0:
        raise ValueError("batches: got none, allowed: at least one batch")
    return {
        "mlm_loss": mlm_sum / max(1, masked),
        "mlm_accuracy": mlm_hits / max(1, masked),
        "nsp_loss": nsp_sum / pairs,
        "nsp_accuracy": nsp_hits / pairs,
        "mlm_baseline_accuracy": int(counts.max()) / max(1, masked),
    }
