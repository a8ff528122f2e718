"""Pre-training with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from fastbert.io import commit
from fastbert.modules import BertForPreTraining
from fastbert.training.attempts import Attempts
from fastbert.training.checkpoint import CHECKPOINT, refuse_existing, save_checkpoint
from fastbert.training.evaluate import Batch, MaskedPredictions, evaluate, to_device
from fastbert.training.graphs import graphed_step
from fastbert.training.log import RunLog, plot_curves
from fastbert.training.meter import Meter
from fastbert.training.optimizer import make_optimizer
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import Prepared, gather_documents, prepare
from fastbert.training.progress import TrainingProgress
from fastbert.training.signals import StopSignals, leave_to_parent, stopped_by

if TYPE_CHECKING:
    from accelerate import Accelerator

LOG, CURVES = "log.jsonl", "curves.png"


@dataclass(frozen=True)
class TrainResult:
    """The results of a pre-training run.

    Attributes:
        checkpoint: Folder of the last checkpoint.
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
        # All processes have the same weights, but each process draws its own dropout masks.
        torch.manual_seed(options.seed + accelerator.process_index)
        self.step = self.epoch = self.tokens = 0
        # The step of the last checkpoint; 0 means that there is none.
        self.saved = 0
        self.seconds = 0.0
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
            indices = range(own, len(epoch) // share * share, share)
            yield from DataLoader(
                epoch,
                batch_size=None,
                sampler=indices,
                num_workers=self.options.workers,
                worker_init_fn=leave_to_parent,
            )
            self.epoch += 1

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

    def row(self, started: float, norm: float) -> dict[str, Any]:
        """Return the row of the log for this step; raise RuntimeError if a loss is not finite."""
        means = self.meter.read(self.accelerator)
        for name in ("mlm_loss", "nsp_loss"):
            if not math.isfinite(means[name]):
                raise RuntimeError(
                    f"{name} is {means[name]} at step {self.step + 1}: training diverged; lower "
                    f"learning_rate ({self.options.learning_rate}) or raise warmup"
                )
        tokens = means.pop("tokens")
        seconds = time.perf_counter() - started
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
        if self.accelerator.is_main_process:
            folder, tokenizer = self.options.folder / CHECKPOINT, self.prepared.tokenizer
            if attempt("the checkpoint", lambda: save_checkpoint(folder, self.model, tokenizer)):
                self.saved = self.step + 1
        self.accelerator.wait_for_everyone()


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
    started = time.perf_counter()
    for batch in batches:
        norm = run.train_step(batch)
        if run.is_due(options.log_every):
            row = run.row(started, norm)
            record.write(row)
            progress.report(row, run.seconds / (run.step + 1) * (run.total - run.step - 1))
            started = time.perf_counter()
        run.schedule.step()
        progress.step()
        stop = run.stop(signals)
        if run.is_due(options.eval_every) and not stop:
            pause = time.perf_counter()
            _evaluate(run, record)
            started += time.perf_counter() - pause
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

    The folder ``options.output`` receives three results.

    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures on held-out documents.
    - ``curves.png`` shows the losses and accuracies.
    - ``model/`` is the checkpoint with weights, configuration and tokenizer in the layout of
      Hugging Face. It is always either complete or absent.

    After SIGTERM or SIGINT (Ctrl-C), the run finishes its step, writes a checkpoint and raises
    SystemExit with status 143, or KeyboardInterrupt. A second signal, at least one second after the
    first, ends the run at once, without another checkpoint.

    If a file cannot be written, the run shows the error, continues, and tries again at the next
    save. The earlier checkpoint stays complete.

    Args:
        options: Options of the run.
        documents: Documents, each a list of sentences, instead of ``options.corpus``.
        console: Where progress is shown; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        ValueError: If the corpus or the output folder is not usable; nothing has been written then.
        ImportError: If accelerate or matplotlib is not installed.
        RuntimeError: If a loss is not finite.
        OSError: If the last checkpoint, the log or the curves could not be written.
    """
    console = console or Console()
    refuse_existing(options.folder, overwrite=options.overwrite)
    accelerator = _accelerator()
    first = accelerator.is_main_process
    if not first:
        console = Console(quiet=True)
    gathered = gather_documents(options, documents)
    prepared = prepare(
        options,
        gathered,
        lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
    )
    run = _Run(options, prepared, accelerator)
    parameters = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"model: {parameters:,} parameters on {accelerator.device}, {run.total:,} steps of up to "
        f"{options.tokens_per_batch:,} tokens on {accelerator.num_processes} process(es)",
        highlight=False,
        soft_wrap=True,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    if first:
        commit.discard_dead(options.folder)
    progress = TrainingProgress(console, run.total)
    signals = StopSignals()

    def tell(failure: str) -> None:
        step = min(run.step + 1, run.total)
        end = "" if step == run.total or signals.received else "; training continues"
        progress.note(f"step {step}: {failure}{end}")

    attempt = Attempts(tell)
    record = _Record(RunLog(options.folder / LOG) if first else None, progress, attempt)
    try:
        # The processes that prepare batches ignore signals; they end when the batches are closed.
        with progress, signals, contextlib.closing(run.batches()) as batches:
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


def _kept(run: _Run, failures: Mapping[str, OSError]) -> str:
    saved = run.saved
    kept = f"the checkpoint of step {saved}" if saved else "no checkpoint (see save_every)"
    return ", ".join([*(name for name in (LOG, CURVES) if name not in failures), kept])
