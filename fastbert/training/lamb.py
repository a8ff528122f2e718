"""LAMB, an optimizer for large batches (You et al. 2020, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam with decoupled weight decay, whose update is scaled for each layer.

    The update of a layer is scaled to the norm of the weights of the layer, so that large learning
    rates for large batches do not diverge. A layer is one parameter; in fastbert, the projections
    to queries, keys and values are one parameter. The update is not scaled if the norm of the layer
    or of the update is zero, as for a bias of zeros at the first step.

    The updates of a group of parameters with ``adapt=False`` are not scaled, as in the code of the
    authors for biases and the parameters of LayerNorm.

    While the attribute `found_inf` is a tensor that is 1, a step changes neither weights nor
    moments, as in torch's fused optimizers; the CPU does not wait for the tensor.

    Args:
        params: Parameters, or groups with ``params`` and optionally ``lr``, ``betas``, ``eps``,
            ``weight_decay`` and ``adapt``.
        lr: Learning rate.
        betas: Decays of the two moments.
        eps: Number that is added to the square root of the second moment.
        weight_decay: Weight decay, which is added to the update before the update is scaled.
        adapt: Whether the update is scaled to the norm of the weights of the layer.

    Note:
        You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes",
        algorithm 2 with the identity as the function φ of the norm.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        """Store the parameters; their moments are created at the first step."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update.

        Args:
            closure: Computes the loss and the gradients before the update; None if the gradients
                exist already.

        Returns:
            The loss of `closure`, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            # The state "step" is on the CPU, where torch also leaves it when it loads a checkpoint.
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        number = int(state["step"])
        first, second = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if self.found_inf is not None:
            # If a gradient is not finite, each moment is interpolated toward itself, which changes
            # no bit.
            sound = self.found_inf == 0
            target = torch.where(sound, gradient, mean)
            target_square = torch.where(sound, gradient * gradient, square)
        else:
            target, target_square = gradient, gradient * gradient
        mean.lerp_(target, 1 - first)
        square.lerp_(target_square, 1 - second)
        corrected = mean / (1 - first**number)
        root = (square / (1 - second**number)).sqrt_()
        update = corrected / root.add_(group["eps"])
        update.add_(weight, alpha=group["weight_decay"])
        rate = _trust(weight, update) * group["lr"] if group["adapt"] else group["lr"]
        update = update * rate
        if self.found_inf is not None:
            update = torch.where(sound, update, 0.0)
        weight.sub_(update)


def _trust(weight: Tensor, update: Tensor) -> Tensor:
    """Return the norm of a layer's weights over the norm of its update; 1 if a norm is zero."""
    layer, change = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
    return torch.where((layer > 0) & (change > 0), layer / change, 1.0)
