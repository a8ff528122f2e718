"""The dropout seeds of one call of a model, drawn by one launch instead of one per operation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.ops.arguments import dropout_seeds


class LayerSeeds(NamedTuple):
    """Seeds of the three dropouts of a layer, int64 of shape ``(1,)``.

    None lets an operation draw its own seed.
    """

    attention: Tensor | None = None
    attention_output: Tensor | None = None
    output: Tensor | None = None


NO_SEEDS = LayerSeeds()


class Seeds(NamedTuple):
    """Seeds of the embeddings and of each layer."""

    embeddings: Tensor | None
    layers: tuple[LayerSeeds, ...]


def draw_seeds(config: BertConfig, training: bool, device: torch.device) -> Seeds:
    """Draw the seeds of one call from torch's generator of a device.

    Args:
        config: The configuration.
        training: Whether the model is in training mode. Without training, no seed is drawn.
        device: The device.

    Returns:
        The seeds in the order of the operations. Seeds are None if nothing is dropped.
    """
    dropping = config.hidden_dropout_prob > 0 or config.attention_probs_dropout_prob > 0
    layers = len(config.architecture.order(config.num_hidden_layers))
    if not (training and dropping):
        return Seeds(None, (NO_SEEDS,) * layers)
    first, *others = dropout_seeds(1 + 3 * layers, device)
    return Seeds(first, tuple(LayerSeeds(*others[3 * i : 3 * i + 3]) for i in range(layers)))
