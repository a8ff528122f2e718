"""A projection of pooled vectors, as sentence-transformers' ``Dense`` computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.io import checkpoint, sentence_transformers_folder

# The classes of torch.nn without weights that act on each number by itself.
ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
    "LeakyReLU", "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip


class Dense(nn.Module):
    """``activation(W x + b)``, (B, in_features) → (B, out_features).

    ``activation`` is the name of a class of torch.nn in ``ACTIVATIONS``. With ``residual``, x is
    added to the result, projected without a bias where the sizes differ. Raises ValueError for
    another activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str = "Tanh",
        residual: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation: got {activation!r}, allowed: {allowed}")
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = getattr(nn, activation)()
        self.residual: nn.Module | None = None
        if residual and in_features == out_features:
            self.residual = nn.Identity()
        elif residual:
            self.residual = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.linear(x))
        return out if self.residual is None else out + self.residual(x)

    @classmethod
    def from_folder(cls, stored: sentence_transformers_folder.Dense) -> Dense:
        """The module with its weights, in float32.

        Raises OSError when the folder has no weights, and ValueError naming it when the weights are
        damaged or do not fit. Memory is taken only after that.
        """
        sizes = (stored.in_features, stored.out_features)
        activation, residual = stored.activation, stored.residual
        try:
            with torch.device("meta"):
                module = cls(*sizes, bias=stored.bias, activation=activation, residual=residual)
        except ValueError as error:
            raise ValueError(f"{stored.folder}: {error}") from error
        tensors, expected = checkpoint.read_tensors(stored.folder), module.state_dict()
        if tensors.keys() != expected.keys():
            raise ValueError(
                f"{stored.folder}: got the weights {', '.join(sorted(tensors))}, allowed: "
                f"{', '.join(expected)}"
            )
        checkpoint.check_shapes(stored.folder, tensors, expected)
        module.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
        return module
