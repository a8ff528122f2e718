"""Attention of a decoder over an encoder: six alignment scores with one interface.

Every score is a module ``(query, keys, values, mask) → (output, weights)``. Each takes soft or hard
attention, over all keys or over a window. The page ``docs/alignment.md`` has the table of scores.
"""

from fastbert.modules.alignment.base import Alignment
from fastbert.modules.alignment.local import Monotonic, Predictive
from fastbert.modules.alignment.reinforce import Reinforce
from fastbert.modules.alignment.scores import (
    Additive,
    ContentBased,
    Dot,
    General,
    LocationBased,
    ScaledDot,
)

__all__ = [
    "Additive",
    "Alignment",
    "ContentBased",
    "Dot",
    "General",
    "LocationBased",
    "Monotonic",
    "Predictive",
    "Reinforce",
    "ScaledDot",
]
