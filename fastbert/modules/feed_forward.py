"""The position-wise feed-forward of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modules.backend import OperationModule
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.modules.untouched import touched

# hidden_act of a config.json → ``activation`` of ``ops.feed_forward`` → ``approximate`` of
# ``ops.linear_gelu``.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class BertIntermediate(nn.Module):
    """The parameters of the first projection, (F, H) and (F,), which ``BertOutput`` uses."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)


class BertOutput(OperationModule):
    """LN(hidden + dropout(feed_forward(hidden))); the layer norm adds the second bias. Where one of
    the linear layers was replaced or has hooks, both are called instead."""

    operation = "feed_forward"

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__(backend)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = LayerNorm(
            config.hidden_size, config.layer_norm_eps, config.hidden_dropout_prob, backend
        )

    def forward(
        self,
        hidden: Tensor,
        intermediate: BertIntermediate,
        dropout_seed: Tensor | None = None,
    ) -> Tensor:
        """(T, H) → (T, H)."""
        first, second = intermediate.dense, self.dense
        if touched(first, nn.Linear) is not None or touched(second, nn.Linear) is not None:
            if isinstance(first, QuantizedLinear):
                inner = first(hidden, activation=self.activation)
            else:
                inner = NONLINEARITIES[self.activation](first(hidden))
            return self.LayerNorm(second(inner), residual=hidden, dropout_seed=dropout_seed)
        projected, residual = ops.feed_forward(
            hidden,
            first.weight,
            first.bias,
            second.weight,
            None,
            activation=self.activation,
            return_residual=True,
            backend=self.backend,
        )
        return self.LayerNorm(
            projected, residual=residual, x_bias=second.bias, dropout_seed=dropout_seed
        )
