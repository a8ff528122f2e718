"""Dropout by a counter-based generator: seed, probability and coordinates determine the mask."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
PHILOX_ROUNDS = 7


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Compute the four 32-bit words of Philox4x32-7 (Salmon et al. 2011) as int64 tensors.

    The key is the seed, an int64 tensor of shape (1,), whose low word comes first. The counter is
    (c0, c1, c2, c3), four int64 tensors that are broadcast against each other.
    """
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(PHILOX_ROUNDS):
        # The product wraps to its low 64 bits. The shift >> extends the sign, and & WORD removes
        # the additional bits.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32 & WORD) ^ c1 ^ key0, (product0 >> 32 & WORD) ^ c3 ^ key1
        c1, c3 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def dropout_keep(seed: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Return a bool mask of `shape`, (rows, columns) or (B, H, Lq, Lk), True at kept elements.

    Element (c3, c2, c1, j) uses word ``j % 4`` of `philox` for the counter (j // 4, c1, c2, c3),
    where c2 and c3 are 0 for two dimensions. Whether an element is kept therefore depends only on
    the seed, on `p` and on the coordinates of the element, not on the layout or the tile.
    """
    full = (1,) * (4 - len(shape)) + tuple(shape)
    sizes = (*full[:3], -(-full[3] // 4))
    c3, c2, c1, c0 = (
        torch.arange(size, device=seed.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    )
    words = torch.stack(philox(seed, c0, c1, c2, c3), dim=-1).flatten(-2)[..., : full[3]]
    return (words >> 8 >= int(p * 2**24 + 0.5)).view(shape)


def dropout(x: Tensor, p: float, seed: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Set the elements that `dropout_keep` drops to 0, and scale the others by ``1 / (1 - p)``.

    `shape` is the argument of `dropout_keep`; `x` has as many elements, in the same order.
    """
    if p == 0.0:
        return x
    if seed is None:
        raise ValueError(
            f"dropout_seed: got None with dropout_p={p}, allowed: an int64 tensor (1,)"
        )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return (x * scale).masked_fill(~dropout_keep(seed, p, shape).view(x.shape), 0.0)
