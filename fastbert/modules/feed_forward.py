"""The position-wise feed-forward of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.activations import ACTIVATIONS, of_config
from fastbert.config import BertConfig
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.modules.quantized_linear import QuantizedLinear


class BertIntermediate(nn.Module):
    """The parameters of the first projection, which `BertOutput` uses.

    The weight has the shape ``(F, H)`` and the bias ``(F,)``. Both have 2F rows if the feed-forward
    is gated.

    Args:
        config: The configuration.
    """

    def __init__(self, config: BertConfig) -> None:
        """Create the projection."""
        super().__init__()
        choices = config.architecture
        size = config.intermediate_size * (2 if choices.gated else 1)
        self.dense = nn.Linear(config.hidden_size, size, bias=choices.feed_forward_bias)


class BertOutput(OperationModule):
    """The feed-forward ``LN(hidden + dropout(feed_forward(hidden)))``.

    The layer norm adds the second bias. Both linear layers are called instead if one of them was
    replaced or has hooks, or if there is dropout between them.

    Args:
        config: The configuration.
        backend: Backend of every operation; None lets each operation choose.
    """

    operation = "feed_forward"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the second projection and the layer norm."""
        super().__init__(backend)
        choices, size = config.architecture, config.hidden_size
        self.activation = of_config(choices.gated)[config.hidden_act].name
        self.dense = nn.Linear(config.intermediate_size, size, bias=choices.feed_forward_bias)
        self.dropout_p = choices.inner_dropout
        dropout_p = choices.output_dropout
        dropout_p = config.hidden_dropout_prob if dropout_p is None else dropout_p
        self.LayerNorm = LayerNorm(
            size, config.layer_norm_eps, dropout_p, backend, choices.norm_bias
        )

    def forward(
        self,
        hidden: Tensor,
        intermediate: BertIntermediate,
        dropout_seed: Tensor | None = None,
    ) -> Tensor:
        """Compute the feed-forward.

        Args:
            hidden: Rows of shape ``(T, H)``.
            intermediate: The first projection.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        if self.called(intermediate):
            return self.LayerNorm(
                self.call(hidden, intermediate), residual=hidden, dropout_seed=dropout_seed
            )
        projected, residual = ops.feed_forward(
            hidden,
            intermediate.dense.weight,
            intermediate.dense.bias,
            self.dense.weight,
            None,
            activation=self.activation,
            return_residual=True,
            backend=self.backend,
        )
        return self.LayerNorm(
            projected, residual=residual, x_bias=self.dense.bias, dropout_seed=dropout_seed
        )

    def called(self, intermediate: BertIntermediate) -> bool:
        """Return whether `forward` calls the linear layers instead of using their parameters."""
        deviations = (deviation(part, nn.Linear) for part in (intermediate.dense, self.dense))
        return any(deviations) or (self.training and self.dropout_p > 0.0)

    def call(self, hidden: Tensor, intermediate: BertIntermediate) -> Tensor:
        """Call both linear layers, with the activation and the inner dropout between them."""
        first = intermediate.dense
        if isinstance(first, QuantizedLinear) and not ACTIVATIONS[self.activation].gated:
            inner = first(hidden, activation=self.activation)
        else:
            inner = ACTIVATIONS[self.activation](first(hidden))
        return self.dense(F.dropout(inner, self.dropout_p, self.training))
