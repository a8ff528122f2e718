"""The steps of a fine-tuning run: its model, its evaluations and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning import evaluate
from fastbert.finetuning.best import BestEvaluation, Evaluation
from fastbert.finetuning.model import Source
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.preparation import Part
from fastbert.finetuning.task import Feature, Judgement, Task
from fastbert.training import checkpoints
from fastbert.training.epoch_run import EpochRun
from fastbert.training.evaluate import to_device
from fastbert.training.record import Record

if TYPE_CHECKING:
    from accelerate import Accelerator


class FinetuningRun(EpochRun):
    """The state that the steps of a fine-tuning run share.

    Attributes:
        best: The best evaluation of the validation part so far.
    """

    options: FinetuneOptions
    parts: Mapping[str, Part]

    def __init__(
        self,
        options: FinetuneOptions,
        task: Task,
        parts: dict[str, Part],
        source: Source,
        tokenizer: ModelTokenizer,
        data: str,
        accelerator: Accelerator,
    ) -> None:
        """Build the model and the optimizer.

        Args:
            options: Options of the run.
            task: The task on which the model is trained and evaluated.
            parts: The parts of the data, by name.
            source: The pre-trained model.
            tokenizer: The tokenizer of the model.
            data: SHA-256 of the examples.
            accelerator: The processes of the run.
        """
        torch.manual_seed(options.seed)
        model: Any = source.build(task, options.backend)
        if options.freeze:
            for part in (model.bert.embeddings, model.bert.encoder):
                part.requires_grad_(False)
        super().__init__(
            options,
            accelerator,
            model,
            epochs=options.epochs,
            features=parts["train"].features,
            parts=parts,
            data=data,
        )
        self.judging, self.tokenizer = task, tokenizer
        self.task, self.source = task.name, source.digest
        keeps_best = options.keep_epoch == "best" and "validation" in parts
        self.best = BestEvaluation(self.model, keeps_weights=keeps_best)

    def train_mode(self) -> None:
        """Switch dropout on, except in a frozen encoder."""
        self.model.train()
        if self.options.freeze:
            self.model.bert.eval()

    def loss(self, features: Sequence[Feature]) -> Tensor:
        """Return the mean loss over the labels of some sequences."""
        batch = to_device(self.judging.collate(features), self.device)
        loss: Tensor = self.judging.output(self.parallel.model, batch).loss
        return loss

    def labels_in(self, features: Sequence[Feature]) -> float:
        """Return the number of labels in the mean loss, or the sum of their weights."""
        return self.judging.labels_in(features)

    def tokens_in(self, features: Sequence[Feature]) -> int:
        """Return the number of tokens of some sequences."""
        return sum(len(feature["input_ids"]) for feature in features)

    def place(self, feature: Feature) -> str:
        """Return the file and line of the example of a sequence."""
        place: str = self.parts["train"].examples[feature["example"]].place
        return place

    def judge(self, name: str) -> Judgement:
        """Return the figures of the model on the part called `name`, with the loss."""
        part = self.parts[name]
        bf16 = self.options.precision == "bf16"
        outputs = evaluate.compute(
            self.model, self.judging, part.features, bf16=bf16, accelerator=self.accelerator
        )
        judgement = self.judging.judge(part.examples, part.features, outputs.rows)
        return Judgement({"loss": outputs.loss, **judgement.figures}, judgement.confusion)

    def evaluate(self, record: Record) -> None:
        """Evaluate the model on the validation part, and record the figures."""
        figures = self.judge("validation").figures
        numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
        step, epoch, name = self.step + 1, self.epoch()[0] + 1, self.judging.main[0]
        better = self.best.offer(Evaluation(name, figures[name], epoch, step))
        row = {"event": "evaluation", "step": step, "part": "validation", **numbers}
        record.write({**row, "best": better})
        when = f"after epoch {epoch}" if self.ends_epoch() else f"in epoch {epoch}"
        record.progress.note(
            f"step {step}, {when}: validation loss {figures['loss']:.3f}, "
            f"{self.judging.describe(figures)}{'; the best so far' if better else ''}"
        )
        if self.stops_early():
            record.write({"event": "stop", "step": step, "patience": self.options.patience})
            record.progress.note(
                f"stopped early {when}: {self.best.misses} evaluations without a better "
                f"{self.judging.main[1]}"
            )

    def stops_early(self) -> bool:
        """Return whether the run stops because the last `patience` evaluations were not better."""
        patience = self.options.patience
        return patience is not None and self.best.misses >= patience

    def has_ended(self) -> bool:
        """Return whether no step is left to make."""
        return super().has_ended() or self.stops_early()

    def saves(self) -> bool:
        """Return whether a checkpoint follows the current step."""
        return self.stops_early() or super().saves()

    def export(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Any:
        """Return the model that the user receives: that of the best evaluation or of this step."""
        return self.best.model()

    def kept(self) -> dict[str, int]:
        """Return the step and the epoch, from 1, of the model that a finished run writes."""
        best = self.best.evaluation
        if self.best.weights is not None and best is not None:
            return {"epoch": best.epoch, "step": best.step}
        return {"epoch": (self.step - 1) // self.steps_per_epoch + 1, "step": self.step}

    def content(self) -> dict[str, Any]:
        """Return the data for the JSON of a checkpoint: sums, hashes and the best evaluation."""
        return {**super().content(), "source": self.source, "best": self.best.content()}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint: weights, moments, random states and best weights."""
        return {**super().tensors(), **self.best.tensors()}

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the state of the run from a checkpoint."""
        super().restore(checkpoint)
        self.best.restore(checkpoint)
