"""Scores of additive attention."""

from __future__ import annotations

from torch import Tensor


def additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Compute ``vᵀ tanh(query + keys)`` for every pair of a query and a key.

    See ``fastbert.ops.additive_scores``.
    """
    return (query.unsqueeze(2) + keys.unsqueeze(1)).tanh() @ v
