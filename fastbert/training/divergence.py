"""Stopping all updates after a gradient that is not finite, without a wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A place is the number of an epoch and the number of a batch in this epoch.
Place = tuple[int, int]


class Diverged(RuntimeError, FloatingPointError):
    """A loss or a gradient is not finite.

    The error is a RuntimeError for callers in Python. The command line shows it as one line because
    it is also a FloatingPointError.
    """


class Divergence:
    """Watches the gradients of a run for values that are not finite.

    After a gradient that is not finite, no step changes the weights or the moments of the
    optimizer any more: torch's fused optimizers skip the update while their attribute `found_inf`
    is 1. The CPU learns of the divergence only when it calls `place`, which waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the state on `device`; so far, all gradients are finite."""
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
            place: Number of the epoch, and number of the batch in the epoch.
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
