"""The options of a fine-tuning run; they are checked before any file is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastbert.finetuning.best import KEPT
from fastbert.finetuning.task import Task
from fastbert.training.options import check, check_common, check_counts, is_number

# A run may be resumed with other values of these options, which do not change its results. For the
# options with paths of data, a resumed run compares the content of the data instead.
FREE = (
    "output", "data", "validation", "test", "overwrite", "save_every", "save_minutes",
    "keep_checkpoints",
)  # fmt: skip

Folder = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The options that all tasks share.

    Args:
        model: Folder or hub id of a pre-trained model of ``model_type`` ``"bert"``.
        data: File of the training part, or folder with the parts.
        output: Folder that receives ``model/``, ``metrics.json``, ``log.jsonl``, the figures and
            ``checkpoints/``.
        validation: File or folder of the validation part; None takes the part in `data`, or holds
            out a fraction of the training part.
        test: File or folder of the test part; None takes the part in `data`, if there is one.
        held_out: Fraction of the training part that is held out if there is no validation part,
            in [0, 1).
        overwrite: Whether the run starts from its first step and replaces an earlier run in
            `output`. With False, the earlier run is resumed.
        epochs: Number of epochs.
        batch_size: Number of sequences of a batch.
        learning_rate: Peak of the learning rate, which rises linearly and then falls linearly to
            zero.
        warmup: Fraction of the steps in which the learning rate rises, in [0, 1).
        weight_decay: Weight decay of matrices and embedding tables.
        clip_norm: Largest L2 norm of the gradient.
        max_length: Largest number of tokens of a sequence; None is the default of the task.
        freeze: Whether the embeddings and the layers of the encoder are frozen, so that only the
            head is trained, and the pooler if the model has one.
        precision: ``"fp32"``, or ``"bf16"`` for autocast with fp32 weights.
        seed: Seed of the held-out part, the weights of a new head, the batches and dropout.
        backend: The backend that the model asks for: ``"reference"``, ``"triton"``, ``"cuda"`` or
            ``"cpu"``. An operation that this backend does not fully serve chooses its backend
            itself, as do all operations with None.
        keep_epoch: The model that the run writes. ``"best"`` means the model of the best evaluation
            by the main figure of the task; of equal evaluations, the first is the best. ``"last"``
            means the model after the last step, as does ``"best"`` without a validation part.
        patience: Number of evaluations without a better main figure after which the run stops;
            None makes all steps. The learning rate always falls as if all steps were made.
        eval_every: Number of steps between two evaluations of the validation part; None evaluates
            after each epoch.
        log_every: Number of steps between two rows of the log.
        save_every: Number of steps between two checkpoints. A checkpoint is also written after each
            epoch; None writes only these checkpoints.
        save_minutes: Largest number of minutes between two checkpoints; None sets no limit.
        keep_checkpoints: Number of newest checkpoints that stay in the folder ``checkpoints``.

    Raises:
        ValueError: If an option is not allowed. The message names the option, its value and the
            allowed values.
    """

    model: Folder
    data: Folder
    output: Folder
    validation: Folder | None = None
    test: Folder | None = None
    held_out: float = 0.1
    overwrite: bool = False
    epochs: int = 3
    batch_size: int = 16
    learning_rate: float = 3e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    max_length: int | None = None
    freeze: bool = False
    precision: str = "fp32"
    seed: int = 0
    backend: str | None = None
    keep_epoch: str = "best"
    patience: int | None = None
    eval_every: int | None = None
    log_every: int = 10
    save_every: int | None = None
    save_minutes: float | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError if an option is not allowed."""
        check_common(self)
        check_counts(self, "epochs", "batch_size")
        check_counts(self, "max_length", "patience", optional=True)
        value = self.held_out
        check("held_out", value, "a number in [0, 1)", is_number(value) and 0 <= value < 1)
        check("keep_epoch", self.keep_epoch, ", ".join(KEPT), self.keep_epoch in KEPT)

    def task(self) -> Task:
        """Return the task; each subclass implements this method."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """Path of the folder `output`."""
        return Path(self.output)

    def parts(self) -> dict[str, Path | None]:
        """Return the paths of the options `validation` and `test`, which may be None."""
        return {
            name: None if path is None else Path(path)
            for name, path in (("validation", self.validation), ("test", self.test))
        }

    def decisive(self) -> dict[str, Any]:
        """Return the options that change the results of a run, as data for JSON."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in FREE}
        return {**chosen, "model": os.fspath(self.model)}
