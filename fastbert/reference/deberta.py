"""DeBERTa in plain PyTorch: the encoder, the mask decoder and replaced token detection.

He et al. 2021 and 2023. transformers has neither the mask decoder nor replaced token detection, so
this file is their specification. Batches are padded, and nothing is fused. The functions take the
parameters as a dictionary with the names of fastbert's state dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.reference.attention import attention
from fastbert.reference.relative_attention import relative_terms

Parameters = Mapping[str, Tensor]


class Deberta(NamedTuple):
    """The settings of an encoder.

    Attributes:
        heads: Number of attention heads.
        eps: Term that is added to the variance in layer norms.
        span: Half of the number of rows of the table of positions.
        farthest: Distance from which on all distances share a row; None means one row for each
            distance.
        keys: Whether queries are multiplied by keys of positions.
        queries: Whether keys are multiplied by queries of positions.
    """

    heads: int
    eps: float
    span: int
    farthest: int | None = None
    keys: bool = True
    queries: bool = True


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _norm(parameters: Parameters, name: str, x: Tensor, settings: Deberta) -> Tensor:
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], weight, bias, settings.eps)


def deberta_rows(length: int, settings: Deberta) -> Tensor:
    """Return the row of each distance from ``1 - length`` to ``length - 1`` in the table."""
    rows = []
    middle = settings.span // 2
    for distance in range(1 - length, length):
        row = distance
        if settings.farthest is not None and abs(distance) > middle:
            growth = math.log((settings.farthest - 1) / middle)
            share = math.log(abs(distance) / middle) / growth
            # The published code computes in fp32, where an exact power is not rounded up.
            bucket = math.ceil(round(share * (middle - 1), 5)) + middle
            row = bucket if distance > 0 else -bucket
        rows.append(min(max(row + settings.span, 0), 2 * settings.span - 1))
    return torch.tensor(rows, dtype=torch.int32)


def deberta_layer(
    parameters: Parameters,
    name: str,
    hidden: Tensor,
    queries: Tensor,
    table: Tensor,
    mask: Tensor,
    settings: Deberta,
) -> Tensor:
    """Run a layer with the keys and values of `hidden`, and the queries and residuals of `queries`.

    Args:
        parameters: The parameters of the encoder.
        name: Prefix of the names of the layer's parameters, such as ``"encoder.layer.0."``.
        hidden: Hidden states of shape ``(B, L, H)``.
        queries: Hidden states of shape ``(B, L, H)``.
        table: Embedded positions of shape ``(P, H)``.
        mask: Mask of the tokens, bool of shape ``(B, L)``.
        settings: The settings.

    Returns:
        Hidden states of shape ``(B, L, H)``.
    """
    own = f"{name}attention.self."

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (settings.heads, -1))

    q = heads(_linear(parameters, f"{own}query", queries)).transpose(1, 2)
    k = heads(_linear(parameters, f"{own}key", hidden)).transpose(1, 2)
    v = heads(_linear(parameters, f"{own}value", hidden)).transpose(1, 2)
    shared = f"{own}positions.key.weight" not in parameters
    shared = shared and f"{own}positions.query.weight" not in parameters
    of_keys, of_queries = ("key", "query") if shared else ("positions.key", "positions.query")
    tables = (
        heads(_linear(parameters, f"{own}{of_keys}", table)) if settings.keys else None,
        heads(_linear(parameters, f"{own}{of_queries}", table)) if settings.queries else None,
    )
    scale = 1.0 / math.sqrt(q.shape[-1] * (1 + settings.keys + settings.queries))
    index = deberta_rows(hidden.shape[1], settings)
    bias = relative_terms(q, k, index, *tables) * scale
    attended = attention(q, k, v, mask=mask, bias=bias, scale=scale)
    assert isinstance(attended, Tensor)
    out = _linear(parameters, f"{name}attention.output.dense", attended.transpose(1, 2).flatten(2))
    out = _norm(parameters, f"{name}attention.output.LayerNorm", out + queries, settings)
    inner = F.gelu(_linear(parameters, f"{name}intermediate.dense", out))
    fed = _linear(parameters, f"{name}output.dense", inner)
    return _norm(parameters, f"{name}output.LayerNorm", fed + out, settings)


def _table(parameters: Parameters, settings: Deberta) -> Tensor:
    name = "encoder.relative_positions."
    table = parameters[f"{name}embeddings.weight"]
    if f"{name}LayerNorm.weight" not in parameters:
        return table
    return _norm(parameters, f"{name}LayerNorm", table, settings)


def deberta_states(
    parameters: Parameters, embeds: Tensor, mask: Tensor, settings: Deberta
) -> list[Tensor]:
    """Compute the hidden states before the first layer and after every layer.

    Args:
        parameters: The parameters of the encoder.
        embeds: Word embeddings of shape ``(B, L, H)``.
        mask: Mask of the tokens, bool of shape ``(B, L)``.
        settings: The settings.

    Returns:
        Hidden states, each of shape ``(B, L, H)``.
    """
    table = _table(parameters, settings)
    positions = parameters.get("embeddings.position_embeddings.weight")
    if positions is not None:
        embeds = embeds + positions[: embeds.shape[1]]
    states = [_norm(parameters, "embeddings.LayerNorm", embeds, settings)]
    while f"encoder.layer.{len(states) - 1}.output.dense.weight" in parameters:
        name, last = f"encoder.layer.{len(states) - 1}.", states[-1]
        states.append(deberta_layer(parameters, name, last, last, table, mask, settings))
    return states


def mask_decoder(
    parameters: Parameters,
    positions: Tensor,
    before_last: Tensor,
    layers: int,
    mask: Tensor,
    settings: Deberta,
) -> Tensor:
    """Run the last layer twice, on queries with absolute positions.

    Args:
        parameters: The parameters of the encoder.
        positions: Table of absolute positions, of shape ``(P, H)``.
        before_last: Hidden states before the last layer, of shape ``(B, L, H)``.
        layers: Number of layers of the encoder.
        mask: Mask of the tokens, bool of shape ``(B, L)``.
        settings: The settings.

    Returns:
        Hidden states of shape ``(B, L, H)``.
    """
    table, name = _table(parameters, settings), f"encoder.layer.{layers - 1}."
    queries = before_last + positions[: before_last.shape[1]]
    for _ in range(2):
        queries = deberta_layer(parameters, name, before_last, queries, table, mask, settings)
    return queries


def replaced_token_logits(parameters: Parameters, hidden: Tensor, settings: Deberta) -> Tensor:
    """Compute the logits ``(B, L)`` of replaced tokens from hidden states ``(B, L, H)``."""
    summed = _norm(parameters, "LayerNorm", hidden[:, :1] + hidden, settings)
    inner = F.gelu(_linear(parameters, "dense", summed))
    return _linear(parameters, "classifier", inner).squeeze(-1)
