"""A projection of pooled vectors, as the ``Dense`` module of sentence-transformers computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.io import checkpoint, sentence_transformers_folder

# The allowed activations: classes of torch.nn without weights that compute each element separately.
ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
    "LeakyReLU", "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip


class Dense(nn.Module):
    """The projection ``activation(W x + b)``, ``(B, in_features) → (B, out_features)``.

    Args:
        in_features: Size of an input vector.
        out_features: Size of an output vector.
        bias: Whether the projection has a bias.
        activation: Name of a class of ``torch.nn`` in `ACTIVATIONS`.
        residual: Whether the input is added to the result. If `in_features` and `out_features`
            differ, a second projection without a bias maps the input to the size of the output.

    Raises:
        ValueError: If `activation` is not allowed.

    Examples:
        >>> import torch
        >>> from fastbert.modules.dense import Dense
        >>> Dense(8, 4)(torch.zeros(2, 8)).shape
        torch.Size([2, 4])
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
        """Create the projections."""
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
        """Compute the projection of `x`, which has the shape ``(B, in_features)``."""
        out = self.activation(self.linear(x))
        return out if self.residual is None else out + self.residual(x)

    @classmethod
    def from_folder(cls, stored: sentence_transformers_folder.Dense) -> Dense:
        """Load the module from a folder, with its weights in float32.

        Memory is allocated only after the files have been checked.

        Args:
            stored: The path of the module's folder, with the settings that it contains.

        Returns:
            The module with its weights.

        Raises:
            OSError: If the folder has no weights.
            ValueError: If the activation is not allowed, or if the weights are damaged or do not
                fit the settings. The message names the folder.
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
