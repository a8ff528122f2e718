"""The loss of hard attention: REINFORCE with a baseline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.ops.arguments import require, require_same_device


class Reinforce(nn.Module):
    """The loss term whose gradient is that of the expected reward, estimated from drawn positions.

    The loss is ``-(reward - baseline) · log_probability``, summed over the queries and averaged
    over the batch. The baseline is a moving average of the rewards of earlier calls,
    ``decay · baseline + (1 - decay) · reward``. It starts at 0, and training mode updates it after
    the loss is computed, so that it does not bias the estimate.

    Args:
        decay: Weight of the earlier baseline, in [0, 1).

    Raises:
        ValueError: If `decay` is not allowed.

    Note:
        Williams 1992. Xu et al. 2015, section 4.1: the reward is the log-likelihood of the output,
        and the decay is 0.9.

    Examples:
        >>> import torch
        >>> from fastbert.modules import alignment
        >>> align, reinforce = alignment.Dot(attend="hard"), alignment.Reinforce()
        >>> query, keys = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 5, 8)
        >>> output, weights, log_probability = align(
        ...     query, keys, keys, return_log_probability=True
        ... )
        >>> reward = -output.detach().square().mean(dim=(1, 2))
        >>> reinforce(log_probability, reward).backward()
        >>> query.grad.shape
        torch.Size([2, 3, 8])
    """

    baseline: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        """Create the baseline."""
        super().__init__()
        require(0.0 <= decay < 1.0, "decay", decay, "a number in [0, 1)")
        self.decay = decay
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, log_probability: Tensor, reward: Tensor) -> Tensor:
        """Compute the loss term, and update the baseline in training mode.

        Args:
            log_probability: Log-probabilities of the drawn positions, of shape ``(B, Lq)``, as the
                alignment returns them. Set those of padding queries to 0.
            reward: Reward of each sequence, of shape ``(B,)``, or of each query, of shape
                ``(B, Lq)``. The reward gets no gradient.

        Returns:
            The loss term, a scalar that is added to the loss of the output.

        Raises:
            ValueError: If a shape or a device is not allowed.
        """
        shape = tuple(log_probability.shape)
        require(len(shape) == 2, "log_probability", f"shape {shape}", "(B, Lq)")
        fits = tuple(reward.shape) in (shape[:1], shape)
        require(fits, "reward", f"shape {tuple(reward.shape)}", f"{shape[:1]} or {shape}")
        require_same_device("log_probability", log_probability.device, reward=reward)
        reward = reward.detach().to(log_probability.dtype)
        advantage = reward - self.baseline
        if advantage.dim() == 1:
            advantage = advantage.unsqueeze(-1)
        loss = -(advantage * log_probability).sum(dim=1).mean()
        if self.training:
            self.baseline.lerp_(reward.mean().to(self.baseline.dtype), 1.0 - self.decay)
        return loss

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"decay={self.decay}"
