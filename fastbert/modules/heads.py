"""The parts on top of the encoder that have parameters of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.activations import ACTIVATIONS, of_config
from fastbert.config import BertConfig
from fastbert.modules.inputs import check_range
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.operation import OperationModule

IGNORED = -100


class PredictionTransform(OperationModule):
    """LN(gelu(W h + b)), (T, H) → (T, H)."""

    operation = "linear_gelu"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__(backend)
        self.activation = of_config(gated=False)[config.hidden_act].name
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps, backend=backend)

    def forward(self, hidden: Tensor) -> Tensor:
        activated = ops.linear_gelu(
            hidden,
            self.dense.weight,
            self.dense.bias,
            approximate=ACTIVATIONS[self.activation].approximate,
            backend=self.backend,
        )
        return self.LayerNorm(activated)


class LMPredictionHead(OperationModule):
    """Rows (T, H) → the masked-LM loss, and the logits (T, V) only when they are wanted.

    ``decoder.bias`` is ``bias`` (tied), and ``decoder.weight`` the word table of the model around
    it.
    """

    operation = "linear_cross_entropy"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__(backend)
        self.transform = PredictionTransform(config, backend)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, hidden: Tensor, labels: Tensor | None, output_logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """hidden (T, H), labels (T,) with -100 where there is nothing to predict → (loss, logits).

        The loss is the mean over the labelled rows, 0 when there is none. Without logits only the
        labelled rows are transformed.
        """
        weight, bias = self.decoder.weight, self.decoder.bias
        if labels is None:
            return None, self.decoder(self.transform(hidden)) if output_logits else None
        check_range("labels", labels, weight.shape[0], ignored=IGNORED)
        # How many rows are labelled is data: torch.compile leaves the gathering to the operation.
        if not output_logits and not torch.compiler.is_compiling():
            labelled = (labels != IGNORED).nonzero().flatten()
            hidden, labels = hidden.index_select(0, labelled), labels.index_select(0, labelled)
        hidden = self.transform(hidden)
        loss = ops.linear_cross_entropy(
            hidden, weight, bias, labels, ignore_index=IGNORED, backend=self.backend
        )
        return loss, self.decoder(hidden) if output_logits else None


class OnlyMLMHead(nn.Module):
    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.predictions = LMPredictionHead(config, backend)


class OnlyNSPHead(nn.Module):
    """(B, H) → (B, 2)."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.seq_relationship = Linear(config.hidden_size, 2, backend)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.seq_relationship(pooled)


class PreTrainingHeads(OnlyMLMHead):
    """Both heads of pre-training."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__(config, backend)
        self.seq_relationship = Linear(config.hidden_size, 2, backend)


def classifier_dropout(config: BertConfig) -> nn.Dropout:
    own = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if own is None else own)


def cross_entropy(name: str, logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Mean cross entropy of logits (N, C) over the labels (N,) that are not ``ignored``; 0 without
    any."""
    check_range(name, labels, logits.shape[1], ignored=ignored)
    if labels.shape[0] != logits.shape[0]:
        raise ValueError(f"{name}: got {labels.shape[0]} labels, allowed: {logits.shape[0]}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.long()
    total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)
