"""A gradient that is not finite stops all updates, without a wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Number of the epoch and of the batch in it.
Place = tuple[int, int]


class Diverged(RuntimeError, FloatingPointError):
    """A loss or a gradient is not finite.

    It is a RuntimeError for callers in Python, and the command line shows it as one line because it
    is a FloatingPointError.
    """


class Divergence:
    """Watches the gradients of a run.

    After a gradient that is not finite, no step changes the weights or the moments of the
    optimizer any more: torch's fused optimizers skip the update while their attribute `found_inf`
    is 1. The host learns of it when it asks for the place.
    """

    def __init__(self, device: torch.device) -> None:
        """Start on `device`, with all gradients finite so far."""
        self._diverged = torch.zeros((), dtype=torch.bool, device=device)
        self._sound = torch.zeros((), dtype=torch.int64, device=device)
        # The places of the steps since the last call of `place`.
        self._places: list[Place] = []

    @torch.no_grad()
    def watch(self, norm: Tensor, optimizer: Any, place: Place) -> None:
        """Let a fused optimizer make its next step only if all gradients so far are finite.

        Args:
            norm: Norm of the gradients of the step.
            optimizer: The optimizer.
            place: Place of the batch.
        """
        self._places.append(place)
        self._diverged |= ~norm.isfinite()
        self._sound += ~self._diverged
        optimizer.found_inf = self._diverged.float()

    def place(self) -> Place | None:
        """Return the place of the first batch whose gradient was not finite, or None."""
        if not self._places:
            return None
        if bool(self._diverged):
            return self._places[int(self._sound)]
        self._sound.zero_()
        self._places.clear()
        return None
