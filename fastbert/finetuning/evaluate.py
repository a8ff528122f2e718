"""The outputs and the loss of a model on a part of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.finetuning.task import Feature, Task
from fastbert.inference.text_batches import length_batches
from fastbert.modules import BertPreTrainedModel
from fastbert.training.evaluate import to_device

TOKENS_PER_BATCH = 8192


class Outputs(NamedTuple):
    """The outputs of a model.

    Attributes:
        rows: The output for each sequence, in fp32 on the CPU.
        loss: The mean loss over all labels; None without labels.
    """

    rows: list[Tensor]
    loss: float | None


@torch.no_grad()
def compute(
    model: BertPreTrainedModel, task: Task, features: Sequence[Feature], *, bf16: bool = False
) -> Outputs:
    """Compute the output of a model for each sequence, in batches of similar lengths.

    The model is in evaluation mode during the call and returns to its earlier mode.

    Args:
        model: The model.
        task: The task.
        features: The sequences.
        bf16: Whether autocast to bf16 is used.

    Returns:
        The outputs in the order of the sequences.
    """
    device = next(model.parameters()).device
    rows: list[Tensor] = [torch.empty(0)] * len(features)
    loss, labels = 0.0, 0
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        lengths = [len(feature["input_ids"]) for feature in features]
        for indices in length_batches(lengths, TOKENS_PER_BATCH):
            batch = to_device(task.collate([features[i] for i in indices]), device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = model(**batch)
            if output.loss is not None and (count := task.labels_in(batch)):
                loss += float(output.loss) * count
                labels += count
            found = task.rows(output, [lengths[i] for i in indices])
            for index, row in zip(indices, found, strict=True):
                rows[index] = row.float().cpu()
    finally:
        for module, training in modes.items():
            module.training = training
    return Outputs(rows, loss / labels if labels else None)
