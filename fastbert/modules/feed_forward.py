"""The position-wise feed-forward of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert import ops
from fastbert.activations import ACTIVATIONS, of_config
from fastbert.config import BertConfig
from fastbert.modules.dropout import NO_SEEDS, LayerSeeds, Probabilities
from fastbert.modules.layer_norm import norm_of
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import deviation
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.dropout import dropout


class BertIntermediate(nn.Module):
    """The parameters of the feed-forward's first projection, which `BertOutput` computes.

    The weight has the shape ``(F, H)`` and the bias ``(F,)``, with F the intermediate size. If the
    feed-forward is gated, the first dimension of both is 2F.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        """Create the projection."""
        super().__init__()
        choices = config.architecture
        size = config.intermediate_size * (2 if choices.gated else 1)
        bias = choices.feed_forward_bias and (choices.gate_bias or not choices.gated)
        self.dense = nn.Linear(config.hidden_size, size, bias=bias)


class BertOutput(OperationModule):
    """The feed-forward ``LN(hidden + dropout(feed_forward(hidden)))``.

    The layer norm adds the bias of the second projection. If one of the two linear layers was
    replaced or has hooks, or if there is dropout between them, both linear layers are called as
    modules, and the second linear layer adds its own bias.

    Args:
        config: Configuration of the model.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.
    """

    operation = "feed_forward"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        """Create the second projection and the layer norm."""
        super().__init__(backend)
        choices, size = config.architecture, config.hidden_size
        self.activation = of_config(choices.gated)[config.hidden_act].name
        self.dense = nn.Linear(config.intermediate_size, size, bias=choices.feed_forward_bias)
        probabilities = Probabilities.of(config)
        self.dropout_p = probabilities.inner
        self.LayerNorm = norm_of(config, probabilities.output, backend)

    def forward(
        self,
        hidden: Tensor,
        intermediate: BertIntermediate,
        seeds: LayerSeeds = NO_SEEDS,
    ) -> Tensor:
        """Compute the feed-forward.

        Args:
            hidden: Rows of shape ``(T, H)``.
            intermediate: Module with the parameters of the first projection.
            seeds: Dropout seeds of the layer.

        Returns:
            Rows of shape ``(T, H)``.
        """
        if self.called(intermediate):
            called = self.call(hidden, intermediate, seeds.inner)
            return self.LayerNorm(called, residual=hidden, dropout_seed=seeds.output)
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
            projected, residual=residual, x_bias=self.dense.bias, dropout_seed=seeds.output
        )

    def without_norm(
        self,
        hidden: Tensor,
        intermediate: BertIntermediate,
        dropout_seed: Tensor | None = None,
    ) -> Tensor:
        """Compute ``feed_forward(hidden)`` alone, for layers with norms before their blocks.

        Args:
            hidden: Rows of shape ``(T, H)``.
            intermediate: Module with the parameters of the first projection.
            dropout_seed: Seed of the inner dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Rows of shape ``(T, H)``.
        """
        if self.called(intermediate):
            return self.call(hidden, intermediate, dropout_seed)
        return ops.feed_forward(
            hidden,
            intermediate.dense.weight,
            intermediate.dense.bias,
            self.dense.weight,
            self.dense.bias,
            activation=self.activation,
            backend=self.backend,
        )

    def called(self, intermediate: BertIntermediate) -> bool:
        """Return whether `forward` calls the linear layers instead of using their parameters."""
        deviations = (deviation(part, nn.Linear) for part in (intermediate.dense, self.dense))
        return any(deviations) or (self.training and self.dropout_p > 0.0)

    def call(
        self, hidden: Tensor, intermediate: BertIntermediate, dropout_seed: Tensor | None = None
    ) -> Tensor:
        """Call both linear layers, with the activation and the inner dropout between them."""
        first = intermediate.dense
        if isinstance(first, QuantizedLinear) and not ACTIVATIONS[self.activation].gated:
            inner = first(hidden, activation=self.activation)
        else:
            inner = ACTIVATIONS[self.activation](first(hidden))
        dropout_p = self.dropout_p if self.training else 0.0
        return self.dense(
            dropout(inner, dropout_p, dropout_seed=dropout_seed, backend=self.backend)
        )
