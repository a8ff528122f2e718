"""Attention rollout: how the attention weights of all layers mix the input tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rollout(attentions: Sequence[Tensor]) -> Tensor:
    """Multiply the attention of all layers, with half of each layer for the residual connection.

    A layer contributes ``0.5 A + 0.5 I``, where ``A`` is the mean of its heads. The result is the
    product of these matrices, with the last layer as the leftmost factor.

    Args:
        attentions: Weights of each layer, from the first to the last, of shape
            ``(B, heads, L, L)``. The weights of a query sum to 1.

    Returns:
        Tensor of shape ``(B, L, L)`` in the dtype of the weights. Row i says how much of each input
        token reaches position i, and sums to 1.

    Raises:
        ValueError: If there is no layer, or if a layer has another shape.

    Note:
        Abnar and Zuidema 2020, section 3.

    Examples:
        >>> import torch
        >>> from fastbert.analysis import rollout
        >>> weights = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).expand(1, 2, 2, 2)
        >>> rollout([weights, weights])[0].tolist()
        [[0.25, 0.75], [0.0, 1.0]]
    """
    if not attentions:
        raise ValueError("attentions: got no layers, allowed: at least one")
    first = attentions[0]
    if first.dim() != 4 or any(layer.shape != first.shape for layer in attentions):
        shapes = [tuple(layer.shape) for layer in attentions]
        raise ValueError(
            f"attentions: got the shapes {shapes}, allowed: one shape (B, heads, L, L)"
        )
    identity = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    mixed = identity.expand(first.shape[0], -1, -1)
    for layer in attentions:
        mixed = (0.5 * layer.mean(1) + 0.5 * identity) @ mixed
    return mixed
