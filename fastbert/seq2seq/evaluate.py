"""The targets that a model writes, and their comparison with the expected targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastbert.inference.text_batches import length_batches
from fastbert.modules.heads import IGNORED
from fastbert.modules.transformer import Transformer
from fastbert.seq2seq.preparation import Feature
from fastbert.training.parallel import in_turns

if TYPE_CHECKING:
    from accelerate import Accelerator

TOKENS_PER_BATCH = 8192


class Evaluation(NamedTuple):
    """The results of a model on a part of the data.

    Attributes:
        loss: Mean loss over the tokens of the expected targets.
        outputs: For each source, the ids that greedy search gives, without the first input of the
            decoder.
    """

    loss: float
    outputs: list[list[int]]


class _Batch(NamedTuple):
    """The results of a batch: the sum of the losses, the number of tokens, and the outputs."""

    loss: float
    tokens: int
    outputs: list[list[int]]


def padded(rows: Sequence[Sequence[int]], filling: int, device: torch.device) -> Tensor:
    """Return lists of ids as a tensor, int64 of shape ``(B, L)``, filled at the ends of rows."""
    longest = max(map(len, rows))
    filled = [[*row, *[filling] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device)


def sources_of(
    sources: Sequence[Sequence[int]], model: Transformer, device: torch.device
) -> dict[str, Tensor]:
    """Return the arguments of a model for a batch of sources: the ids and their mask."""
    filling = model.config.pad_token_id
    lengths = torch.tensor([len(source) for source in sources], device=device)
    ids = padded(sources, filling, device)
    mask = torch.arange(ids.shape[1], device=device) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask}


def batch_of(
    features: Sequence[Feature], model: Transformer, device: torch.device
) -> dict[str, Tensor]:
    """Return the arguments of a model for a batch of pairs: the sources and the labels."""
    sources = sources_of([feature.source for feature in features], model, device)
    labels = padded([feature.target for feature in features], IGNORED, device)
    return {**sources, "labels": labels}


def generate(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    device: torch.device,
    num_beams: int | None = None,
) -> list[list[int]]:
    """Return the targets that a model writes for a batch of sources.

    Args:
        model: The model, in evaluation mode.
        sources: The ids of each source.
        device: Device of the model.
        num_beams: Number of beams; None takes the setting of the model, and 1 is greedy search.

    Returns:
        The ids of each target without the first input of the decoder, filled at the end.
    """
    outputs = model.generate(**sources_of(sources, model, device), num_beams=num_beams)
    rows: list[list[int]] = outputs[:, 1:].tolist()
    return rows


def evaluate(
    model: Transformer,
    features: Sequence[Feature],
    device: torch.device,
    *,
    bf16: bool = False,
    accelerator: Accelerator | None = None,
) -> Evaluation:
    """Compute the loss of a model on pairs, and the target that it writes for each source.

    The model is in evaluation mode during the call and returns to its earlier mode.

    Args:
        model: The model.
        features: The pairs.
        device: Device of the model.
        bf16: Whether autocast to bf16 is used.
        accelerator: The processes that share the batches; each of them must call this function.
            None means that this process computes all batches.

    Returns:
        The loss, and the outputs in the order of the pairs, in every process.
    """
    lengths = [max(len(feature.source), len(feature.target)) for feature in features]
    batches = list(length_batches(lengths, TOKENS_PER_BATCH))

    def compute(own: Sequence[Sequence[int]]) -> list[_Batch]:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return [_compute(model, [features[i] for i in batch], device) for batch in own]

    training = model.training
    model.eval()
    try:
        computed = in_turns(batches, compute, accelerator)
    finally:
        model.train(training)
    outputs: list[list[int]] = [[] for _ in features]
    for indices, batch in zip(batches, computed, strict=True):
        for index, row in zip(indices, batch.outputs, strict=True):
            outputs[index] = row
    loss = sum(batch.loss for batch in computed) / sum(batch.tokens for batch in computed)
    return Evaluation(loss, outputs)


@torch.no_grad()
def _compute(model: Transformer, features: Sequence[Feature], device: torch.device) -> _Batch:
    loss = model(**batch_of(features, model, device), output_logits=False).loss
    tokens = sum(len(feature.target) for feature in features)
    outputs = generate(model, [feature.source for feature in features], device, num_beams=1)
    return _Batch(float(loss) * tokens, tokens, outputs)
