"""Where tokens stand, for the encoders whose attention knows: rotary positions (Su et al. 2021) and
a learned bias by distance (Raffel et al. 2020, as in MPNet)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule

Rotation = tuple[Tensor, Tensor]


def rotation(positions: Tensor, base: float, head_dim: int) -> Rotation:
    """Cosines and sines fp32 (T, D / 2) of the angles positions (T,) / base^(2i / D), as
    ``ops.rotary`` takes them."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * (1.0 / base ** (steps / head_dim))
    return angles.cos(), angles.sin()


class Rotary(OperationModule):
    """Turns the queries and keys of a layer whose angles have the base ``base``."""

    operation = "rotary"

    def __init__(self, base: float, backend: str | None = None) -> None:
        super().__init__(backend)
        self.base = base

    def forward(self, qkv: Tensor, rotations: dict[float, Rotation], heads: int) -> Tensor:
        """qkv (T, N, D), the first ``heads`` of N turned; ``rotations``: of each base."""
        return ops.rotary(qkv, *rotations[self.base], heads=heads, backend=self.backend)


class DistanceBias(nn.Embedding):
    """``weight`` (buckets, heads): what is added to the logits of a query and a key by the distance
    between them. Half of the buckets are for keys behind the query; in each half the first half is
    for single distances, the others grow by a factor up to ``FARTHEST``."""

    FARTHEST = 128

    def forward(self, places: Tensor) -> Tensor:
        """places int64 (..., L) → (..., heads, L, L), [query, key]."""
        distance = places.unsqueeze(-2) - places.unsqueeze(-1)
        bias = super().forward(self.buckets(distance))
        return bias.movedim(-1, -3)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, key minus query."""
        half = self.num_embeddings // 2
        exact = half // 2
        far = distance.abs()
        growth = (far.float() / exact).log() / math.log(self.FARTHEST / exact) * (half - exact)
        grown = (exact + growth.clamp(min=0).long()).clamp(max=half - 1)
        return torch.where(distance > 0, half, 0) + torch.where(far < exact, far, grown)
