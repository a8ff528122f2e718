"""The steps of a pre-training run: batches, updates, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fastbert.modules import BertForMaskedLM, BertForPreTraining
from fastbert.training import checkpoints
from fastbert.training.average import WeightAverage
from fastbert.training.divergence import Diverged
from fastbert.training.evaluate import Batch, MaskedPredictions, evaluate, to_device
from fastbert.training.graphs import GraphedStep, graphed_step
from fastbert.training.log import LogRow
from fastbert.training.loop import Run
from fastbert.training.meter import Meter
from fastbert.training.optimizer import make_optimizer
from fastbert.training.options import PretrainOptions
from fastbert.training.parallel import Copies, Shards, check_shards
from fastbert.training.preparation import Batches as Source
from fastbert.training.preparation import Prepared
from fastbert.training.progress import describe_evaluation
from fastbert.training.record import Record
from fastbert.training.signals import leave_to_parent
from fastbert.training.utilization import model_flops, peak_flops

if TYPE_CHECKING:
    from accelerate import Accelerator

TASK = "pre-training"
# The batches of one step on one process.
Batches = list[Batch]


def _check_graphs(accelerator: Accelerator) -> None:
    """Raise ValueError unless CUDA graphs can contain the steps of a run."""
    kind, processes = accelerator.device.type, accelerator.num_processes
    if kind != "cuda" or processes > 1:
        raise ValueError(
            f"cuda_graphs: got True with {processes} process(es) on {kind}, allowed: one process "
            "on a CUDA device, because several processes exchange gradients inside the backward"
        )


class PretrainingRun(Run):
    """The state that the steps of a pre-training run share."""

    task = TASK
    options: PretrainOptions

    def __init__(
        self, options: PretrainOptions, prepared: Prepared, text: str, accelerator: Accelerator
    ) -> None:
        """Build the model and the optimizer.

        Args:
            options: Options of the run.
            prepared: The tokenizer and the batches.
            text: SHA-256 of the text of the corpus, or of the manifest of a prepared corpus.
            accelerator: accelerate's `Accelerator` of the run.

        Raises:
            ValueError: If there are too few batches for a step, or if the options ask for CUDA
                graphs or shards that the processes cannot use.
        """
        super().__init__(options, accelerator)
        self.prepared, self.tokenizer, self.text = prepared, prepared.tokenizer, text
        if options.cuda_graphs:
            _check_graphs(accelerator)
        if options.shard:
            check_shards(accelerator)
        self.batches_per_step = accelerator.num_processes * options.accumulate
        self.total = self._count_steps()
        torch.manual_seed(options.seed)
        tokenizer = prepared.tokenizer
        config = options.model_config(tokenizer.vocab_size, tokenizer.pad_id)
        kind = BertForMaskedLM if options.objective == "none" else BertForPreTraining
        self.model: BertForPreTraining | BertForMaskedLM = kind(config, backend=options.backend)
        if options.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.parallel = (Shards if options.shard else Copies)(accelerator, self.model)
        self.own_optimizer, self.schedule = make_optimizer(
            self.model,
            kind=options.optimizer,
            schedule=options.schedule,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            warmup=options.warmup,
            total_steps=self.total,
            graphed_on=accelerator.device if options.cuda_graphs else None,
        )
        self.average = None if options.ema is None else WeightAverage(self.model, options.ema)
        # All processes have the same weights, but each process draws its own dropout masks.
        torch.manual_seed(options.seed + accelerator.process_index)
        # `position` counts the batches of the epoch that this process has taken.
        self.epoch = self.position = self.tokens = 0
        self.meter = Meter(accelerator.device)
        # `peak` is the peak FLOP/s of the device, or None if not known. `flops` counts the FLOPs
        # since the last row of the log.
        self.peak, self.flops = peak_flops(accelerator.device, options.precision), 0.0
        # `predictions` counts the correct predictions in the steps that are logged.
        self.predictions: MaskedPredictions | None = None
        self.graphed = self._graphed() if options.cuda_graphs else None
        self.evaluation: dict[str, float] | None = None

    def _count_steps(self) -> int:
        # Every epoch draws new pairs, so epochs can differ in their number of batches. The first
        # epoch determines the number of steps.
        options, batches = self.options, len(self.prepared.train.epoch(0))
        if batches < self.batches_per_step:
            raise ValueError(
                f"corpus: {batches} batches for steps of {options.accumulate} on each of "
                f"{self.accelerator.num_processes} processes, allowed: at least one step "
                "(more text, or a smaller tokens_per_batch)"
            )
        return options.steps or (options.epochs or 1) * (batches // self.batches_per_step)

    def _graphed(self) -> GraphedStep:
        budget = self.options.tokens_per_batch
        return graphed_step(
            self.model,
            self.own_optimizer,
            clip_norm=self.options.clip_norm,
            observe=self.observe,
            max_tokens=budget,
            max_batch=budget,
        )

    def batches(self) -> Generator[Batches]:
        """Yield the batches of each step of this process, epoch after epoch.

        Together, the processes take the batches in the order of the epoch. An epoch ends with its
        last whole step.
        """
        processes, own = self.accelerator.num_processes, self.accelerator.process_index
        while True:
            source, begin, end = self.phase()
            if self.step == begin and self.position:
                # Each phase begins with a new epoch.
                self.epoch, self.position = self.epoch + 1, 0
            epoch = source.epoch(self.epoch)
            left = len(epoch) // self.batches_per_step - self.position // self.options.accumulate
            used = self.position * processes + min(left, end - self.step) * self.batches_per_step
            indices = range(own + self.position * processes, used, processes)
            loader = DataLoader(
                epoch,
                batch_size=None,
                sampler=indices,
                num_workers=self.options.workers,
                worker_init_fn=leave_to_parent,
                # A loader draws a random number when an epoch begins. Without its own generator, it
                # would use the generator of dropout, and a resumed run would draw one number more.
                generator=torch.Generator(),
            )
            yield from _groups(loader, self.options.accumulate)
            self.epoch += 1
            self.position = 0

    def phase(self) -> tuple[Source, int, int]:
        """Return the current phase's batches, its first step, and its end (the last step plus 1).

        A run with `short_steps` has two phases: first the short examples, then the full examples.
        """
        short, prepared = round(self.total * self.options.short_steps), self.prepared
        if prepared.short is not None and self.step < short:
            return prepared.short, 0, short
        return prepared.train, short, self.total

    def train_mode(self) -> None:
        """Switch the model to training mode."""
        self.parallel.model.train()

    def train_step(self, batch: Batches) -> float:
        """Make one update, and return the gradient's norm before clipping.

        The result is NaN if the step is not logged, because reading the norm waits for the device.
        """
        logged = self.is_due(self.options.log_every)
        for part in batch:
            self.meter.count(part)
            if self.peak is not None:
                self.flops += model_flops(self.model.config, part)
        watch = MaskedPredictions(self.model) if logged else contextlib.nullcontext()
        with watch as self.predictions:
            norm = self.update(batch) if self.graphed is None else self.replay(batch[0])
        if self.average is not None:
            self.average.update(self.step + 1)
        self.position += len(batch)
        return float(norm) if logged else math.nan

    def update(self, batch: Batches) -> Tensor:
        """Make one update, and return the gradient's norm before clipping."""
        for number, part in enumerate(batch, 1):
            # Only the last backward pass exchanges gradients between the processes.
            last = number == len(batch)
            with contextlib.nullcontext() if last else self.parallel.local_gradients():
                self._add_gradient(to_device(part, self.device), len(batch))
        norm = self.parallel.clip(self.options.clip_norm)
        self.divergence.watch(norm, self.own_optimizer, (self.epoch, self.position))
        self.own_optimizer.step()
        self.own_optimizer.zero_grad(set_to_none=True)
        return norm

    def _add_gradient(self, batch: Batch, share: int) -> None:
        """Add the gradient of one of `share` batches of a step."""
        with self.autocast():
            output = self.parallel.model(**batch)
        # FSDP2 holds whole weights only between the forward and the backward pass, and `observe`
        # reads whole weights.
        self.observe(output, batch)
        loss = output.loss
        (loss if share == 1 else loss / share).backward()

    def replay(self, batch: Batch) -> Tensor:
        """Make one update with a CUDA graph, and return the gradient's norm before clipping.

        A logged step runs without a graph, because `MaskedPredictions` registers a hook.
        """
        assert self.graphed is not None
        with self.autocast():
            norm = self.graphed(**batch).gradient_norm
        assert norm is not None
        return norm

    def observe(self, output: Any, batch: Batch) -> None:
        """Add the output of a step to the sums of the log, before the update."""
        self.meter.add(output, batch)
        if self.predictions is not None:
            hits = self.predictions.hits(batch["labels"])
            self.meter.add_masked(hits, batch["labels"])

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass in the precision of the run."""
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.precision == "bf16")

    def refuse_divergence(self) -> None:
        """Raise RuntimeError if a gradient was not finite; no weight has changed since then."""
        place = self.divergence.place()
        if place is not None:
            epoch, batch = place
            last = batch + self.options.accumulate - 1
            named = f"batch {batch}" if last == batch else f"batches {batch} to {last}"
            raise self._diverged(f"the gradient of {named} of epoch {epoch} is not finite")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{what} at step {self.step + 1}: training diverged; lower learning_rate "
            f"({self.options.learning_rate}) or raise warmup ({self.options.warmup})"
        )

    def row(self, norm: float) -> LogRow:
        """Return the row of the log for this step, and reset the sums since the last row.

        Raises:
            RuntimeError: If a mean loss since the last row is not finite.
        """
        means = self.meter.read(self.accelerator)
        losses = {name: means[name] for name in ("mlm_loss", "nsp_loss") if name in means}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise self._diverged(f"{name} is {loss}")
        tokens, seconds = means.pop("tokens"), self.lap()
        self.tokens += int(tokens)
        reached = {}
        if self.peak is not None:
            reached["utilization"] = self.flops / seconds / self.peak
            self.flops = 0.0
        return {
            "event": "train",
            "step": self.step + 1,
            "epoch": self.epoch,
            "loss": sum(losses.values()),
            **means,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": norm,
            "tokens_per_second": tokens / seconds,
            **reached,
        }

    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""
        return bool(self.prepared.held_out) and self.is_due(self.options.eval_every)

    def evaluate(self, record: Record) -> None:
        """Evaluate the model on the held-out documents, and write the figures into the log."""
        averaged = contextlib.nullcontext() if self.average is None else self.average.applied()
        with averaged, self.autocast():
            self.evaluation = evaluate(self.model, self.prepared.held_out)
            self.parallel.rest()
        record.write({"event": "evaluation", "step": self.step + 1, **self.evaluation})
        record.progress.note(
            f"step {self.step + 1}: held-out {describe_evaluation(self.evaluation)}"
        )

    def content(self) -> dict[str, Any]:
        """Return the position in the data, the figures, and the values that identify the run."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "tokens": self.tokens,
            "evaluation": self.evaluation,
            "flops": self.flops,
            "processes": self.accelerator.num_processes,
            "accumulate": self.options.accumulate,
            "documents": self.text,
        }

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights, the optimizer's state, and the states of all processes.

        Without `shard`, only the first process needs these tensors, and the other processes return
        an empty dict.
        """
        processes = self.gathered({**self.random_state(), "sums": self.meter.state()})
        if not (self.first or self.options.shard):
            return {}
        tensors: dict[str, Mapping[str, Tensor]] = {
            "weights": checkpoints.weights_of(self.model),
            "optimizer": checkpoints.moments_of(self.own_optimizer),
            "processes": processes,
        }
        if self.average is not None:
            tensors["average"] = self.average.tensors()
        return tensors

    def export(
        self, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> BertForPreTraining | BertForMaskedLM:
        """Return a model with the whole weights, or with their average."""
        if self.average is None and not self.options.shard:
            return self.model
        # The new model draws random weights. These draws must not change the random numbers of
        # dropout.
        with torch.random.fork_rng(devices=[]):
            model = type(self.model)(self.model.config)
        checkpoints.restore_weights(model, {**tensors["weights"], **tensors.get("average", {})})
        return model

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the state of the run from a checkpoint."""
        super().restore(checkpoint)
        content = checkpoint.content
        if self.average is not None:
            with checkpoint.fitting("average") as average:
                self.average.restore(average)
        with checkpoint.reading(checkpoints.STATE):
            taken = content["position"] * content["processes"]
            self.epoch, self.position = content["epoch"], taken // self.accelerator.num_processes
            self.tokens, self.evaluation = content["tokens"], content["evaluation"]
            # Older checkpoints do not contain FLOPs.
            self.flops = content.get("flops", 0.0)
        with checkpoint.fitting("processes") as saved:
            if content["processes"] == self.accelerator.num_processes:
                self.meter.restore(saved["sums"][self.accelerator.process_index])
                self.restore_random(saved)
                return
            self.replace_random(self.options.seed)
            if self.first:
                self.meter.restore(saved["sums"].sum(dim=0))


def _groups(batches: Iterable[Batch], size: int) -> Iterator[Batches]:
    """Yield the batches in lists of `size` batches; `size` divides the number of batches."""
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, size)):
        yield group
