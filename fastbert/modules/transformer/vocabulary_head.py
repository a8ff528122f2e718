"""The projection to the vocabulary, and the cross entropy with label smoothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import ops
from fastbert.modules.heads import IGNORED
from fastbert.modules.inputs import check_range
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.transformer_config import TransformerConfig


class VocabularyHead(OperationModule):
    """The logits ``h Wᵀ + b`` of the target vocabulary, and their loss.

    The weight of ``decoder`` is usually tied to the word embeddings. ``bias`` has no gradient, as
    ``final_logits_bias`` of Marian.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "linear_cross_entropy"
    bias: Tensor

    def __init__(self, config: TransformerConfig, backend: str | None = None) -> None:
        """Create the projection and the bias."""
        super().__init__(backend)
        size = config.decoder_vocab_size or 0
        self.decoder = Linear(config.d_model, size, backend, bias=False)
        self.register_buffer("bias", torch.zeros(size))
        self.label_smoothing = config.label_smoothing

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the logits ``(T, V)`` of rows ``(T, H)``."""
        if deviation(self.decoder, Linear) is not None:
            return self.decoder(rows) + self.bias
        weight = self.decoder.weight
        return ops.linear(rows, weight, self.bias, backend=self.decoder.backend)

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross entropy over the rows with a label, without storing all logits.

        With the label y, V classes, the logits z and the smoothing s (Szegedy et al. 2016), the
        loss of a row is ``(1 - s) (lse(z) - z[y]) + s (lse(z) - mean(z))``. This is the cross
        entropy ``lse(z) - z[y]`` plus ``s (z[y] - mean(z))``. The mean of the logits is the product
        of the row with the mean of the weights.

        Args:
            rows: Rows of shape ``(T, H)``.
            labels: Integers of shape ``(T,)``; -100 at rows without a label.

        Returns:
            The loss, a scalar in fp32 (fp64 for fp64 rows), which is 0 if no row has a label.

        Raises:
            ValueError: If a label is out of range.
            TypeError: If the labels are not integers.
        """
        weight, bias = self.decoder.weight, self.bias
        check_range("labels", labels, weight.shape[0], ignored=IGNORED)
        if deviation(self.decoder, Linear) is not None:
            return self._loss_of_logits(rows, labels)
        loss = ops.linear_cross_entropy(
            rows, weight, bias, labels, ignore_index=IGNORED, backend=self.backend
        )
        if self.label_smoothing == 0.0:
            return loss
        exists = labels != IGNORED
        classes = labels.clamp(min=0)
        bias = bias.to(loss.dtype)
        # The logit of the label minus the mean of the logits, for each row.
        weights = F.embedding(classes, weight).to(loss.dtype) - weight.mean(0, dtype=loss.dtype)
        differences = (rows.to(loss.dtype) * weights).sum(1) + (bias[classes] - bias.mean())
        mean = differences.masked_fill(~exists, 0.0).sum() / exists.sum().clamp(min=1)
        return loss + self.label_smoothing * mean

    def _loss_of_logits(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss from all logits, because ``decoder`` must be called as a module."""
        logits = self(rows)
        total = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            labels.long(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return total / (labels != IGNORED).sum().clamp(min=1)
