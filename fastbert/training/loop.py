"""Pre-training with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from fastbert.io import commit
from fastbert.modules import BertForPreTraining
from fastbert.training import state
from fastbert.training.attempts import Attempts
from fastbert.training.checkpoint import CHECKPOINT, refuse_existing, save_checkpoint
from fastbert.training.divergence import Divergence
from fastbert.training.evaluate import Batch, MaskedPredictions, evaluate, to_device
from fastbert.training.graphs import graphed_step
from fastbert.training.log import RunLog, plot_curves, rows_until
from fastbert.training.meter import Meter
from fastbert.training.optimizer import continue_schedule, make_optimizer
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import (
    Documents,
    Prepared,
    fingerprint,
    gather_documents,
    prepare,
)
from fastbert.training.progress import TrainingProgress
from fastbert.training.signals import StopSignals, leave_to_parent, stopped_by

if TYPE_CHECKING:
    from accelerate import Accelerator

LOG, CURVES = "log.jsonl", "curves.png"


@dataclass(frozen=True)
class TrainResult:
    """The results of a pre-training run.

    Attributes:
        checkpoint: Folder of the model.
        log: Path of ``log.jsonl``.
        curves: Path of ``curves.png``.
        steps: Number of steps.
        epochs: Number of epochs that were begun.
        parameters: Number of parameters of the model.
        tokens: Number of tokens of all steps and processes, without padding.
        seconds: Duration of the steps in seconds, without evaluations.
        evaluation: Figures of the last evaluation; None if no documents were held out.
    """

    checkpoint: Path
    log: Path
    curves: Path
    steps: int
    epochs: int
    parameters: int
    tokens: int
    seconds: float
    evaluation: dict[str, float] | None

    @property
    def tokens_per_second(self) -> float:
        """Mean number of tokens per second."""
        return self.tokens / self.seconds


def _accelerator() -> Accelerator:
    try:
        # matplotlib draws the curves at the end of the run; its absence is reported at the start.
        import matplotlib  # noqa: F401
        from accelerate import Accelerator
    except ImportError as error:
        message = f"pre-training needs {error.name}: pip install 'fastbert[train]'"
        raise ImportError(message) from error
    # The loop calls autocast itself, because the precision of accelerate applies to the whole
    # process and cannot change. Without cpu=True, accelerate ignores torchrun on a machine that has
    # no accelerator.
    return Accelerator(mixed_precision="no", cpu=not torch.accelerator.is_available())


def _check_graphs(accelerator: Accelerator) -> None:
    """Raise ValueError unless CUDA graphs can contain the steps of a run."""
    kind, processes = accelerator.device.type, accelerator.num_processes
    if kind != "cuda" or processes > 1:
        raise ValueError(
            f"cuda_graphs: got True with {processes} process(es) on {kind}, allowed: one process "
            "on a CUDA device, because several processes exchange gradients inside the backward"
        )


class _Run:
    """The state that the steps of a pre-training run share."""

    def __init__(
        self, options: PretrainOptions, prepared: Prepared, accelerator: Accelerator
    ) -> None:
        self.options = options
        self.prepared = prepared
        self.accelerator = accelerator
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
        self.model = BertForPreTraining(config, backend=options.backend)
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
        self.step = self.epoch = self.position = self.tokens = 0
        # The step of the last checkpoint; 0 means that there is none.
        self.saved = 0
        self.seconds = 0.0
        # When the steps since the last row of the log began, and how long a part of them took that
        # was before a resumption.
        self.started = self.before = 0.0
        self.meter = Meter(accelerator.device)
        self.divergence = Divergence(accelerator.device)
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

    def train_step(self, batch: Batch) -> float:
        """Make one update; return the gradient's norm before clipping if the step is logged."""
        logged = self.is_due(self.options.log_every)
        self.meter.count(batch)
        watch = MaskedPredictions(self.model) if logged else contextlib.nullcontext()
        with watch as self.predictions:
            norm = self.update(batch) if self.graphed is None else self.replay(batch)
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
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.options.precision == "bf16")

    def is_due(self, every: int | None) -> bool:
        """Return whether the current step (from 1) ends an interval of `every` steps or the run."""
        step = self.step + 1
        return step == self.total or (every is not None and step % every == 0)

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

    def row(self, norm: float) -> dict[str, Any]:
        """Return the row of the log for this step; raise RuntimeError if a loss is not finite."""
        means = self.meter.read(self.accelerator)
        for name in ("mlm_loss", "nsp_loss"):
            if not math.isfinite(means[name]):
                raise self._diverged(f"{name} is {means[name]}")
        tokens = means.pop("tokens")
        seconds = time.perf_counter() - self.started
        self.tokens += int(tokens)
        self.seconds += seconds
        return {
            "event": "train",
            "step": self.step + 1,
            "epoch": self.epoch,
            "loss": means["mlm_loss"] + means["nsp_loss"],
            **means,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": norm,
            "tokens_per_second": tokens / seconds,
        }

    def stop(self, signals: StopSignals) -> int:
        """Return the number of a signal that any process has received, or 0 if there is none."""
        if self.accelerator.num_processes == 1:
            return signals.received
        number = torch.tensor([signals.received], device=self.accelerator.device)
        return int(self.accelerator.gather(number).max())

    def save(self, attempt: Attempts) -> None:
        """Write the model, and a checkpoint from which the run resumes after this step."""
        self.refuse_divergence()
        processes = self._processes()
        first = self.accelerator.is_main_process
        if first and attempt("the checkpoint", lambda: self._write(processes)):
            self.saved = self.step + 1
        self.accelerator.wait_for_everyone()

    def _write(self, processes: dict[str, Tensor]) -> None:
        options, tokenizer = self.options, self.prepared.tokenizer
        content = {
            "epoch": self.epoch,
            "position": self.position,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "before": time.perf_counter() - self.started,
            "evaluation": self.evaluation,
            "processes": self.accelerator.num_processes,
            "documents": self.prepared.fingerprint,
            "options": options.decisive(),
        }
        tensors = {
            "weights": state.weights_of(self.model),
            "optimizer": state.moments_of(self.own_optimizer),
            "processes": processes,
        }
        keep = options.keep_checkpoints
        state.save(options.folder, self.step + 1, content, tensors, tokenizer, keep)
        save_checkpoint(options.folder / CHECKPOINT, self.model, tokenizer)

    def _processes(self) -> dict[str, Tensor]:
        """Return the random-number states and sums of all processes, with a row for each."""
        device = self.accelerator.device
        own = {"cpu": torch.get_rng_state(), "sums": self.meter.state()}
        if device.type != "cpu":
            own["device"] = torch.get_device_module(device).get_rng_state(device)
        gathered = {
            name: self.accelerator.gather(tensor[None].to(device)) for name, tensor in own.items()
        }
        return {name: tensor.cpu() for name, tensor in gathered.items()}

    def restore(self, found: state.Checkpoint) -> None:
        """Continue where a checkpoint was written."""
        content, device = found.content, self.accelerator.device
        self.step = self.saved = content["step"]
        self.epoch, self.position = content["epoch"], content["position"]
        self.tokens, self.seconds = content["tokens"], content["seconds"]
        self.evaluation, self.before = content["evaluation"], content["before"]
        state.restore_weights(self.model, found.tensors("weights"))
        state.restore_moments(self.own_optimizer, found.tensors("optimizer"))
        continue_schedule(self.schedule, self.step)
        own, saved = self.accelerator.process_index, found.tensors("processes")
        self.meter.restore(saved["sums"][own])
        # torch crashes with a state that is a row of a tensor.
        torch.set_rng_state(saved["cpu"][own].clone())
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(saved["device"][own].clone(), device)


@dataclass(frozen=True)
class _Record:
    """The output of a run other than its checkpoint."""

    # Only the first process has a log.
    log: RunLog | None
    progress: TrainingProgress
    attempt: Attempts

    def write(self, row: dict[str, Any]) -> None:
        log = self.log
        if log is not None:
            self.attempt(LOG, lambda: log.write(**row))

    def close(self, curves: Path) -> None:
        log = self.log
        if log is not None:
            self.attempt(LOG, log.close)
            self.attempt(CURVES, lambda: plot_curves(log.rows, curves))


def _evaluate(run: _Run, record: _Record) -> None:
    if run.prepared.held_out:
        with run.autocast():
            run.evaluation = evaluate(run.model, run.prepared.held_out)
        record.write({"event": "evaluation", "step": run.step + 1, **run.evaluation})
        record.progress.note(f"step {run.step + 1}: held-out {describe_evaluation(run.evaluation)}")


def describe_evaluation(figures: dict[str, float]) -> str:
    """Format the figures of `fastbert.training.evaluate` in one line."""
    return (
        f"mlm {figures['mlm_loss']:.3f} ({figures['mlm_accuracy']:.1%}, most frequent token "
        f"{figures['mlm_baseline_accuracy']:.1%})  "
        f"nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})"
    )


def _train(run: _Run, batches: Iterable[Batch], record: _Record, signals: StopSignals) -> int:
    """Run the steps; return the number of the signal that stopped them, or 0."""
    options, progress = run.options, record.progress
    run.wrapped.train()
    run.started = time.perf_counter() - run.before
    for batch in batches:
        norm = run.train_step(batch)
        run.position += 1
        # Elsewhere, the look at a gradient would wait for the device in every step.
        if run.accelerator.device.type == "cpu" or run.is_due(options.log_every):
            run.refuse_divergence()
        if run.is_due(options.log_every):
            row = run.row(norm)
            record.write(row)
            progress.report(row, run.seconds / (run.step + 1) * (run.total - run.step - 1))
            run.started = time.perf_counter()
        run.schedule.step()
        progress.step()
        stop = run.stop(signals)
        if run.is_due(options.eval_every) and not stop:
            pause = time.perf_counter()
            _evaluate(run, record)
            run.started += time.perf_counter() - pause
        if run.is_due(options.save_every) or stop:
            run.save(record.attempt)
        run.step += 1
        if stop or run.step == run.total:
            return stop
    raise AssertionError("the batches never end")


def pretrain(
    options: PretrainOptions,
    *,
    documents: Iterable[list[str]] | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Pre-train a BERT with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1).

    The run uses one process, or all processes that ``torchrun`` or ``accelerate launch`` starts
    (DDP). Every process takes ``options.tokens_per_batch`` tokens per step. On the CPU, the same
    seed gives the same log, except for times.

    The folder ``options.output`` receives four results.

    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures on held-out documents.
    - ``curves.png`` shows the losses and accuracies.
    - ``model/`` has the weights, configuration and tokenizer in the layout of Hugging Face. It is
      always either complete or absent.
    - ``checkpoints/`` has the last checkpoints from which the run can be resumed.

    If the folder has a checkpoint of a run with the same options and the same text, the run
    continues after that step. Its final weights are the same bits as those of a run that was never
    stopped, on the same machine and with as many processes; the number of `workers` may differ. A
    checkpoint that is damaged is reported, and the one before it is used.

    After SIGTERM or SIGINT (Ctrl-C), the run finishes its step, writes a checkpoint and raises
    SystemExit with status 143, or KeyboardInterrupt. A second signal, at least one second after the
    first, ends the run at once, without another checkpoint.

    A gradient that is not finite stops the run before the update, and the last checkpoint stays.

    If a file cannot be written, the run shows the error, continues, and tries again at the next
    save. The earlier checkpoint stays complete.

    Args:
        options: Options of the run.
        documents: Documents, each a list of sentences, instead of ``options.corpus``.
        console: Where progress is shown; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        ValueError: If the corpus or the output folder is not usable, or if an earlier run in the
            folder has other options; nothing has been written then.
        ImportError: If accelerate or matplotlib is not installed.
        RuntimeError: If a loss or a gradient is not finite.
        OSError: If the last checkpoint, the log or the curves could not be written.
    """
    console = console or Console()
    refuse_existing(options.folder, overwrite=options.overwrite)
    accelerator = _accelerator()
    first = accelerator.is_main_process
    if not first:
        console = Console(quiet=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    gathered = gather_documents(options, documents)
    found = None if options.overwrite else _resumable(options, gathered, accelerator, say)
    tokenizer = None if found is None else found.tokenizer()
    prepared = prepare(options, gathered, say, tokenizer)
    run = _Run(options, prepared, accelerator)
    parameters = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"model: {parameters:,} parameters on {accelerator.device}, {run.total:,} steps of up to "
        f"{options.tokens_per_batch:,} tokens on {accelerator.num_processes} process(es)",
        highlight=False,
        soft_wrap=True,
    )
    if found is not None:
        run.restore(found)
        say(f"resumed after step {run.step:,} of {run.total:,}, from {found.folder}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if first:
        commit.discard_dead(options.folder)
        if options.overwrite:
            state.forget(options.folder)
    progress = TrainingProgress(console, run.total, run.step)
    signals = StopSignals()

    def tell(failure: str) -> None:
        step = min(run.step + 1, run.total)
        end = "" if step == run.total or signals.received else "; training continues"
        progress.note(f"step {step}: {failure}{end}")

    attempt = Attempts(tell)
    log = options.folder / LOG
    rows = rows_until(log, run.step) if first and found is not None else []
    record = _Record(RunLog(log, rows) if first else None, progress, attempt)
    try:
        # The processes that prepare batches ignore signals; they end when the batches are closed.
        with progress, signals, contextlib.closing(run.batches()) as batches:
            stop = 0
            if run.step < run.total:
                stop = _train(run, batches, record, signals) or signals.received
    except (KeyboardInterrupt, SystemExit):
        kept = _kept(run, attempt.failures)
        progress.note(f"interrupted in step {run.step + 1} of {run.total}; kept: {kept}")
        raise
    finally:
        record.close(options.folder / CURVES)
    kept = _kept(run, attempt.failures)
    if stop:
        name = signal.Signals(stop).name
        progress.note(f"stopped by {name} after step {run.step} of {run.total}; kept: {kept}")
        raise stopped_by(stop)
    attempt.check(kept)
    return TrainResult(
        checkpoint=options.folder / CHECKPOINT,
        log=options.folder / LOG,
        curves=options.folder / CURVES,
        steps=run.step,
        epochs=run.epoch + 1,
        parameters=parameters,
        tokens=run.tokens,
        seconds=run.seconds,
        evaluation=run.evaluation,
    )


def _resumable(
    options: PretrainOptions,
    documents: Documents,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> state.Checkpoint | None:
    """Return the checkpoint that the run continues, or None; the first process looks for it.

    Raises:
        ValueError: If the checkpoint is of a run with other options, text or processes.
    """
    found = None
    if accelerator.is_main_process:
        found = state.newest(options.folder, say)
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast

        step = torch.tensor([0 if found is None else found.content["step"]])
        number = int(broadcast(step.to(accelerator.device)))
        if number and found is None:
            found = state.read(state.folder_of(options.folder, number))
    if found is None:
        return None
    given = {
        "processes": accelerator.num_processes,
        "text of the corpus, by its SHA-256": fingerprint(documents),
        **json.loads(json.dumps(options.decisive())),
    }
    content = found.content
    earlier = {
        "processes": content["processes"],
        "text of the corpus, by its SHA-256": content["documents"],
        **content["options"],
    }
    for name, value in given.items():
        if value != earlier.get(name):
            raise ValueError(
                f"{name}: got {value!r}, but the run in {options.folder} has "
                f"{earlier.get(name)!r}; allowed: the same, another folder, or overwrite=True "
                "(--overwrite), which starts anew"
            )
    return found


def _kept(run: _Run, failures: Mapping[str, OSError]) -> str:
    saved = run.saved
    kept = f"the checkpoint of step {saved}" if saved else "no checkpoint (see save_every)"
    return ", ".join([*(name for name in (LOG, CURVES) if name not in failures), kept])
