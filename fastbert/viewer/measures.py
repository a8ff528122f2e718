"""Numbers that describe the weights of an attention head, such as their entropy and distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.viewer.text import PADDING, Tokens


class Measure(NamedTuple):
    """A measure that the page shows as one number for each head.

    Attributes:
        name: Name of the measure in the data of the page.
        label: Name that the page shows to its reader.
        unit: Unit of the measure: ``"nats"``, ``"tokens"`` or ``"share"``.
    """

    name: str
    label: str
    unit: str


MEASURES = (
    Measure("entropy", "entropy", "nats"),
    Measure("distance", "distance", "tokens"),
    Measure("first", "to first token", "share"),
    Measure("separator", "to separators", "share"),
    Measure("self", "to itself", "share"),
    Measure("previous", "to previous", "share"),
    Measure("next", "to next", "share"),
    Measure("same", "to own sentence", "share"),
)


def measure(weights: Tensor, tokens: Tokens) -> dict[str, list[float]]:
    """Compute the measures of the heads of a layer.

    Each measure is a mean over the queries that are not padding. A share is the sum of the weights
    on the keys that the measure names. With the weight ``w_ij`` of query i on key j, the distance
    of query i is ``Σ_j w_ij |i − j|``, and its entropy is ``−Σ_j w_ij log w_ij``, in nats. A
    special token is in no sentence. The share on the own sentence is the mean over the queries in a
    sentence, and a share on a neighbour is the mean over the queries that have this neighbour.

    Args:
        weights: Attention weights of shape ``(heads, L, L)``, 0 at padding.
        tokens: The L tokens to which the weights belong.

    Returns:
        For each name of `MEASURES`, one number per head.
    """
    places = torch.arange(weights.shape[-1])
    sentences = torch.tensor(tokens.sentences)
    exists = sentences != PADDING
    apart = (places[:, None] - places[None, :]).abs().to(weights.dtype)
    separators = torch.tensor([float(number in tokens.separator_ids) for number in tokens.ids])
    first = int(exists.int().argmax())
    texts = torch.stack([sentences == 0, sentences == 1], 1).to(weights.dtype)
    per_query = {
        "entropy": torch.special.entr(weights).sum(-1),
        "distance": torch.einsum("hij,ij->hi", weights, apart),
        "first": weights[..., first],
        "separator": weights @ separators.to(weights.dtype),
        "self": weights.diagonal(dim1=-2, dim2=-1),
        "same": ((weights @ texts) * texts).sum(-1),
    }
    found = {name: values[:, exists].mean(-1) for name, values in per_query.items()}
    found["same"] = per_query["same"][:, sentences >= 0].mean(-1)
    # All padding comes after the text, so the first `last` pairs of neighbouring positions contain
    # no padding.
    last = int(exists.sum()) - 1
    found["previous"] = weights.diagonal(-1, -2, -1)[:, :last].mean(-1)
    found["next"] = weights.diagonal(1, -2, -1)[:, :last].mean(-1)
    return {each.name: found[each.name].tolist() for each in MEASURES}


def rollout(means: Tensor) -> Tensor:
    """Compute attention rollout, which multiplies the attention of all layers.

    Args:
        means: Attention weights of each layer, averaged over its heads: ``(layers, L, L)``.

    Returns:
        Tensor of shape ``(layers, L, L)``: layer l is ``A_l A_{l-1} … A_0``, where ``A_l`` is
        ``(means[l] + I) / 2`` with the identity matrix I. Row i says how much of each input token
        reaches token i.

    Note:
        Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers". The page computes the
        same rows from its quantised weights; this function is their reference.
    """
    identity = torch.eye(means.shape[-1], dtype=means.dtype)
    found: list[Tensor] = []
    for mean in means:
        step = (mean + identity) / 2
        found.append(step @ found[-1] if found else step)
    return torch.stack(found)
