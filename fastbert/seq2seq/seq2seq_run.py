"""The steps of a seq2seq run: its model and its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastbert.modules.transformer import GenerationSettings, Transformer
from fastbert.seq2seq.evaluate import batch_of, evaluate
from fastbert.seq2seq.options import Seq2SeqOptions
from fastbert.seq2seq.preparation import Feature
from fastbert.seq2seq.tokenizer import PieceTokenizer
from fastbert.training.epoch_run import EpochRun
from fastbert.training.record import Record

if TYPE_CHECKING:
    from accelerate import Accelerator

# The name of the kind of run, which checkpoints store.
TASK = "seq2seq"


class Judgement(NamedTuple):
    """The figures of a model on a part of the data.

    Attributes:
        figures: The ``loss``, and the fraction ``exact_match`` of the sources whose target is
            written exactly.
        outputs: The text that greedy search gives for each source.
    """

    figures: dict[str, float]
    outputs: list[str]


class Seq2SeqRun(EpochRun):
    """The state that the steps of a seq2seq run share.

    Attributes:
        judgement: The last evaluation of the held-out pairs; None before the first evaluation.
    """

    options: Seq2SeqOptions
    parts: Mapping[str, Sequence[Feature]]
    tokenizer: PieceTokenizer
    task = TASK

    def __init__(
        self,
        options: Seq2SeqOptions,
        parts: Mapping[str, Sequence[Feature]],
        tokenizer: PieceTokenizer,
        data: str,
        accelerator: Accelerator,
    ) -> None:
        """Build the model and the optimizer.

        Args:
            options: Options of the run.
            parts: The pairs of the parts ``"train"`` and ``"validation"``.
            tokenizer: The tokenizer.
            data: SHA-256 of the pairs.
            accelerator: The processes of the run.
        """
        config = options.model_config(tokenizer.size, padding=tokenizer.padding, end=tokenizer.end)
        torch.manual_seed(options.seed)
        model = Transformer(config, backend=options.backend)
        # A target begins with the first input of the decoder and ends with one more token.
        model.generation = GenerationSettings.of(config).replace(max_length=options.max_length + 2)
        super().__init__(
            options,
            accelerator,
            model,
            epochs=options.epochs or 0,
            features=parts["train"],
            parts=parts,
            data=data,
        )
        self.tokenizer = tokenizer
        self.judgement: Judgement | None = None

    def loss(self, features: Sequence[Feature]) -> Tensor:
        """Return the mean loss over the tokens of the targets, with label smoothing."""
        loss: Tensor = self.parallel.model(**batch_of(features, self.model, self.device)).loss
        return loss

    def labels_in(self, features: Sequence[Feature]) -> float:
        """Return the number of tokens of the targets."""
        return sum(len(feature.target) for feature in features)

    def tokens_in(self, features: Sequence[Feature]) -> int:
        """Return the number of tokens of the sources and targets."""
        return sum(len(feature.source) + len(feature.target) for feature in features)

    def place(self, feature: Feature) -> str:
        """Return the file and line of a pair."""
        return feature.pair.place

    def judge(self, name: str) -> Judgement:
        """Evaluate the model on the part called `name`."""
        features = self.parts[name]
        loss, rows = evaluate(
            self.model,
            features,
            self.device,
            bf16=self.options.precision == "bf16",
            accelerator=self.accelerator,
        )
        outputs = [self.tokenizer.decode(row) for row in rows]
        targets = [feature.pair.target for feature in features]
        exact = sum(a == b for a, b in zip(outputs, targets, strict=True)) / len(targets)
        return Judgement({"loss": loss, "exact_match": exact}, outputs)

    def evaluate(self, record: Record) -> None:
        """Evaluate the model on the held-out pairs, and record the figures."""
        self.judgement = self.judge("validation")
        figures, step = self.judgement.figures, self.step + 1
        epoch = self.epoch()[0] + 1
        record.write({"event": "evaluation", "step": step, "part": "validation", **figures})
        when = f"after epoch {epoch}" if self.ends_epoch() else f"in epoch {epoch}"
        record.progress.note(f"step {step}, {when}: {describe(figures)}")


def describe(figures: Mapping[str, Any]) -> str:
    """Format the figures of the held-out pairs in one line."""
    return f"held-out loss {figures['loss']:.3f}, exact match {figures['exact_match']:.2%}"
