"""The steps of a run over epochs of the same sequences, which fine-tuning and seq2seq share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fastbert.training import checkpoints
from fastbert.training.divergence import Diverged
from fastbert.training.log import LogRow
from fastbert.training.loop import Run, RunOptions
from fastbert.training.optimizer import make_optimizer
from fastbert.training.parallel import Copies

if TYPE_CHECKING:
    from accelerate import Accelerator


class EpochOptions(RunOptions, Protocol):
    """The options that a run over epochs reads."""

    @property
    def batch_size(self) -> int:
        """Number of sequences of a batch of all processes together."""

    @property
    def learning_rate(self) -> float:
        """Peak of the learning rate."""

    @property
    def warmup(self) -> float:
        """Fraction of the steps in which the learning rate rises."""

    @property
    def weight_decay(self) -> float:
        """Weight decay of matrices and embedding tables."""

    @property
    def clip_norm(self) -> float:
        """Largest L2 norm of the gradient."""

    @property
    def precision(self) -> str:
        """``"fp32"``, or ``"bf16"`` for autocast."""

    @property
    def seed(self) -> int:
        """Seed of the batches and dropout."""

    @property
    def eval_every(self) -> int | None:
        """Number of steps between two evaluations; None evaluates after each epoch."""


def describe(row: LogRow) -> str:
    """Format a training row of the log in one line."""
    return (
        f"loss {row['loss']:.3f}  lr {row['learning_rate']:.2e}  "
        f"{row['tokens_per_second'] / 1e3:,.1f}k tokens/s"
    )


class EpochRun(Run):
    """A run over epochs, each of which has all sequences in an order of its own.

    Attributes:
        features: The sequences of the training part.
        parts: The parts of the data, by name.
        data: SHA-256 of the examples.
        steps_per_epoch: Number of steps of an epoch.
    """

    options: EpochOptions

    def __init__(
        self,
        options: EpochOptions,
        accelerator: Accelerator,
        model: Any,
        *,
        epochs: int,
        features: Sequence[Any],
        parts: Mapping[str, Any],
        data: str,
    ) -> None:
        """Build the optimizer.

        Args:
            options: Options of the run.
            accelerator: The processes of the run.
            model: The model.
            epochs: Number of epochs.
            features: The sequences of the training part.
            parts: The parts of the data, by name. A run with the part ``"validation"`` is
                evaluated.
            data: SHA-256 of the examples.
        """
        super().__init__(options, accelerator)
        self.model, self.features, self.parts, self.data = model, features, parts, data
        self.parallel = Copies(accelerator, model)
        self.steps_per_epoch = math.ceil(len(features) / options.batch_size)
        self.total = epochs * self.steps_per_epoch
        self.own_optimizer, self.schedule = make_optimizer(
            model,
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

    @abstractmethod
    def loss(self, features: Sequence[Any]) -> Tensor:
        """Return the mean loss over the labels of some sequences, by ``self.parallel.model``."""

    @abstractmethod
    def labels_in(self, features: Sequence[Any]) -> float:
        """Return the number of labels in the mean loss, or the sum of their weights."""

    @abstractmethod
    def tokens_in(self, features: Sequence[Any]) -> int:
        """Return the number of tokens of some sequences."""

    @abstractmethod
    def place(self, feature: Any) -> str:
        """Return the file and line of the example of a sequence."""

    def epoch(self) -> tuple[int, int]:
        """Return the number of the current epoch, and of the batch in this epoch, both from 0."""
        return divmod(self.step, self.steps_per_epoch)

    def _batches_of(self, epoch: int) -> Iterator[list[Any]]:
        """Yield the sequences of each batch of an epoch."""
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.features))
        for start in range(0, len(order), self.options.batch_size):
            yield [self.features[i] for i in order[start : start + self.options.batch_size]]

    def batches(self) -> Iterator[list[Any]]:
        """Yield the sequences of each batch of all processes together, from the current step on."""
        while self.step < self.total:
            epoch, batch = self.epoch()
            yield from islice(self._batches_of(epoch), batch, None)

    def update(self, features: list[Any]) -> Tensor:
        """Make one update, and return the gradient's norm before clipping.

        Each process takes its share of the sequences. The loss of a process is weighted by its
        share of the labels, so that the gradient is the same as in one process with all sequences.
        """
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        # A process without a share computes one sequence with the weight 0, because all processes
        # must take part in the exchange of gradients.
        own = features[index::processes] or features[:1]
        bf16 = self.options.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss = self.loss(own)
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
        self.tokens += self.tokens_in(features)
        return norm

    def share(self, features: list[Any], loss: Tensor) -> Tensor:
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
        labels = self.labels_in(features[index::processes])
        # DDP divides the sum of the gradients by the number of processes. Without any label, the
        # share is 0.
        return loss * (labels * processes / (self.labels_in(features) or 1))

    def refuse_divergence(self) -> None:
        """Raise RuntimeError if a loss or gradient was not finite and its update was left out."""
        place = self.divergence.place()
        if place is not None:
            epoch, batch = place
            features = next(islice(self._batches_of(epoch), batch, None))
            raise Diverged(
                f"the loss or the gradient of batch {batch} of epoch {epoch} is not finite at step "
                f"{epoch * self.steps_per_epoch + batch + 1}: training diverged, and the weights "
                f"were not updated; lower learning_rate ({self.options.learning_rate}) or raise "
                f"warmup ({self.options.warmup}). The examples of the batch: "
                f"{'; '.join(dict.fromkeys(map(self.place, features)))}"
            )

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

    def ends_epoch(self) -> bool:
        """Return whether the current step ends an epoch."""
        return self.is_due(self.steps_per_epoch)

    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""
        every = self.options.eval_every or self.steps_per_epoch
        return self.is_due(every) and "validation" in self.parts

    def saves(self) -> bool:
        """Return whether a checkpoint follows the current step."""
        return self.ends_epoch() or super().saves()

    def content(self) -> dict[str, Any]:
        """Return the data for the JSON of a checkpoint: sums, the hash of the data, processes."""
        return {
            "batches": self.counted,
            "tokens": self.tokens,
            "data": self.data,
            "processes": self.accelerator.num_processes,
        }

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint: weights, moments and random states."""
        return {
            "weights": checkpoints.weights_of(self.model),
            "optimizer": checkpoints.moments_of(self.own_optimizer),
            "random": {**self.gathered(self.random_state()), "losses": self.losses.cpu()},
        }

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the state of the run from a checkpoint."""
        super().restore(checkpoint)
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
