"""Losses and accuracies of both pre-training tasks, without logits for all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastbert.modules import BertForMaskedLM, BertForPreTraining

Batch = dict[str, Any]
IGNORED = -100
# At most this many rows of logits are in memory; 1024 × 30522 in fp32 take 125 MB.
ROWS_AT_ONCE = 1024


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`; other values are unchanged."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


class MaskedPredictions:
    """Counts the correct predictions of a masked-LM head in one forward pass.

    The model returns no logits in training. This context manager stores the output of the head's
    transform, which has one row per labelled position, or one row per position. `hits` computes the
    logits of the labelled rows.
    """

    def __init__(self, model: BertForPreTraining | BertForMaskedLM) -> None:
        """Observe the masked-LM head of `model`."""
        self._head = model.cls.predictions
        self._transformed: Tensor | None = None
        self._handle: Any = None

    def __enter__(self) -> MaskedPredictions:
        """Begin to observe the head."""

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
        """End the observation."""
        self._handle.remove()

    @torch.no_grad()
    def hits(self, labels: Tensor) -> Tensor:
        """Count the labelled positions whose prediction is correct.

        Args:
            labels: Labels of the forward pass, int64 of any shape; -100 marks positions without a
                label.

        Returns:
            The number of correct predictions, int64 of shape ``()``.
        """
        labels = labels.reshape(-1)
        if self._transformed is None:
            return labels.new_zeros(())
        hidden = self._transformed.reshape(-1, self._transformed.shape[-1])
        labelled = labels != IGNORED
        if hidden.shape[0] == labels.shape[0]:
            hidden = hidden[labelled]
        labels = labels[labelled]
        if labels.numel() == 0:
            return labels.new_zeros(())
        decoder = self._head.decoder
        weight, bias = decoder.weight.to(hidden.dtype), decoder.bias.to(hidden.dtype)
        right = labels.new_zeros(())
        for rows, wanted in zip(
            hidden.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True
        ):
            right += (torch.addmm(bias, rows, weight.t()).argmax(dim=-1) == wanted).sum()
        return right


@torch.no_grad()
def evaluate(
    model: BertForPreTraining | BertForMaskedLM, batches: Iterable[Batch]
) -> dict[str, float]:
    """Evaluate the pre-training tasks of a model.

    The model is in evaluation mode during the evaluation and returns to its earlier mode.

    Args:
        model: The model.
        batches: Batches as `fastbert.data.PretrainingBatches` builds them.

    Returns:
        ``mlm_loss`` in nats and ``mlm_accuracy``, as means over all labelled positions;
        if the batches have a ``next_sentence_label``, ``nsp_loss`` in nats and ``nsp_accuracy``, as
        means over all pairs; and ``mlm_baseline_accuracy``. The baseline always predicts the
        most frequent label in `batches`, so no other constant prediction is more accurate.

    Raises:
        ValueError: If there is no batch.

    Examples:
        >>> import torch
        >>> from fastbert import BertConfig, BertForPreTraining
        >>> from fastbert.data import NextSentencePairs, PretrainingBatches
        >>> from fastbert.data import stories, train_tokenizer
        >>> from fastbert.training import evaluate
        >>> documents = list(stories(20, seed=0))
        >>> tokenizer = train_tokenizer(documents, 200)
        >>> pairs = NextSentencePairs(documents, tokenizer, max_length=64, seed=0)
        >>> batches = PretrainingBatches(pairs, tokenizer, tokens_per_batch=512, seed=0)
        >>> model = BertForPreTraining(BertConfig.preset("tiny", vocab_size=tokenizer.vocab_size))
        >>> figures = evaluate(model, batches.epoch(0))
        >>> sorted(figures)
        ['mlm_accuracy', 'mlm_baseline_accuracy', 'mlm_loss', 'nsp_accuracy', 'nsp_loss']
    """
    device = next(model.parameters()).device
    masked = pairs = count = mlm_hits = nsp_hits = 0
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
            count += 1
            masked += labels.numel()
            mlm_hits += int(predictions.hits(moved["labels"]))
            if "next_sentence_label" not in moved:
                mlm_sum += float(output.loss) * labels.numel()
                continue
            wanted = moved["next_sentence_label"]
            pairs += wanted.numel()
            mlm_sum += float(output.mlm_loss) * labels.numel()
            nsp_sum += float(output.nsp_loss) * wanted.numel()
            nsp_hits += int((output.seq_relationship_logits.argmax(dim=-1) == wanted).sum())
    finally:
        model.train(was_training)
    if not count:
        raise ValueError("batches: got none, allowed: at least one batch")
    return {
        "mlm_loss": mlm_sum / max(1, masked),
        "mlm_accuracy": mlm_hits / max(1, masked),
        **({"nsp_loss": nsp_sum / pairs, "nsp_accuracy": nsp_hits / pairs} if pairs else {}),
        "mlm_baseline_accuracy": int(counts.max()) / max(1, masked),
    }
