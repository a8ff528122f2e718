"""The probabilities of the dropouts of an encoder, and their seeds, all drawn by one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.ops.arguments import dropout_seeds


class Probabilities(NamedTuple):
    """Probabilities of the dropouts of an encoder.

    Attributes:
        embeddings: Probability for the embeddings.
        attention: Probability for the attention weights.
        attention_output: Probability after the output projection of attention.
        output: Probability after the feed-forward.
        inner: Probability between the two projections of the feed-forward.
    """

    embeddings: float
    attention: float
    attention_output: float
    output: float
    inner: float

    @classmethod
    def of(cls, config: BertConfig) -> Probabilities:
        """Return the dropout probabilities that a configuration sets."""
        choices, hidden = config.architecture, config.hidden_dropout_prob

        def own(probability: float | None) -> float:
            return hidden if probability is None else probability

        return cls(
            own(choices.embedding_dropout),
            config.attention_probs_dropout_prob,
            own(choices.attention_output_dropout),
            own(choices.output_dropout),
            choices.inner_dropout,
        )


class LayerSeeds(NamedTuple):
    """Seeds of the dropouts of a layer, int64 of shape ``(1,)``; see `Probabilities`.

    If a seed is None, the operation draws its own seed.
    """

    attention: Tensor | None = None
    attention_output: Tensor | None = None
    output: Tensor | None = None
    inner: Tensor | None = None


NO_SEEDS = LayerSeeds()


class Seeds(NamedTuple):
    """Seeds of the dropout of the embeddings and of the dropouts of each layer."""

    embeddings: Tensor | None
    layers: tuple[LayerSeeds, ...]


def draw_seeds(config: BertConfig, training: bool, device: torch.device) -> Seeds:
    """Draw the seeds of one call of the encoder from torch's random generator for `device`.

    Args:
        config: Configuration of the model.
        training: Whether the model is in training mode. Without training, no seed is drawn.
        device: Device of the seeds, which is that of the rows.

    Returns:
        The seeds of the embeddings and of each layer, in the order of the layers. All seeds are
        None if no dropout is active. A seed of an inner dropout is None if the probability of the
        inner dropout is 0.
    """
    probabilities = Probabilities.of(config)
    layers = len(config.architecture.order(config.num_hidden_layers))
    if not (training and any(probabilities)):
        return Seeds(None, (NO_SEEDS,) * layers)
    each = 4 if probabilities.inner else 3
    first, *others = dropout_seeds(1 + each * layers, device)
    return Seeds(first, tuple(LayerSeeds(*others[each * i :][:each]) for i in range(layers)))
