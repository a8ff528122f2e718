"""Several linear layers with the same input, computed as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import Joined, deviation


class JoinedLinear(Joined, OperationModule):
    """One linear layer that computes several linear layers with the same input.

    An example is the query, key and value of a model that has three separate linear layers.

    One call of ``fastbert.ops.linear`` computes the outputs of `parts` side by side. If one part
    was replaced or has hooks, every part is called.

    ``weight`` and ``bias`` are the weights and biases of `parts`, concatenated along the outputs.
    Each access to ``weight`` or ``bias`` concatenates the parts. On the CPU backend, `forward`
    reads the parts' parameters without concatenating them.

    Args:
        parts: The linear layers, in the order of their outputs.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
    """

    operation = "linear"

    def __init__(self, parts: Sequence[nn.Module], backend: str | None = None) -> None:
        """Store the parts."""
        OperationModule.__init__(self, backend)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the outputs of all parts.

        Args:
            x: Input of shape ``(..., K)``.
            return_residual: Whether `x` is returned too, as in ``Linear``.

        Returns:
            Tensor of shape ``(..., N)``, where N is the number of outputs of all parts. If
            `return_residual` is True, a pair of this tensor and `x`.
        """
        if deviation(self, nn.Linear) is not None:
            y = torch.cat([part(x) for part in self.parts], -1)
            return (y, x) if return_residual else y
        weights, biases = self.weights_and_biases()
        return ops.linear(x, weights, biases, return_residual=return_residual, backend=self.backend)

    @property
    def weight(self) -> Tensor:
        """Joined weight of shape ``(N, K)``."""
        return torch.cat([part.weight for part in self.parts])

    @property
    def bias(self) -> Tensor | None:
        """Joined bias of shape ``(N,)``; None if no part has a bias."""
        biases = self.weights_and_biases()[1]
        return None if biases is None else torch.cat(biases)

    def weights_and_biases(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the weights and biases of the parts.

        Returns:
            The weight of each part i, of shape ``(N_i, K)``, and the bias of each part, of shape
            ``(N_i,)``. If only some parts have a bias, the biases of the other parts are zeros. If
            no part has a bias, None is returned instead of the biases.
        """
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts]
        if all(bias is None for bias in biases):
            return weights, None
        shapes = zip(biases, weights, strict=True)
        return weights, [
            nn.Parameter(w.new_zeros(w.shape[0]), False) if bias is None else bias
            for bias, w in shapes
        ]
