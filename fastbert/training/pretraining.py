"""The steps of a pre-training run: batches, updates, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fastbert.modules import BertForPreTraining
from fastbert.training import state
from fastbert.training.evaluate import Batch, MaskedPredictions, evaluate, to_device
from fastbert.training.graphs import graphed_step
from fastbert.training.log import LogRow
from fastbert.training.meter import Meter
from fastbert.training.optimizer import make_optimizer
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import Prepared
from fastbert.training.progress import describe_evaluation
from fastbert.training.record import Record
from fastbert.training.run import Run
from fastbert.training.signals import StopSignals, leave_to_parent

if TYPE_CHECKING:
    from accelerate import Accelerator

TASK = "pre-training"


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
        self, options: PretrainOptions, prepared: Prepared, accelerator: Accelerator
    ) -> None:
        """Build the model and the optimizer.

        Args:
            options: Options of the run.
            prepared: The tokenizer and the batches.
            accelerator: The processes of the run.

        Raises:
            ValueError: If there are fewer batches than processes, or if the processes cannot use
                CUDA graphs that the options ask for.
        """
        super().__init__(options, accelerator.device)
        self.prepared, self.tokenizer = prepared, prepared.tokenizer
        self.accelerator = accelerator
        self.first = accelerator.is_main_process
        if options.cuda_graphs:
            _check_graphs(accelerator)
        # Every epoch draws new pairs, so epochs can differ by a batch. The first epoch decides the
        # number of steps.
        batches, share = len(prepared.train.epoch(0)), accelerator.num_processes
        if batches < share:
            raise ValueError(
                f"corpus: {batches} batches for {share} processes, allowed: at least one each "
                "(more text, or a smaller tokens_per_batch)"
            )
        self.total = options.steps or (options.epochs or 1) * (batches // share)
        torch.manual_seed(options.seed)
        tokenizer = prepared.tokenizer
        config = options.model_config(tokenizer.vocab_size, tokenizer.pad_id)
        self.model: BertForPreTraining = BertForPreTraining(config, backend=options.backend)
        if options.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        optimizer, self.schedule = make_optimizer(
            self.model,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            warmup=options.warmup,
            total_steps=self.total,
            graphed_on=accelerator.device if options.cuda_graphs else None,
        )
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.own_optimizer = optimizer
        # All processes have the same weights, but each process draws its own dropout masks.
        torch.manual_seed(options.seed + accelerator.process_index)
        # `position` counts the batches of the epoch that this process has taken.
        self.epoch = self.position = self.tokens = 0
        self.meter = Meter(accelerator.device)
        # Counts correct predictions in the steps that are logged.
        self.predictions: MaskedPredictions | None = None
        self.graphed = None
        if options.cuda_graphs:
            budget = options.tokens_per_batch
            self.graphed = graphed_step(
                self.model,
                optimizer,
                clip_norm=options.clip_norm,
                observe=self.observe,
                max_tokens=budget,
                max_batch=budget,
            )
        self.evaluation: dict[str, float] | None = None

    def batches(self) -> Generator[Batch]:
        """Yield the batches of this process, epoch after epoch; each process has equally many."""
        share, own = self.accelerator.num_processes, self.accelerator.process_index
        while True:
            epoch = self.prepared.train.epoch(self.epoch)
            indices = range(own + self.position * share, len(epoch) // share * share, share)
            yield from DataLoader(
                epoch,
                batch_size=None,
                sampler=indices,
                num_workers=self.options.workers,
                worker_init_fn=leave_to_parent,
                # A loader draws a number when an epoch begins. Without its own generator, it would
                # move on that of dropout, once more often in a resumed run.
                generator=torch.Generator(),
            )
            self.epoch += 1
            self.position = 0

    def train_mode(self) -> None:
        """Switch the model to training mode."""
        self.wrapped.train()

    def train_step(self, batch: Batch) -> float:
        """Make one update; return the gradient's norm before clipping if the step is logged."""
        logged = self.is_due(self.options.log_every)
        self.meter.count(batch)
        watch = MaskedPredictions(self.model) if logged else contextlib.nullcontext()
        with watch as self.predictions:
            norm = self.update(batch) if self.graphed is None else self.replay(batch)
        self.position += 1
        return float(norm) if logged else math.nan

    def update(self, batch: Batch) -> Tensor:
        """Make one update, and return the gradient's norm before clipping."""
        accelerator = self.accelerator
        batch = to_device(batch, accelerator.device)
        with self.autocast():
            output = self.wrapped(**batch)
        accelerator.backward(output.loss)
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), self.options.clip_norm)
        self.observe(output, batch)
        self.divergence.watch(norm, self.own_optimizer, (self.epoch, self.position))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def replay(self, batch: Batch) -> Tensor:
        """Make one update with a CUDA graph, and return the gradient's norm before clipping.

        The hook of `MaskedPredictions` lets a logged step run without a graph.
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
        """Raise RuntimeError if a gradient was not finite; the weights are those before it."""
        place = self.divergence.place()
        if place is not None:
            epoch, batch = place
            raise self._diverged(f"the gradient of batch {batch} of epoch {epoch} is not finite")

    def _diverged(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} at step {self.step + 1}: training diverged; lower learning_rate "
            f"({self.options.learning_rate}) or raise warmup"
        )

    def row(self, norm: float) -> LogRow:
        """Return the row of the log for this step; raise RuntimeError if a loss is not finite."""
        means = self.meter.read(self.accelerator)
        for name in ("mlm_loss", "nsp_loss"):
            if not math.isfinite(means[name]):
                raise self._diverged(f"{name} is {means[name]}")
        tokens = means.pop("tokens")
        self.tokens += int(tokens)
        return {
            "event": "train",
            "step": self.step + 1,
            "epoch": self.epoch,
            "loss": means["mlm_loss"] + means["nsp_loss"],
            **means,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": norm,
            "tokens_per_second": tokens / self.lap(),
        }

    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""
        return bool(self.prepared.held_out) and self.is_due(self.options.eval_every)

    def evaluate(self, record: Record) -> None:
        """Evaluate the model on the held-out documents, and record the figures."""
        with self.autocast():
            self.evaluation = evaluate(self.model, self.prepared.held_out)
        record.write({"event": "evaluation", "step": self.step + 1, **self.evaluation})
        record.progress.note(
            f"step {self.step + 1}: held-out {describe_evaluation(self.evaluation)}"
        )

    def stop(self, signals: StopSignals) -> int:
        """Return the number of a signal that any process has received, or 0 if there is none."""
        if self.accelerator.num_processes == 1:
            return signals.received
        number = torch.tensor([signals.received], device=self.device)
        return int(self.accelerator.gather(number).max())

    def meet(self) -> None:
        """Wait until all processes of the run are here."""
        self.accelerator.wait_for_everyone()

    def content(self) -> dict[str, Any]:
        """Return the place in the data, the figures, and the facts that must not change."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "tokens": self.tokens,
            "evaluation": self.evaluation,
            "processes": self.accelerator.num_processes,
            "documents": self.prepared.fingerprint,
        }

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the weights, the optimizer's state, and the states of all processes."""
        processes = self._processes()
        if not self.first:
            return {}
        return {
            "weights": state.weights_of(self.model),
            "optimizer": state.moments_of(self.own_optimizer),
            "processes": processes,
        }

    def _processes(self) -> dict[str, Tensor]:
        """Return the random-number states and sums of all processes, with a row for each."""
        device = self.device
        own = {"cpu": torch.get_rng_state(), "sums": self.meter.state()}
        if device.type != "cpu":
            own["device"] = torch.get_device_module(device).get_rng_state(device)
        gathered = {
            name: self.accelerator.gather(tensor[None].to(device)) for name, tensor in own.items()
        }
        return {name: tensor.cpu() for name, tensor in gathered.items()}

    def restore(self, found: state.Checkpoint) -> None:
        """Continue where a checkpoint was written."""
        super().restore(found)
        content, device = found.content, self.device
        self.epoch, self.position = content["epoch"], content["position"]
        self.tokens, self.evaluation = content["tokens"], content["evaluation"]
        own, saved = self.accelerator.process_index, found.tensors("processes")
        self.meter.restore(saved["sums"][own])
        # torch crashes with a state that is a row of a tensor.
        torch.set_rng_state(saved["cpu"][own].clone())
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(saved["device"][own].clone(), device)
