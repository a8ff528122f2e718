"""The inputs of every implementation: random ids, padded to the longest, made without torch.

Implementations that do not need torch must not load it, because their memory is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Successive calls take this many batches in turn, so that no call repeats the ids of the last call.
ROTATED = 4
# At most this many elements of a result are compared between implementations.
SAMPLED = 2048

Batch = dict[str, np.ndarray]


def batches(vocabulary: int, lengths: Sequence[int]) -> list[Batch]:
    """Return ``ROTATED`` batches of int64 input_ids and attention_mask (B, L); padding has id 0."""
    longest = max(lengths)
    mask = np.arange(longest) < np.asarray(lengths)[:, None]
    made = []
    for seed in range(ROTATED):
        drawn = np.random.default_rng(seed).integers(1, vocabulary, mask.shape)
        made.append({"input_ids": drawn * mask, "attention_mask": mask.astype(np.int64)})
    return made


def sample(hidden: np.ndarray, batch: Mapping[str, np.ndarray]) -> list[float]:
    """Return evenly spaced elements of the hidden states (B, L, H) at real tokens."""
    real = hidden[batch["attention_mask"].astype(bool)].reshape(-1)
    step = max(1, -(-real.size // SAMPLED) | 1)
    return [float(value) for value in real[::step]]
