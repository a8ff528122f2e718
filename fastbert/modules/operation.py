"""A module whose forward is one operation of ``fastbert.ops``, in a backend named when it was
built."""

from __future__ import annotations

from torch import nn

from fastbert.ops import packed_weights
from fastbert.ops.backend import prefer


class OperationModule(nn.Module):
    """``backend``: the request that every call of ``operation`` makes; None lets the operation
    choose."""

    operation: str
    activation: str = "gelu"
    backend: str | None

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self.set_backend(backend)

    def train(self, mode: bool = True) -> OperationModule:
        if mode != self.training:
            packed_weights.forget()
        super().train(mode)
        return self

    def set_backend(self, backend: str | None) -> None:
        """Raises ValueError for a name that no backend has."""
        self.backend = prefer(self.operation, backend)
