"""The inputs of every engine: random ids padded to the longest, made without torch.

Engines that do not need torch must not load it: their memory is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Calls go through this many batches in turn, so that no engine meets the same ids twice running.
ROTATED = 4
# Numbers of a result that are compared between engines.
SAMPLED = 2048

Batch = dict[str, np.ndarray]


def batches(vocabulary: int, lengths: Sequence[int]) -> list[Batch]:
    """``ROTATED`` batches of int64 input_ids and attention_mask (B, L); padding holds id 0."""
    longest = max(lengths)
    mask = np.arange(longest) < np.asarray(lengths)[:, None]
    made = []
    for seed in range(ROTATED):
        drawn = np.random.default_rng(seed).integers(1, vocabulary, mask.shape)
        made.append({"input_ids": drawn * mask, "attention_mask": mask.astype(np.int64)})
    return made


def sample(hidden: np.ndarray, batch: Mapping[str, np.ndarray]) -> list[float]:
    """Evenly spread numbers of the hidden states (B, L, H) at the tokens that exist."""
    real = hidden[batch["attention_mask"].astype(bool)].reshape(-1)
    step = max(1, -(-real.size // SAMPLED) | 1)
    return [float(value) for value in real[::step]]
