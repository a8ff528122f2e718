"""Positions of tokens in attention: rotary positions and a learned bias by distance.

Rotary positions are from Su et al. 2021. The bias by distance is from Raffel et al. 2020, as MPNet
uses it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.operation import OperationModule
from fastbert.ops.product import needs_gradient

# The cosines and the sines of the rotary angles.
Rotation = tuple[Tensor, Tensor]


def frequencies(base: float, head_dim: int, device: torch.device) -> Tensor:
    """Compute the frequencies ``base ** (-2 i / D)`` for each i from 0 to ``D / 2 - 1``.

    Args:
        base: Base of the rotary frequencies, such as 10,000.
        head_dim: Size D of a head.
        device: Device of the result.

    Returns:
        The frequencies, fp32 of shape ``(D / 2,)``.
    """
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (steps / head_dim)


def rotation(positions: Tensor, frequency: Tensor) -> Rotation:
    """Compute the cosines and sines of the rotary angles, as ``ops.rotary`` takes them.

    The angles are the products of the positions and the frequencies.

    Args:
        positions: Positions of shape ``(T,)``.
        frequency: Frequencies of shape ``(D / 2,)`` for heads of size D.

    Returns:
        Cosines and sines, each fp32 of shape ``(T, D / 2)``.
    """
    angles = positions[:, None].float() * frequency.float()
    return angles.cos(), angles.sin()


class DistanceSlopes(nn.Module):
    """A constant bias of the attention logits that falls linearly with the distance (ALiBi).

    The slopes of a power of two of heads are a geometric sequence (Press et al. 2022, section 3).
    Another number of heads takes the slopes of the next smaller power of two, and then every second
    slope of twice this power, as the code of the authors does. The bias is symmetric, because a
    token of an encoder attends to tokens on both sides.

    Args:
        heads: Number of attention heads.
    """

    def __init__(self, heads: int) -> None:
        """Compute the slopes."""
        super().__init__()
        power = 2 ** int(math.log2(heads))
        slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
        slopes += [2.0 ** (-4.0 * head / power) for head in range(1, 2 * power, 2)]
        # `Module.to` would round a buffer.
        self.slopes = tuple(slopes[:heads])

    def forward(self, places: Tensor) -> Tensor:
        """Compute the bias of the attention logits.

        Args:
            places: Positions of the tokens, int64 of shape ``(..., L)``.

        Returns:
            fp32 tensor of shape ``(..., heads, L, L)``, indexed by query and key.
        """
        distance = (places.unsqueeze(-2) - places.unsqueeze(-1)).abs().float()
        slopes = torch.tensor(self.slopes, device=places.device)
        return -slopes[:, None, None] * distance.unsqueeze(-3)


class RotaryTable(nn.Embedding):
    """The sines of the rotary angles of each position, and then the cosines, ``(positions, D)``.

    The table is a part of the checkpoints of RoFormer and is not trained.

    Args:
        positions: Number of positions.
        head_dim: Size D of a head.
        base: Base of the rotary frequencies, such as 10,000.
    """

    def __init__(self, positions: int, head_dim: int, base: float) -> None:
        """Compute the table."""
        super().__init__(positions, head_dim, _freeze=True)
        self.base = base
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table with the sines and cosines of the angles."""
        if not hasattr(self, "base"):  # The constructor of `nn.Embedding` calls this function.
            return
        device = self.weight.device
        places = torch.arange(self.num_embeddings, device=device)
        cos, sin = rotation(places, frequencies(self.base, self.embedding_dim, device))
        with torch.no_grad():
            self.weight.copy_(torch.cat((sin, cos), 1))

    def forward(self, positions: Tensor) -> Rotation:
        """Return the cosines and sines of positions ``(T,)``, each fp32 of shape ``(T, D / 2)``."""
        sin, cos = super().forward(positions).float().chunk(2, 1)
        return cos, sin


class Rotary(OperationModule):
    """The rotary embedding of the queries and keys of a layer.

    Args:
        base: Base of the rotary frequencies, such as 10,000.
        backend: Requested backend; see ``OperationModule``. None lets the operation choose.
        neighbours: Whether a pair consists of neighbouring elements of a head instead of an element
            of each half.
    """

    operation = "rotary"

    def __init__(
        self, base: float, backend: str | None = None, *, neighbours: bool = False
    ) -> None:
        """Store the base."""
        super().__init__(backend)
        self.base = base
        self.neighbours = neighbours

    def forward(self, qkv: Tensor, rotations: dict[float, Rotation], heads: int) -> Tensor:
        """Rotate the heads of the queries and keys, which come before the heads of the values.

        Args:
            qkv: Queries, keys and values with N heads in all, of shape ``(T, N, D)``.
            rotations: Maps each base to its cosines and sines.
            heads: Number of heads that are rotated, from the first.

        Returns:
            Tensor of shape ``(T, N, D)``.
        """
        angles = rotations[self.base]
        if not self.neighbours:
            return ops.rotary(qkv, *angles, heads=heads, backend=self.backend)
        halves = qkv.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = ops.rotary(halves, *angles, heads=heads, backend=self.backend)
        return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class DistanceBias(nn.Embedding):
    """A learned bias of the attention logits, by the distance between a query and a key.

    ``weight`` has the shape ``(buckets, heads)``. One half of the buckets is for keys after the
    query, and the other half for all other keys. In each half, the first half of the buckets has
    one distance per bucket. The other buckets cover ranges of distances, which grow geometrically
    up to `FARTHEST` tokens.
    """

    FARTHEST = 128

    def forward(self, places: Tensor) -> Tensor:
        """Compute the bias of the attention logits.

        Args:
            places: Positions of the tokens, int64 of shape ``(..., L)``.

        Returns:
            Tensor of shape ``(..., heads, L, L)``, indexed by query and key, in the dtype of the
            weight. If autograd records the call, the dtype is at least fp32, so that the gradients
            of all pairs in a bucket are added in fp32.
        """
        distance = places.unsqueeze(-2) - places.unsqueeze(-1)
        weight = self.weight
        if needs_gradient(weight):
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        bias = F.embedding(self.buckets(distance), weight, self.padding_idx)
        return bias.movedim(-1, -3)

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance; a distance is key position minus query position."""
        half = self.num_embeddings // 2
        exact = half // 2
        far = distance.abs()
        growth = (far.float() / exact).log() / math.log(self.FARTHEST / exact) * (half - exact)
        grown = (exact + growth.clamp(min=0).long()).clamp(max=half - 1)
        return torch.where(distance > 0, half, 0) + torch.where(far < exact, far, grown)
