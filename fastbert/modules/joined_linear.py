"""Linear layers that share their input, as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.backend import OperationModule
from fastbert.modules.untouched import Joined, touched
from fastbert.ops import backend as backends


class JoinedLinear(Joined, OperationModule):
    """The outputs of ``parts``, side by side, by one ``fastbert.ops.linear``: query, key and value
    of a model that keeps three layers. A part that was replaced or has hooks is called, and then
    each of the others too.

    ``weight`` and ``bias`` are the parts' own, one below the other: where a gradient is wanted
    joined in every call, else a copy that is kept until a part changes, on the CPU.
    """

    operation = "linear"

    def __init__(self, parts: Sequence[nn.Module], backend: str | None = None) -> None:
        OperationModule.__init__(self, backend)
        self.parts = nn.ModuleList(parts)
        self._kept: tuple[int, nn.Parameter, nn.Parameter | None] | None = None

    def forward(self, x: Tensor, return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if touched(self, nn.Linear) is not None:
            y = torch.cat([part(x) for part in self.parts], -1)
            return (y, x) if return_residual else y
        weight, bias = self.parameters_now()
        return ops.linear(x, weight, bias, return_residual=return_residual, backend=self.backend)

    @property
    def weight(self) -> Tensor:
        return self.parameters_now()[0]

    @property
    def bias(self) -> Tensor | None:
        if all(part.bias is None for part in self.parts):
            return None  # without joining the weights for it
        return self.parameters_now()[1]

    def parameters_now(self) -> tuple[Tensor, Tensor | None]:
        """weight (N, K) and bias (N,) or None. Parts without a bias beside others have zeros."""
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts]
        if any(bias is not None for bias in biases):
            rows = zip(biases, weights, strict=True)
            biases = [w.new_zeros(w.shape[0]) if bias is None else bias for bias, w in rows]
        else:
            biases = []
        tensors = weights + biases
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        here = backends.EXTENSION is not None and all(t.device.type == "cpu" for t in tensors)
        if wanted or not here or torch.compiler.is_compiling():
            self._kept = None
            return torch.cat(weights), torch.cat(biases) if biases else None
        state = torch.ops.fastbert_C.state_of(tensors)
        kept = self._kept
        if kept is None or kept[0] != state:
            whole = [nn.Parameter(torch.cat(each), False) for each in (weights, biases) if each]
            kept = self._kept = (state, whole[0], whole[1] if biases else None)
        return kept[1], kept[2]
