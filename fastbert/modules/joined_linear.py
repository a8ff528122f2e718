"""Linear layers that share their input, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule
from fastbert.modules.plain import Joined, deviation
from fastbert.ops import backend as backends

# As many rows as any product has.
WHOLE = 2**62


class JoinedLinear(Joined, OperationModule):
    """The outputs of ``parts``, side by side, by one ``fastbert.ops.linear``: query, key and value
    of a model that keeps three layers. A part that was replaced or has hooks is called, and then
    each of the others too.

    ``weight`` and ``bias`` are the weights and biases of ``parts``, one below the other. Where a
    gradient is wanted they are joined in every call. Otherwise, on the CPU, a joined copy is kept
    until the fingerprint of a part changes (``csrc/cpu/gemm/fingerprint.h``).
    """

    operation = "linear"

    def __init__(self, parts: Sequence[nn.Module], backend: str | None = None) -> None:
        OperationModule.__init__(self, backend)
        self.parts = nn.ModuleList(parts)
        self._kept: _Kept | None = None

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if deviation(self, nn.Linear) is not None:
            y = torch.cat([part(x) for part in self.parts], -1)
            return (y, x) if return_residual else y
        weight, bias = self.parameters_now(x.numel() // x.shape[-1])
        return ops.linear(x, weight, bias, return_residual=return_residual, backend=self.backend)

    @property
    def weight(self) -> Tensor:
        return self.parameters_now()[0]

    @property
    def bias(self) -> Tensor | None:
        if all(part.bias is None for part in self.parts):
            return None  # without joining the weights for it
        return self.parameters_now()[1]

    def parameters_now(self, rows: int = WHOLE) -> tuple[Tensor, Tensor | None]:
        """The joined weight and bias.

        Args:
            rows: Rows of the product that they are for; the fewer, the less of each part is read to
                see whether a kept copy is still true. All of it by default.

        Returns:
            The weight, of shape ``(N, K)``, and the bias, of shape ``(N,)``, or None where no part
            has a bias. A part without a bias beside parts with one has zeros.
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
        """Without the kept copy, which a deep copy or a pickle makes for itself."""
        return self.__dict__ | {"_kept": None}


class _Kept(NamedTuple):
    """A joined copy, the fingerprint of what it was made of, and those storages, so that no other
    tensor gets their addresses."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    fingerprint: Tensor
    storages: list[torch.UntypedStorage]

    @classmethod
    def of(cls, weights: list[Tensor], biases: list[Tensor]) -> _Kept:
        # A copy of inference tensors could not be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            # First the fingerprint: a write between the two is found in the next call.
            fingerprint = torch.ops.fastbert_C.fingerprint(weights + biases)
            weight, *bias = (nn.Parameter(torch.cat(t), False) for t in (weights, biases) if t)
        storages = [t.untyped_storage() for t in weights + biases]
        return cls(weight, bias[0] if bias else None, fingerprint, storages)

    def holds(self, tensors: list[Tensor], rows: int) -> bool:
        return torch.ops.fastbert_C.has_fingerprint(tensors, self.fingerprint, rows)
