"""Pre-training with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader

from fastbert.modules import BertForPreTraining
from fastbert.training.checkpoint import CHECKPOINT, refuse_existing, save_checkpoint
from fastbert.training.evaluate import Batch, MaskedPredictions, evaluate, to_device
from fastbert.training.log import RunLog, plot_curves
from fastbert.training.meter import Meter, token_count
from fastbert.training.optimizer import make_optimizer
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import Prepared, gather_documents, prepare
from fastbert.training.progress import TrainingProgress

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind. ``evaluation`` is None when nothing was held out."""

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
        return self.tokens / self.seconds


def _accelerator() -> Accelerator:
    try:
        import matplotlib  # noqa: F401 - for the curves at the end: better missed now than then
        from accelerate import Accelerator
    except ImportError as error:
        message = f"pre-training needs {error.name}: pip install 'fastbert[train]'"
        raise ImportError(message) from error
    # Autocast is the loop's own: accelerate's precision belongs to the whole process and cannot
    # change.
    # Without cpu=True, accelerate ignores torchrun on a machine that has no accelerator.
    return Accelerator(mixed_precision="no", cpu=not torch.accelerator.is_available())


class _Run:
    """One pre-training run: the state that its steps share."""

    def __init__(
        self, options: PretrainOptions, prepared: Prepared, accelerator: Accelerator
    ) -> None:
        self.options = options
        self.prepared = prepared
        self.accelerator = accelerator
        # Epochs differ by a batch or so, as their pairs are drawn afresh: the first one counts.
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
        )
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        # Same weights everywhere, another dropout mask on each process.
        torch.manual_seed(options.seed + accelerator.process_index)
        self.step = self.epoch = self.tokens = 0
        self.seconds = 0.0
        self.meter = Meter(accelerator.device)
        self.evaluation: dict[str, float] | None = None

    def batches(self) -> Iterator[Batch]:
        """This process's batches, epoch after epoch; every process gets the same number."""
        share, own = self.accelerator.num_processes, self.accelerator.process_index
        while True:
            epoch = self.prepared.train.epoch(self.epoch)
            indices = range(own, len(epoch) // share * share, share)
            workers = self.options.workers
            yield from DataLoader(epoch, batch_size=None, sampler=indices, num_workers=workers)
            self.epoch += 1

    def train_step(self, batch: Batch) -> float:
        """One update. Returns the gradient's norm before clipping when the step is to be logged."""
        options, accelerator = self.options, self.accelerator
        logged = self.is_due(options.log_every)
        tokens = token_count(batch)
        batch = to_device(batch, accelerator.device)
        watch = MaskedPredictions(self.model) if logged else contextlib.nullcontext()
        with watch as predictions, self.autocast():
            output = self.wrapped(**batch)
        accelerator.backward(output.loss)
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), options.clip_norm)
        self.meter.add(output, batch, tokens)
        if predictions is not None:
            self.meter.add_masked(predictions.hits(batch["labels"]), batch["labels"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm) if logged else math.nan

    def autocast(self) -> torch.autocast:
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.options.precision == "bf16")

    def is_due(self, every: int | None) -> bool:
        """Whether the step under way (counted from 1) ends an interval of ``every`` or the run."""
        step = self.step + 1
        return step == self.total or (every is not None and step % every == 0)

    def row(self, started: float, norm: float) -> dict[str, Any]:
        """The log's row at this step. Raises RuntimeError when a loss is no longer finite."""
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
            "learning_rate": self.schedule.get_last_lr()[0],
            "gradient_norm": norm,
            "tokens_per_second": tokens / seconds,
        }

    def save(self) -> None:
        if self.accelerator.is_main_process:
            folder = self.options.folder / CHECKPOINT
            save_checkpoint(folder, self.model, self.prepared.tokenizer)
        self.accelerator.wait_for_everyone()


def _evaluate(run: _Run, log: RunLog | None, progress: TrainingProgress) -> None:
    if run.prepared.held_out:
        with run.autocast():
            run.evaluation = evaluate(run.model, run.prepared.held_out)
        if log is not None:
            log.write(event="evaluation", step=run.step + 1, **run.evaluation)
        progress.note(f"step {run.step + 1}: held-out {describe_evaluation(run.evaluation)}")


def describe_evaluation(figures: dict[str, float]) -> str:
    """The figures of :func:`fastbert.training.evaluate` in one line."""
    return (
        f"mlm {figures['mlm_loss']:.3f} ({figures['mlm_accuracy']:.1%}, most frequent token "
        f"{figures['mlm_baseline_accuracy']:.1%})  "
        f"nsp {figures['nsp_loss']:.3f} ({figures['nsp_accuracy']:.1%})"
    )


def _train(run: _Run, log: RunLog | None, progress: TrainingProgress) -> None:
    """The loop. ``log`` is None on every process but the first."""
    options = run.options
    run.wrapped.train()
    started = time.perf_counter()
    for batch in run.batches():
        norm = run.train_step(batch)
        if run.is_due(options.log_every):
            row = run.row(started, norm)
            if log is not None:
                log.write(**row)
            progress.report(row, run.seconds / (run.step + 1) * (run.total - run.step - 1))
            started = time.perf_counter()
        run.schedule.step()
        progress.step()
        if run.is_due(options.eval_every):
            pause = time.perf_counter()
            _evaluate(run, log, progress)
            started += time.perf_counter() - pause
        if run.is_due(options.save_every):
            run.save()
        run.step += 1
        if run.step == run.total:
            return


def pretrain(
    options: PretrainOptions,
    *,
    documents: Iterable[list[str]] | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Pre-trains a BERT on ``options.corpus``, or on ``documents`` (lists of sentences).

    Runs on one process, or on as many as ``torchrun`` or ``accelerate launch`` starts (DDP); each
    takes ``tokens_per_batch`` tokens per step. Writes ``log.jsonl`` (one object per line: event
    "train" every ``log_every`` steps with means since the last one, and "evaluation"),
    ``curves.png`` and ``model/`` (weights, configuration and tokenizer in Hugging Face's layout,
    whole or absent) to ``options.output``. On the CPU the same seed gives the same log, times
    apart.

    Raises ValueError for an unusable corpus or output folder before anything is written,
    ImportError without accelerate or matplotlib, RuntimeError when a loss stops being finite. An
    interrupt keeps the log and the last checkpoint that ``save_every`` wrote.
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
    curves = options.folder / "curves.png"
    options.folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(options.folder / "log.jsonl") if first else None
    try:
        with TrainingProgress(console, run.total) as progress:
            _train(run, log, progress)
    except KeyboardInterrupt:
        console.print(_what_was_kept(run))
        raise
    finally:
        if log is not None:
            log.close()
            plot_curves(log.rows, curves)
    return TrainResult(
        checkpoint=options.folder / CHECKPOINT,
        log=options.folder / "log.jsonl",
        curves=curves,
        steps=run.step,
        epochs=run.epoch + 1,
        parameters=parameters,
        tokens=run.tokens,
        seconds=run.seconds,
        evaluation=run.evaluation,
    )


def _what_was_kept(run: _Run) -> str:
    every = run.options.save_every
    saved = run.step // every * every if every else 0
    kept = f"the checkpoint of step {saved}" if saved else "no checkpoint (save_every writes some)"
    return f"interrupted in step {run.step + 1} of {run.total}; kept: log.jsonl, curves.png, {kept}"
