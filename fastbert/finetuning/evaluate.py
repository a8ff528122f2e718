"""The outputs and the loss of a model on a part of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastbert.finetuning.task import Feature, Task
from fastbert.inference.text_batches import length_batches
from fastbert.modules import BertPreTrainedModel
from fastbert.training.evaluate import to_device
from fastbert.training.parallel import in_turns

if TYPE_CHECKING:
    from accelerate import Accelerator

TOKENS_PER_BATCH = 8192


class Outputs(NamedTuple):
    """The outputs of a model.

    Attributes:
        rows: The output for each sequence, in fp32 on the CPU.
        loss: The mean loss over all labels; None without labels.
    """

    rows: list[Tensor]
    loss: float | None


class _Computed(NamedTuple):
    """The results of one batch.

    Attributes:
        rows: The index of each sequence, and its output.
        loss: The sum of the losses of the labels, each times its weight.
        labels: The sum of the weights of the labels; their number if the task has no weights.
    """

    rows: list[tuple[int, Tensor]]
    loss: float
    labels: float


def compute(
    model: BertPreTrainedModel,
    task: Task,
    features: Sequence[Feature],
    *,
    bf16: bool = False,
    accelerator: Accelerator | None = None,
) -> Outputs:
    """Compute the output of a model for each sequence, in batches of similar lengths.

    The model is in evaluation mode during the call and returns to its earlier mode.

    Args:
        model: A model of the class ``task.kind``.
        task: The task, which builds the batches and divides their outputs.
        features: The sequences for which outputs are computed.
        bf16: Whether autocast to bf16 is used.
        accelerator: The processes that share the batches; each of them must call this function.
            None means that this process computes all batches.

    Returns:
        The outputs in the order of the sequences, in every process. The outputs are bitwise equal
        for any number of processes.
    """
    batches = list(length_batches([len(f["input_ids"]) for f in features], TOKENS_PER_BATCH))
    computed = in_turns(
        batches, lambda own: _compute(model, task, features, own, bf16), accelerator
    )
    rows: list[Tensor] = [torch.empty(0)] * len(features)
    for batch in computed:
        for index, row in batch.rows:
            rows[index] = row
    labels = sum(batch.labels for batch in computed)
    loss = sum(batch.loss for batch in computed)
    return Outputs(rows, loss / labels if labels else None)


@torch.no_grad()
def _compute(
    model: BertPreTrainedModel,
    task: Task,
    features: Sequence[Feature],
    batches: Sequence[Sequence[int]],
    bf16: bool,
) -> list[_Computed]:
    device = next(model.parameters()).device
    computed = []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for indices in batches:
            chosen = [features[i] for i in indices]
            batch = to_device(task.collate(chosen), device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = task.output(model, batch)
            loss, labels = 0.0, 0.0
            if output.loss is not None and (labels := task.labels_in(chosen)):
                loss = float(output.loss) * labels
            outputs = task.rows(output, [len(feature["input_ids"]) for feature in chosen])
            rows = [(i, row.float().cpu()) for i, row in zip(indices, outputs, strict=True)]
            computed.append(_Computed(rows, loss, labels))
    finally:
        for module, training in modes.items():
            module.training = training
    return computed
