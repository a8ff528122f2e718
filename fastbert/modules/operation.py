"""The base class of modules that call an operation of ``fastbert.ops`` with a backend."""

from __future__ import annotations

from torch import nn

from fastbert.ops.backend import prefer


class OperationModule(nn.Module):
    """The base of modules that call one operation with a backend.

    Args:
        backend: Requested backend, as in `set_backend`; None lets the operation choose.

    Attributes:
        operation: Name of the operation.
        activation: Name of the activation that the backend must support.
        backend: Backend that every call of the operation asks for; None if the operation chooses.
    """

    operation: str
    activation: str = "gelu"
    backend: str | None

    def __init__(self, backend: str | None = None) -> None:
        """Create the module and set its backend."""
        super().__init__()
        self.set_backend(backend)

    def set_backend(self, backend: str | None) -> None:
        """Set the backend that every call of the operation asks for.

        Args:
            backend: ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``. None lets the operation
                choose. The operation also chooses if it has no full implementation by `backend`;
                see ``fastbert.ops.backend.prefer``.

        Raises:
            ValueError: If `backend` is unknown.
        """
        self.backend = prefer(self.operation, backend)
