"""Batches and outputs of encoder–decoders, of which fastbert accelerates the encoder.

The decoder runs stock code, and the stock model in float64 is the oracle.
"""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import Any

import torch
from stock_families import call, gradients, in_dtype
from stock_families import inputs as sources
from torch import Tensor

import fastbert
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import each

PARTS = (
    *("loss", "logits", "encoder_hidden_states", "encoder_attentions"),
    *("decoder_hidden_states", "decoder_attentions", "cross_attentions"),
)


def sides_of(model: Any) -> tuple[Any, Any, Any]:
    """Return the accelerated model, the stock model in float64, and the stock model itself."""
    return fastbert.accelerate(copy.deepcopy(model)), in_dtype(model, torch.float64), model


def inputs(padding: str, rows: int = 3, family: str = "marian") -> dict[str, Tensor]:
    """Return a batch of sources, and of targets of 9 tokens with padding on the right."""
    generator = torch.Generator().manual_seed(6)
    targets = torch.randint(2, 97, (rows, 10), generator=generator)
    lengths = torch.randint(1, 10, (rows, 1), generator=generator)
    exists = torch.arange(9) < lengths
    return sources(padding, family, rows) | {
        "decoder_input_ids": targets[:, :-1].where(exists, 0),
        "decoder_attention_mask": exists.long(),
        "labels": targets[:, 1:].where(exists, -100),
    }


def parts_of(side: Any, batch: dict[str, Tensor], everything: bool = True) -> dict[str, Tensor]:
    """Return the outputs of a model, without the states and queries at padding of the sources."""
    options = {"output_hidden_states": everything, "output_attentions": everything}
    out = call(side, batch, **options)
    real = batch["attention_mask"].bool()
    parts = {}
    for name in PARTS:
        value = out.get(name)
        if isinstance(value, tuple):
            value = torch.stack(value)
        if name == "encoder_attentions" and value is not None:
            value = value.transpose(2, 3)
        if value is not None:
            parts[name] = value[:, real] if name.startswith("encoder") else value
    return parts


def step(side: Any, batch: dict[str, Tensor], everything: bool) -> tuple[Any, Any]:
    """Return the outputs, and the gradients of the loss or of a sum of all outputs."""
    side.zero_grad()
    parts = parts_of(side, batch, everything)
    objective = parts["loss"]
    if everything:
        torch.manual_seed(2)
        terms = [(part * torch.randn_like(part.float())).flatten().sum() for part in parts.values()]
        objective = torch.stack(terms).sum()
    objective.backward()
    return {name: part.detach() for name, part in parts.items()}, gradients(side)


def assert_all_close(outs: list[Any], dtype: torch.dtype = torch.float32) -> None:
    """Compare all outputs of models in `dtype`.

    Stock code computes the loss from the logits. In bf16, this single number depends on how few
    logits happen to be rounded, so that only the logits are compared.
    """
    assert outs[0].keys() == outs[1].keys()
    for name in outs[0]:
        if name != "loss" or dtype == torch.float32:
            assert_close(name, *each(itemgetter(name), *outs))
