"""The steps of a fine-tuning run: batches, updates, evaluations and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
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
from fastbert.training.divergence import Diverged
from fastbert.training.evaluate import to_device
from fastbert.training.log import LogRow
from fastbert.training.loop import Run
from fastbert.training.optimizer import make_optimizer
from fastbert.training.parallel import Copies
from fastbert.training.record import Record

if TYPE_CHECKING:
    from accelerate import Accelerator


class FinetuningRun(Run):
    """The state that the steps of a fine-tuning run share.

    Attributes:
        best: The best evaluation of the validation part so far.
    """

    options: FinetuneOptions

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
        super().__init__(options, accelerator)
        self.judging, self.parts, self.tokenizer = task, parts, tokenizer
        self.task, self.data, self.source = task.name, data, source.digest
        torch.manual_seed(options.seed)
        self.model: Any = source.build(task, options.backend)
        if options.freeze:
            for part in (self.model.bert.embeddings, self.model.bert.encoder):
                part.requires_grad_(False)
        self.parallel = Copies(accelerator, self.model)
        keeps_best = options.keep_epoch == "best" and "validation" in parts
        self.best = BestEvaluation(self.model, keeps_weights=keeps_best)
        self.features = parts["train"].features
        self.steps_per_epoch = math.ceil(len(self.features) / options.batch_size)
        self.total = options.epochs * self.steps_per_epoch
        self.own_optimizer, self.schedule = make_optimizer(
            self.model,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            warmup=options.warmup,
            total_steps=self.total,
        )
        if accelerator.num_processes > 1:
            # All processes have the same weights, but each process draws its own dropout masks.
            torch.manual_seed(options.seed + accelerator.process_index)
        # These sums restart at 0 after each row of the log. The sum of the losses is on the device.
        self.losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self.counted = self.tokens = 0

    def train_mode(self) -> None:
        """Switch dropout on, except in a frozen encoder."""
        self.model.train()
        if self.options.freeze:
            self.model.bert.eval()

    def epoch(self) -> tuple[int, int]:
        """Return the number of the current epoch, and of the batch in this epoch, both from 0."""
        return divmod(self.step, self.steps_per_epoch)

    def batches(self) -> Iterator[list[Feature]]:
        """Yield the sequences of each batch of all processes together, from the current step on."""
        size = self.options.batch_size
        while self.step < self.total:
            epoch, batch = self.epoch()
            order = np.random.default_rng((self.options.seed, epoch)).permutation(
                len(self.features)
            )
            for start in range(batch * size, len(order), size):
                yield [self.features[i] for i in order[start : start + size]]

    def update(self, features: list[Feature]) -> Tensor:
        """Make one update, and return the gradient's norm before clipping.

        Each process takes its share of the sequences. The loss of a process is weighted by its
        share of the labels, so that the gradient is the same as in one process with all sequences.
        """
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        # A process without a share computes one sequence with the weight 0, because all processes
        # must take part in the exchange of gradients.
        own = features[index::processes] or features[:1]
        batch = to_device(self.judging.collate(own), self.device)
        bf16 = self.options.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss = self.judging.output(self.parallel.model, batch).loss
        loss = self.share(features, loss)
        loss.backward()
        mean = self.accelerator.reduce(loss.detach(), "mean")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        # A loss that is not finite may have a finite gradient, so both numbers are watched.
        watched = torch.where(mean.isfinite(), norm, mean.to(norm.dtype))
        self.divergence.watch(watched, self.own_optimizer, self.epoch())
        self.own_optimizer.step()
        self.own_optimizer.zero_grad(set_to_none=True)
        self.losses += mean
        self.counted += 1
        self.tokens += sum(len(feature["input_ids"]) for feature in features)
        return norm

    def share(self, features: list[Feature], loss: Tensor) -> Tensor:
        """Weigh the loss of this process by its share of the labels.

        Args:
            features: The sequences of all processes.
            loss: The mean loss over the labels of the sequences of this process.

        Returns:
            The weighted loss. Its mean over all processes is the loss of all sequences.
        """
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        if processes == 1:
            return loss
        labels = self.judging.labels_in(features[index::processes])
        # DDP divides the sum of the gradients by the number of processes. Without any label, the
        # share is 0.
        return loss * (labels * processes / (self.judging.labels_in(features) or 1))

    def refuse_divergence(self) -> None:
        """Raise RuntimeError if a loss or gradient was not finite and its update was left out."""
        place = self.divergence.place()
        if place is not None:
            epoch, batch = place
            raise Diverged(
                f"the loss or the gradient of batch {batch} of epoch {epoch} is not finite at step "
                f"{epoch * self.steps_per_epoch + batch + 1}: training diverged, and the weights "
                f"were not updated; lower learning_rate ({self.options.learning_rate}) or raise "
                f"warmup ({self.options.warmup}). The examples of the batch: "
                f"{self._examples(epoch, batch)}"
            )

    def _examples(self, epoch: int, batch: int) -> str:
        """Return the files and lines of the examples of a batch."""
        size = self.options.batch_size
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.features))
        chosen = [self.features[i]["example"] for i in order[batch * size : (batch + 1) * size]]
        places = dict.fromkeys(self.parts["train"].examples[i].place for i in chosen)
        return "; ".join(places)

    def row(self, norm: float) -> LogRow:
        """Return the row of the log for this step, and reset the sums since the last row."""
        row = {
            "event": "train",
            "step": self.step + 1,
            "epoch": self.epoch()[0],
            "loss": float(self.losses) / self.counted,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": norm,
            "tokens_per_second": self.tokens / self.lap(),
        }
        self.losses.zero_()
        self.counted = self.tokens = 0
        return row

    def judge(self, name: str) -> Judgement:
        """Return the figures of the model on the part called `name`, with the loss."""
        part = self.parts[name]
        bf16 = self.options.precision == "bf16"
        outputs = evaluate.compute(
            self.model, self.judging, part.features, bf16=bf16, accelerator=self.accelerator
        )
        judgement = self.judging.judge(part.examples, part.features, outputs.rows)
        return Judgement({"loss": outputs.loss, **judgement.figures}, judgement.confusion)

    def ends_epoch(self) -> bool:
        """Return whether the current step ends an epoch."""
        return self.is_due(self.steps_per_epoch)

    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""
        every = self.options.eval_every or self.steps_per_epoch
        return self.is_due(every) and "validation" in self.parts

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
        return self.ends_epoch() or self.stops_early() or super().saves()

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
        return {
            "batches": self.counted,
            "tokens": self.tokens,
            "data": self.data,
            "source": self.source,
            "processes": self.accelerator.num_processes,
            "best": self.best.content(),
        }

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint: weights, moments, random states and best weights."""
        random = {**self.gathered(self.random_state()), "losses": self.losses.cpu()}
        return {
            "weights": checkpoints.weights_of(self.model),
            "optimizer": checkpoints.moments_of(self.own_optimizer),
            "random": random,
            **self.best.tensors(),
        }

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the state of the run from a checkpoint."""
        super().restore(checkpoint)
        self.best.restore(checkpoint)
        content = checkpoint.content
        with checkpoint.reading(checkpoints.STATE):
            self.counted, self.tokens = content["batches"], content["tokens"]
        with checkpoint.fitting("random") as random:
            losses = random.pop("losses")
            checkpoints.check_like("losses", losses, self.losses)
            self.losses.copy_(losses)
            if "processes" not in content:
                # Older checkpoints of one process have no dimension for the processes.
                random = {name: tensor[None] for name, tensor in random.items()}
            if content.get("processes", 1) == self.accelerator.num_processes:
                self.restore_random(random)
            else:
                self.replace_random(self.options.seed)
