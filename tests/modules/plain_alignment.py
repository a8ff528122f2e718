"""Alignment in plain PyTorch, written from the formulas of the papers, for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastbert.modules import alignment

Parameters = Mapping[str, Tensor]
STRENGTH = 3.0
MAX_KEYS = 23


def content_based(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    norms = s.norm(dim=-1).unsqueeze(2) * h.norm(dim=-1).unsqueeze(1)
    return STRENGTH * torch.einsum("bid,bjd->bij", s, h) / norms


def additive(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    pairs = (s.shape[0], s.shape[1], h.shape[1])
    both = torch.cat([s.unsqueeze(2).expand(*pairs, -1), h.unsqueeze(1).expand(*pairs, -1)], -1)
    w = torch.cat([p["query_projection.weight"], p["key_projection.weight"]], dim=1)
    return torch.tanh(both @ w.mT) @ p["v"]


def location_based(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    return (s @ p["projection.weight"].mT)[:, :, : h.shape[1]]


def general(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    # The weight of the projection is W transposed.
    return s @ p["projection.weight"].mT @ h.mT


def dot(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    return s @ h.mT


def scaled_dot(p: Parameters, s: Tensor, h: Tensor) -> Tensor:
    return s @ h.mT / s.shape[-1] ** 0.5


# Name of a score → its formula, and a function from the sizes of query and key to its module.
SCORES: dict[str, tuple[Callable[..., Tensor], Callable[..., alignment.Alignment]]] = {
    "content-based": (
        content_based,
        lambda s, h, **options: alignment.ContentBased(strength=STRENGTH, **options),
    ),
    "additive": (additive, lambda s, h, **options: alignment.Additive(s, h, 13, **options)),
    "location-based": (
        location_based,
        lambda s, h, **options: alignment.LocationBased(s, MAX_KEYS, **options),
    ),
    "general": (general, alignment.General),
    "dot": (dot, lambda s, h, **options: alignment.Dot(**options)),
    "scaled dot": (scaled_dot, lambda s, h, **options: alignment.ScaledDot(**options)),
}


def softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over the allowed keys; a query without keys has weights of 0."""
    largest = scores.detach().masked_fill(~allowed, -torch.inf).amax(dim=-1, keepdim=True)
    shifted = scores - largest.masked_fill(largest == -torch.inf, 0.0)
    powers = shifted.masked_fill(~allowed, 0.0).exp().masked_fill(~allowed, 0.0)
    total = powers.sum(dim=-1, keepdim=True)
    return powers / total.masked_fill(total == 0.0, 1.0)


def window_of(
    p: Parameters, local: alignment.Monotonic | alignment.Predictive | None, s: Tensor, lengths
) -> tuple[Tensor, Tensor]:
    """Return the allowed keys and the factors of the weights, key by key, for right padding."""
    batch, rows, columns = s.shape[0], s.shape[1], max(lengths)
    place = torch.arange(columns, device=s.device)
    count = torch.tensor(lengths, device=s.device).view(batch, 1, 1)
    allowed = (place < count).expand(batch, rows, columns)
    if local is None:
        return allowed, torch.ones_like(allowed, dtype=s.dtype)
    if isinstance(local, alignment.Monotonic):
        centre = torch.arange(rows, device=s.device).view(1, rows, 1)
        near = (place - centre).abs() <= local.window
        return allowed & near, torch.ones_like(allowed, dtype=s.dtype)
    hidden = torch.tanh(s @ p["local.projection.weight"].mT)
    centre = count * torch.sigmoid(hidden @ p["local.v.weight"].mT)
    sigma = local.window / 2
    near = (place - centre).abs() <= local.window
    return allowed & near, torch.exp(-((place - centre) ** 2) / (2 * sigma**2))


def attend(
    name: str,
    p: Parameters,
    s: Tensor,
    h: Tensor,
    values: Tensor,
    lengths,
    local: alignment.Monotonic | alignment.Predictive | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the weights of soft attention over the first keys of each sequence."""
    allowed, factors = window_of(p, local, s, lengths)
    weights = softmax(SCORES[name][0](p, s, h), allowed) * factors
    return weights @ values, weights
