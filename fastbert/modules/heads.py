"""The task heads that have parameters, and the loss functions of the heads."""

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
from fastbert.ops.varlen import gather_rows

# The loss ignores tokens with this label.
IGNORED = -100


class PredictionTransform(OperationModule):
    """The transform ``LN(activation(W h + b))``, ``(T, H) → (T, H)``.

    Args:
        config: The configuration, whose ``hidden_act`` names the activation.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "linear_gelu"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the projection and the layer norm."""
        super().__init__(backend)
        self.activation = of_config(gated=False)[config.hidden_act].name
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps, backend=backend)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform rows ``(T, H)``."""
        activated = ops.linear_gelu(
            hidden,
            self.dense.weight,
            self.dense.bias,
            approximate=ACTIVATIONS[self.activation].approximate,
            backend=self.backend,
        )
        return self.LayerNorm(activated)


class LMPredictionHead(OperationModule):
    """The masked-LM head, which computes the loss, the logits ``(T, V)`` or both.

    If ``config.tie_word_embeddings`` is True, the model of this head ties ``decoder.weight`` to the
    word embeddings and ``decoder.bias`` to ``bias``.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "linear_cross_entropy"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the transform and the decoder."""
        super().__init__(backend)
        self.transform = PredictionTransform(config, backend)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, hidden: Tensor, labels: Tensor | None, output_logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the loss and the logits.

        On the CPU, only the labelled rows are transformed if `output_logits` is False. On a GPU and
        under ``torch.compile``, all rows are transformed, and ``ops.linear_cross_entropy`` skips
        the rows without a label. To select the labelled rows first, the CPU would have to wait for
        the GPU.

        Args:
            hidden: Rows of shape ``(T, H)``.
            labels: Integers of shape ``(T,)``; -100 at rows without a label. None computes no loss.
            output_logits: Whether the logits are computed.

        Returns:
            The mean loss over the labelled rows, which is 0 if no row has a label, or None if
            `labels` is None; and the logits ``(T, V)``, or None if `output_logits` is False.

        Raises:
            ValueError: If a label is out of range.
            TypeError: If the labels are not integers.
        """
        weight, bias = self.decoder.weight, self.decoder.bias
        if labels is None:
            return None, self.decoder(self.transform(hidden)) if output_logits else None
        check_range("labels", labels, weight.shape[0], ignored=IGNORED)
        # The number of labelled rows depends on the values of the labels, which the CPU can read at
        # once only if the labels are on the CPU and are not traced.
        here = labels.device.type == "cpu" and not torch.compiler.is_compiling()
        if here and not output_logits:
            labelled = (labels != IGNORED).nonzero().flatten()
            hidden, labels = gather_rows(hidden, labelled), labels.index_select(0, labelled)
        hidden = self.transform(hidden)
        loss = ops.linear_cross_entropy(
            hidden, weight, bias, labels, ignore_index=IGNORED, backend=self.backend
        )
        return loss, self.decoder(hidden) if output_logits else None


class OnlyMLMHead(nn.Module):
    """A module whose submodule ``predictions`` is the masked-LM head, as in transformers."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the head."""
        super().__init__()
        self.predictions = LMPredictionHead(config, backend)


class OnlyNSPHead(nn.Module):
    """The next-sentence head, ``(B, H) → (B, 2)``."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the head."""
        super().__init__()
        self.seq_relationship = Linear(config.hidden_size, 2, backend)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute the logits ``(B, 2)`` of pooled vectors ``(B, H)``."""
        return self.seq_relationship(pooled)


class PreTrainingHeads(OnlyMLMHead):
    """The masked-LM head ``predictions`` and the next-sentence head ``seq_relationship``."""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create both heads."""
        super().__init__(config, backend)
        self.seq_relationship = Linear(config.hidden_size, 2, backend)


def classifier_dropout(config: BertConfig) -> nn.Dropout:
    """Return the dropout before a classifier; the default p is ``config.hidden_dropout_prob``."""
    own = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if own is None else own)


def cross_entropy(name: str, logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Compute the mean cross entropy over the labels that differ from `ignored`.

    Args:
        name: Name of the caller's argument with the labels, for messages.
        logits: Logits of shape ``(N, C)``, which are converted to fp32 unless they are fp64.
        labels: Integers of shape ``(N,)``.
        ignored: Label that the loss ignores.

    Returns:
        The loss, a scalar, which is 0 if every label is `ignored`.

    Raises:
        ValueError: If a label is out of range, or if the number of labels is not N.
        TypeError: If the labels are not integers.
    """
    check_range(name, labels, logits.shape[1], ignored=ignored)
    if labels.shape[0] != logits.shape[0]:
        raise ValueError(f"{name}: got {labels.shape[0]} labels, allowed: {logits.shape[0]}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.long()
    total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)
