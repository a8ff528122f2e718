"""Linear layers that share their input, computed as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import Joined, deviation
from fastbert.ops import backend as backends

# No product has more rows than this number.
WHOLE = 2**62


class JoinedLinear(Joined, OperationModule):
    """One linear layer for several layers that share their input.

    An example is the query, key and value of a model that stores three layers.

    One call of ``fastbert.ops.linear`` computes the outputs of `parts` side by side. If one part
    was replaced or has hooks, every part is called.

    ``weight`` and ``bias`` are the weights and biases of `parts`, concatenated along the outputs.
    If a gradient is wanted, every call joins the parameters. Otherwise, on the CPU with the
    extension, a joined copy is kept until the fingerprint of a part changes
    (``csrc/cpu/gemm/fingerprint.h``).

    Args:
        parts: The linear layers.
        backend: Backend of the product; None lets the operation choose.
    """

    operation = "linear"

    def __init__(self, parts: Sequence[nn.Module], backend: str | None = None) -> None:
        """Keep the parts."""
        OperationModule.__init__(self, backend)
        self.parts = nn.ModuleList(parts)
        self._kept: _Kept | None = None

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the outputs of all parts.

        Args:
            x: Input of shape ``(..., K)``.
            return_residual: Whether `x` is returned too, as in ``Linear``.

        Returns:
            Tensor of shape ``(..., N)``, and `x` with `return_residual`.
        """
        if deviation(self, nn.Linear) is not None:
            y = torch.cat([part(x) for part in self.parts], -1)
            return (y, x) if return_residual else y
        weight, bias = self.parameters_now(x.numel() // x.shape[-1])
        return ops.linear(x, weight, bias, return_residual=return_residual, backend=self.backend)

    @property
    def weight(self) -> Tensor:
        """Joined weight of shape ``(N, K)``."""
        return self.parameters_now()[0]

    @property
    def bias(self) -> Tensor | None:
        """Joined bias of shape ``(N,)``; None if no part has a bias."""
        if all(part.bias is None for part in self.parts):
            # The weights need not be joined for this answer.
            return None
        return self.parameters_now()[1]

    def parameters_now(self, rows: int = WHOLE) -> tuple[Tensor, Tensor | None]:
        """Return the joined weight and bias.

        Args:
            rows: Number of rows of the product. A product with fewer rows reads less of each part
                to see whether a kept copy is still valid. The default reads the whole of each part.

        Returns:
            The weight, of shape ``(N, K)``, and the bias, of shape ``(N,)``, or None if no part has
            a bias. If only some parts have a bias, the others have zeros.
        """
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts]
        if any(bias is not None for bias in biases):
            shapes = zip(biases, weights, strict=True)
            biases = [w.new_zeros(w.shape[0]) if bias is None else bias for bias, w in shapes]
        else:
            biases = []
        tensors = weights + biases
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        here = backends.EXTENSION is not None and all(t.device.type == "cpu" for t in tensors)
        if wanted or not here or torch.compiler.is_compiling():
            self._kept = None
            return torch.cat(weights), torch.cat(biases) if biases else None
        kept = self._kept
        if kept is None or not kept.holds(tensors, rows):
            kept = self._kept = _Kept.of(weights, biases)
        return kept.weight, kept.bias

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the kept copy.

        A deep copy or an unpickled module makes its own joined copy.
        """
        return self.__dict__ | {"_kept": None}


class _Kept(NamedTuple):
    """A joined copy of the parameters, with the fingerprint of their sources.

    The storages of the sources are kept, so that no other tensor gets their addresses.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    fingerprint: Tensor
    storages: list[torch.UntypedStorage]

    @classmethod
    def of(cls, weights: list[Tensor], biases: list[Tensor]) -> _Kept:
        """Join `weights` and `biases`."""
        # A backward pass cannot save an inference tensor, so inference mode is off here.
        with torch.inference_mode(False), torch.no_grad():
            # The fingerprint comes first, so that the next call finds a write between the two.
            fingerprint = torch.ops.fastbert_C.fingerprint(weights + biases)
            weight, *bias = (nn.Parameter(torch.cat(t), False) for t in (weights, biases) if t)
        storages = [t.untyped_storage() for t in weights + biases]
        return cls(weight, bias[0] if bias else None, fingerprint, storages)

    def holds(self, tensors: list[Tensor], rows: int) -> bool:
        """Return whether `tensors` match the fingerprint.

        A product with few `rows` reads a part of each weight only.
        """
        return torch.ops.fastbert_C.has_fingerprint(tensors, self.fingerprint, rows)
