"""Layer norm of a residual sum, with the parameters of ``torch.nn.LayerNorm``, and RMS norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.config import BertConfig
from fastbert.io.names import modernise
from fastbert.modules.operation import OperationModule


class LayerNorm(OperationModule):
    """The layer norm ``LN(residual + dropout(x + x_bias))`` of ``fastbert.ops.layer_norm``.

    Checkpoints may name the parameters ``gamma`` and ``beta``, as the first BERT models did.

    Args:
        size: Size N of the last dimension.
        eps: Term that is added to the variance.
        dropout_p: Probability with which an element of ``x + x_bias`` is dropped in training.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
        bias: Whether the layer norm has a bias.
    """

    operation = "layer_norm"

    def __init__(
        self,
        size: int,
        eps: float,
        dropout_p: float = 0.0,
        backend: str | None = None,
        bias: bool = True,
    ) -> None:
        """Create the parameters."""
        super().__init__(backend)
        self.eps = eps
        self.dropout_p = dropout_p
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.register_load_state_dict_pre_hook(_modernise)

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        x_bias: Tensor | None = None,
        dropout_seed: Tensor | None = None,
    ) -> Tensor:
        """Compute ``LN(residual + dropout(x + x_bias))``.

        Args:
            x: Input of shape ``(..., N)``.
            residual: Tensor of the shape of `x` that is added before the norm, or None.
            x_bias: Bias of shape ``(N,)`` that is added to `x`, or None.
            dropout_seed: Seed of the dropout, int64 of shape ``(1,)``; None draws a seed.

        Returns:
            Tensor of shape ``(..., N)``.
        """
        return ops.layer_norm(
            x,
            self.weight,
            self.bias,
            residual=residual,
            x_bias=x_bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            eps=self.eps,
            backend=self.backend,
            dropout_seed=dropout_seed,
        )

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"{self.weight.shape[0]}, eps={self.eps}, dropout_p={self.dropout_p}"


class RMSNorm(LayerNorm):
    """The RMS norm of ``fastbert.ops.rms_norm``, which has no bias.

    Args:
        size: Size N of the last dimension.
        eps: Term that is added to the mean of the squares.
        dropout_p: Dropout probability of a layer, which moves it out of the norm; 0 in a call.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
    """

    operation = "rms_norm"

    def __init__(
        self, size: int, eps: float, dropout_p: float = 0.0, backend: str | None = None
    ) -> None:
        """Create the weight."""
        super().__init__(size, eps, dropout_p, backend, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the RMS norm of `x`, of shape ``(..., N)``."""
        return ops.rms_norm(x, self.weight, eps=self.eps, backend=self.backend)


def norm_of(config: BertConfig, dropout_p: float = 0.0, backend: str | None = None) -> LayerNorm:
    """Return a norm of the hidden states, as the architecture of `config` says.

    Args:
        config: Configuration of the model.
        dropout_p: Dropout probability of a residual sum; see `LayerNorm`.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.

    Returns:
        A new `LayerNorm` or `RMSNorm`.
    """
    size, eps = config.hidden_size, config.layer_norm_eps
    if config.architecture.rms_norm:
        return RMSNorm(size, eps, dropout_p, backend)
    return LayerNorm(size, eps, dropout_p, backend, config.architecture.norm_bias)


def _modernise(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename ``gamma`` to ``weight`` and ``beta`` to ``bias`` in a state dict; a load hook."""
    for name in [name for name in state if name.startswith(prefix)]:
        if modernise(name) != name:
            state[modernise(name)] = state.pop(name)
