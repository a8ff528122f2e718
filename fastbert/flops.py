"""The FLOPs of the matrix products of an encoder."""

from __future__ import annotations

from collections.abc import Sequence

from fastbert.config import BertConfig


def flops_of_layers(config: BertConfig, lengths: Sequence[int]) -> float:
    """Return the FLOPs of the matrix products of all layers, in a forward pass without padding.

    A layer has 2 T (4H² + 2HI) + 4 H Σ L² FLOPs for T tokens in all. The sum runs over the
    sequences, and L is the length of a sequence. H is the hidden size, and I the intermediate size.
    The formula ignores the wider first product of a gated feed-forward, and attention windows.

    Args:
        config: The configuration of the model.
        lengths: The number of tokens of each sequence.
    """
    width, inner = config.hidden_size, config.intermediate_size
    linear = 2 * sum(lengths) * (4 * width**2 + 2 * width * inner)
    attention = 4 * width * sum(length**2 for length in lengths)
    return float(config.num_hidden_layers * (linear + attention))
