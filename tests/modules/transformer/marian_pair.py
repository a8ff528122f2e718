"""A small random Marian of transformers, fastbert's model with its weights, and their results."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fastbert.io import marian
from fastbert.modules.transformer import Transformer
from fastbert.testing.compare import MAX_FACTOR, compare_all
from fastbert.testing.yardstick import Yardstick

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "activation_function": "relu",
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "scale_embedding": True,
    "pad_token_id": 100,
    "decoder_start_token_id": 100,
    "eos_token_id": 0,
}
PAD = SIZES["pad_token_id"]
SOURCE, TARGET = 19, 13
STATES = ("encoder_hidden_states", "decoder_hidden_states")
WEIGHTS = ("encoder_attentions", "decoder_attentions", "cross_attentions")
REASON = "roundings early in the backward pass are shared by every gradient after them"


def stock(seed: int = 0, scale: float = 0.15, **overrides: Any) -> Any:
    """Return a model of transformers with random, nonzero parameters and biases."""
    torch.manual_seed(seed)
    config = transformers.MarianConfig(
        **{**SIZES, **overrides}, attn_implementation="eager", use_cache=True
    )
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                center = parameter if parameter.ndim == 1 else torch.zeros_like(parameter)
                parameter.copy_(center + scale * torch.randn_like(parameter))
        model.final_logits_bias.normal_(0.0, scale)
    return model


def ours(model: Any, folder: Path, **options: Any) -> Transformer:
    """Save a model of transformers, and load it with fastbert."""
    model.save_pretrained(folder)
    return Transformer.from_pretrained(folder, **options)


def in_float64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def batch(rows: int, padding: str, seed: int) -> dict[str, Tensor]:
    """Return random sources and labels; the padding is ``"none"``, ``"right"`` or ``"left"``."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, PAD, (rows, length), generator=generator)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        lengths[0] = length if rows > 1 else length // 2
        exists = torch.arange(length) < (lengths if padding != "none" else length)
        exists = exists.expand(rows, length)
        return ids, exists.flip(1) if padding == "left" else exists

    ids, exists = drawn(SOURCE)
    labels, labelled = drawn(TARGET)
    # A position between labels may have no label.
    labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)
    labels[:, -1 if padding != "right" else 0] = 5
    inputs = {
        "input_ids": ids.masked_fill(~exists, PAD),
        "attention_mask": exists.long(),
        "labels": labels.masked_fill(~labelled, -100),
    }
    if padding == "left":
        inputs["decoder_attention_mask"] = labelled.long()
    return inputs


def tokens(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the masks of the tokens of the sources and of the targets, bool."""
    target = inputs.get("decoder_attention_mask")
    if target is None:
        target = (inputs["labels"] != -100).flip(1).cumsum(1).flip(1) > 0
    return inputs["attention_mask"].bool(), target.bool()


def results(model: Any, draws: list[dict[str, Tensor]], smoothing: float = 0.0) -> dict:
    """Return the outputs at tokens and the gradients, joined over draws and over layers."""
    gathered: dict[str, list[Tensor]] = {}

    def keep(name: str, tensor: Tensor) -> None:
        gathered.setdefault(name, []).append(tensor.detach().flatten())

    holder = copy.deepcopy(model)
    for draw in draws:
        source, target = tokens(draw)
        model.zero_grad()
        out = model(**draw, output_hidden_states=True, output_attentions=True)
        loss = out.loss if isinstance(model, Transformer) else _loss(out, draw, smoothing)
        keep("loss", loss)
        keep("logits", out.logits[target])
        for name in STATES:
            for number, state in enumerate(out[name]):
                keep(f"{name}.{number}", state[source if "encoder" in name else target])
        for name in WEIGHTS:
            for weights in out[name]:
                keep(name, weights.transpose(1, 2)[source if "encoder" in name else target])
        loss.backward()
        for name, gradient in gradients(model, holder).items():
            keep("d" + re.sub(r"layers\.\d+", "layers", name), gradient)
    return {name: torch.cat(parts) for name, parts in gathered.items()}


def _loss(out: Any, draw: dict[str, Tensor], smoothing: float) -> Tensor:
    logits = out.logits.flatten(0, 1)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return F.cross_entropy(logits, draw["labels"].flatten(), label_smoothing=smoothing)


def gradients(model: Any, holder: Any) -> dict[str, Tensor]:
    """Return the gradients by transformers' names.

    The gradients of a model of fastbert are copied to `holder`, a copy of the model, and renamed
    like weights.
    """
    if not isinstance(model, Transformer):
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter, held in zip(model.parameters(), holder.parameters(), strict=True):
        held.data = torch.zeros_like(held) if parameter.grad is None else parameter.grad
    state = {name: t for name, t in holder.state_dict().items() if name not in holder.tied()}
    named = marian.to_marian(state, model.config)
    return {name: t for name, t in named.items() if name != "final_logits_bias"}


def assert_agree(
    actual: dict[str, Tensor], oracle: dict[str, Tensor], yardstick: Yardstick
) -> None:
    """Judge outputs and gradients by the tolerance rule."""
    parts: tuple[tuple[Callable[[str], bool], float], ...] = (
        (lambda name: not _is_gradient(name), MAX_FACTOR),
        (_is_gradient, 3.0),
    )
    for wanted, factor in parts:

        def chosen(side: dict[str, Tensor], wanted=wanted) -> dict[str, Tensor]:
            return {name: t for name, t in side.items() if wanted(name)}

        comparisons = compare_all(
            chosen(actual),
            chosen(oracle),
            yardstick.map(chosen),
            factor=factor,
            reason=REASON,
            tested=actual["logits"].dtype,
        )
        failed = [str(each) for each in comparisons if not each.passed]
        assert not failed, "\n".join(failed)
    assert actual.keys() == oracle.keys()


def joined(sides: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the results of several models by name."""
    return {name: torch.cat([side[name] for side in sides]) for name in sides[0]}


def _is_gradient(name: str) -> bool:
    return name.startswith(("dmodel", "dlm_head"))
