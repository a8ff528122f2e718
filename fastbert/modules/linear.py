"""A linear layer that ``fastbert.ops.linear`` computes and that can also return its input."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule


class Linear(nn.Linear, OperationModule):
    """The layer ``torch.nn.Linear``, computed by ``fastbert.ops.linear``.

    Args:
        inputs: Size K of the input.
        outputs: Size N of the output.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
        bias: Whether the layer has a bias.
    """

    operation = "linear"

    def __init__(
        self, inputs: int, outputs: int, backend: str | None = None, bias: bool = True
    ) -> None:
        """Create the parameters."""
        nn.Linear.__init__(self, inputs, outputs, bias=bias)
        self.set_backend(backend)

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Compute ``x Wᵀ + b``.

        Args:
            x: Input of shape ``(..., K)``.
            return_residual: Whether `x` is returned too, for a residual connection around the
                layer; see ``ops.linear``.

        Returns:
            Tensor of shape ``(..., N)``. If `return_residual` is True, a pair of this tensor and
            `x`.
        """
        return ops.linear(
            x, self.weight, self.bias, return_residual=return_residual, backend=self.backend
        )
