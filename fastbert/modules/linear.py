"""A linear layer whose gradient launches GEMMs and our sums only."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule


class Linear(nn.Linear, OperationModule):
    """``torch.nn.Linear`` by ``fastbert.ops.linear``."""

    operation = "linear"

    def __init__(
        self, inputs: int, outputs: int, backend: str | None = None, bias: bool = True
    ) -> None:
        nn.Linear.__init__(self, inputs, outputs, bias=bias)
        self.set_backend(backend)

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        return ops.linear(
            x, self.weight, self.bias, return_residual=return_residual, backend=self.backend
        )
