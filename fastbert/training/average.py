"""An exponential moving average of the weights of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fastbert.training import checkpoints


class WeightAverage:
    """An exponential moving average (EMA) of the trained weights of a model.

    After step n (from 1), the average moves toward the weights by the fraction ``1 - d`` of their
    difference, where d is the smaller of `decay` and ``(1 + n) / (10 + n)``. With the limit
    ``(1 + n) / (10 + n)``, the average forgets the initial weights sooner, as in TensorFlow's
    ``ExponentialMovingAverage``.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start with the current weights.

        Args:
            model: The model.
            decay: Largest decay of the average, in (0, 1).
        """
        self._decay = decay
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average toward the weights after a step; `step` counts from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, mean in self._means.items():
            checkpoints.local(mean).lerp_(checkpoints.local(self._weights[name]), 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights of the model by the average inside the ``with`` block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, mean in self._means.items():
            here, there = checkpoints.local(self._weights[name]), checkpoints.local(mean)
            weight = here.clone()
            here.copy_(there)
            there.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """Return the average of each weight by the name of the weight, on the CPU."""
        return {name: checkpoints.whole(mean) for name, mean in self._means.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with an average that `tensors` returned."""
        for name, mean in self._means.items():
            checkpoints.check_like(name, saved[name], mean)
            mean.copy_(checkpoints.shared_like(saved[name], mean))
