"""Fine-tuning of a pre-trained BERT with a head (Devlin et al. 2019, section 4)."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from fastbert import json_file
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning import evaluate
from fastbert.finetuning.model import Source
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.plots import plot_confusion
from fastbert.finetuning.preparation import Part, encode, fingerprint, read_parts
from fastbert.finetuning.task import Confusion, Feature, Judgement, Task
from fastbert.io import commit
from fastbert.training import state
from fastbert.training.attempts import Attempts
from fastbert.training.checkpoint import CHECKPOINT, refuse_existing, save_checkpoint
from fastbert.training.divergence import Divergence
from fastbert.training.evaluate import to_device
from fastbert.training.log import RunLog, plot_curves, rows_until
from fastbert.training.optimizer import continue_schedule, make_optimizer
from fastbert.training.progress import TrainingProgress
from fastbert.training.signals import StopSignals, stopped_by

LOG, CURVES, METRICS, CONFUSION = "log.jsonl", "curves.png", "metrics.json", "confusion.png"


@dataclass(frozen=True)
class FinetuneResult:
    """The results of a fine-tuning run.

    Attributes:
        model: Folder of the model.
        metrics: Path of ``metrics.json``.
        log: Path of ``log.jsonl``.
        curves: Path of ``curves.png``.
        confusion: Path of ``confusion.png``; None for a task without labels.
        steps: Number of steps.
        seconds: Duration of the steps in seconds, without evaluations.
        figures: The figures of each part, ``"train"``, ``"validation"`` and ``"test"``, with
            ``examples``, the number of examples. A part that does not exist is absent.
        summary: The main figures of each part in one line.
    """

    model: Path
    metrics: Path
    log: Path
    curves: Path
    confusion: Path | None
    steps: int
    seconds: float
    figures: dict[str, dict[str, Any]]
    summary: dict[str, str]


class _Run:
    """The state that the steps of a run share."""

    def __init__(
        self,
        options: FinetuneOptions,
        task: Task,
        parts: dict[str, Part],
        source: Source,
        tokenizer: ModelTokenizer,
    ) -> None:
        self.options, self.task, self.parts, self.tokenizer = options, task, parts, tokenizer
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        torch.manual_seed(options.seed)
        self.model: Any = source.build(task, options.backend).to(self.device)
        if options.freeze:
            for part in (self.model.bert.embeddings, self.model.bert.encoder):
                part.requires_grad_(False)
        self.features = parts["train"].features
        self.steps_per_epoch = math.ceil(len(self.features) / options.batch_size)
        self.total = options.epochs * self.steps_per_epoch
        self.optimizer, self.schedule = make_optimizer(
            self.model,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            warmup=options.warmup,
            total_steps=self.total,
        )
        # The steps that were made, and the step of the last checkpoint.
        self.step = self.saved = 0
        self.seconds = 0.0
        # When the steps since the last row of the log began, and how long a part of them took that
        # was before a resumption.
        self.started = self.before = 0.0
        self.divergence = Divergence(self.device)
        # Sums since the last row of the log; the losses stay on the device.
        self.losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self.batches = self.tokens = 0

    def train_mode(self) -> None:
        """Switch dropout on, except in an encoder that is frozen."""
        self.model.train()
        if self.options.freeze:
            self.model.bert.eval()

    def epoch(self) -> tuple[int, int]:
        """Return the epoch of the current step, and the number of its batch in the epoch."""
        return divmod(self.step, self.steps_per_epoch)

    def remaining(self) -> Iterator[list[Feature]]:
        """Yield the sequences of each batch from the current step on."""
        size = self.options.batch_size
        while self.step < self.total:
            epoch, batch = self.epoch()
            order = np.random.default_rng((self.options.seed, epoch)).permutation(
                len(self.features)
            )
            for start in range(batch * size, len(order), size):
                yield [self.features[i] for i in order[start : start + size]]

    def update(self, features: list[Feature]) -> Tensor:
        """Make one update, and return the gradient's norm before clipping."""
        batch = to_device(self.task.collate(features), self.device)
        bf16 = self.options.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss = self.model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        # A loss that is not finite may have a finite gradient.
        watched = torch.where(loss.detach().isfinite(), norm, loss.detach().to(norm.dtype))
        self.divergence.watch(watched, self.optimizer, self.epoch())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses += loss.detach()
        self.batches += 1
        self.tokens += batch["input_ids"].numel()
        return norm

    def is_due(self, every: int | None) -> bool:
        """Return whether the current step (from 1) ends an interval of `every` steps or the run."""
        step = self.step + 1
        return step == self.total or (every is not None and step % every == 0)

    def refuse_divergence(self) -> None:
        """Raise RuntimeError if a loss was not finite; the weights are those before the update."""
        place = self.divergence.place()
        if place is not None:
            epoch, batch = place
            raise RuntimeError(
                f"the loss or the gradient of batch {batch} of epoch {epoch} is not finite at step "
                f"{epoch * self.steps_per_epoch + batch + 1}: training diverged, and the weights "
                f"were not updated; lower learning_rate ({self.options.learning_rate}) or raise "
                f"warmup. The examples of the batch: {self._examples(epoch, batch)}"
            )

    def _examples(self, epoch: int, batch: int) -> str:
        """Return the places of the examples of a batch."""
        size = self.options.batch_size
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.features))
        chosen = [self.features[i]["example"] for i in order[batch * size : (batch + 1) * size]]
        places = dict.fromkeys(self.parts["train"].examples[i].place for i in chosen)
        return "; ".join(places)

    def row(self, norm: Tensor) -> dict[str, Any]:
        """Return the row of the log for this step, and reset the sums."""
        seconds = time.perf_counter() - self.started
        row = {
            "event": "train",
            "step": self.step + 1,
            "epoch": self.epoch()[0],
            "loss": float(self.losses) / self.batches,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "gradient_norm": float(norm),
            "tokens_per_second": self.tokens / seconds,
        }
        self.seconds += seconds
        self.losses.zero_()
        self.batches = self.tokens = 0
        return row

    def judge(self, name: str) -> Judgement:
        """Return the figures of the model on a part, with the loss."""
        part = self.parts[name]
        bf16 = self.options.precision == "bf16"
        outputs = evaluate.compute(self.model, self.task, part.features, bf16=bf16)
        found = self.task.judge(part.examples, part.features, outputs.rows)
        return Judgement({"loss": outputs.loss, **found.figures}, found.confusion)

    def save(self, attempt: Attempts, data: str) -> None:
        """Write the model, and a checkpoint from which the run resumes after this step."""
        self.refuse_divergence()
        if attempt("the checkpoint", lambda: self._write(data)):
            self.saved = self.step + 1

    def _write(self, data: str) -> None:
        options = self.options
        content = {
            "seconds": self.seconds,
            "before": time.perf_counter() - self.started,
            "batches": self.batches,
            "tokens": self.tokens,
            "task": self.task.name,
            "data": data,
            "options": options.decisive(),
        }
        random = {"cpu": torch.get_rng_state(), "losses": self.losses.cpu()}
        if self.device.type != "cpu":
            random["device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        tensors = {
            "weights": state.weights_of(self.model),
            "optimizer": state.moments_of(self.optimizer),
            "random": random,
        }
        keep = options.keep_checkpoints
        state.save(options.folder, self.step + 1, content, tensors, self.tokenizer, keep)
        save_checkpoint(options.folder / CHECKPOINT, self.model, self.tokenizer)

    def restore(self, found: state.Checkpoint) -> None:
        """Continue where a checkpoint was written."""
        content = found.content
        self.step = self.saved = content["step"]
        self.seconds, self.before = content["seconds"], content["before"]
        self.batches, self.tokens = content["batches"], content["tokens"]
        state.restore_weights(self.model, found.tensors("weights"))
        state.restore_moments(self.optimizer, found.tensors("optimizer"))
        continue_schedule(self.schedule, self.step)
        random = found.tensors("random")
        self.losses.copy_(random["losses"])
        torch.set_rng_state(random["cpu"])
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            module.set_rng_state(random["device"], self.device)


@dataclass(frozen=True)
class _Record:
    """The output of a run other than its model."""

    log: RunLog
    progress: TrainingProgress
    attempt: Attempts

    def write(self, row: dict[str, Any]) -> None:
        self.attempt(LOG, lambda: self.log.write(**row))

    def close(self, curves: Path, panels: dict[str, str]) -> None:
        self.attempt(LOG, self.log.close)
        self.attempt(CURVES, lambda: plot_curves(self.log.rows, curves, panels))


def _describe(row: dict[str, Any]) -> str:
    return (
        f"loss {row['loss']:.3f}  lr {row['learning_rate']:.2e}  "
        f"{row['tokens_per_second'] / 1e3:,.1f}k tokens/s"
    )


def _train(run: _Run, record: _Record, signals: StopSignals, data: str) -> int:
    """Run the steps; return the number of the signal that stopped them, or 0."""
    options, progress = run.options, record.progress
    run.train_mode()
    run.started = time.perf_counter() - run.before
    for features in run.remaining():
        norm = run.update(features)
        # Elsewhere, the look at a gradient would wait for the device in every step.
        if run.device.type == "cpu" or run.is_due(options.log_every):
            run.refuse_divergence()
        if run.is_due(options.log_every):
            row = run.row(norm)
            record.write(row)
            progress.report(row, run.seconds / (run.step + 1) * (run.total - run.step - 1))
            run.started = time.perf_counter()
        run.schedule.step()
        progress.step()
        stop = signals.received
        ends_epoch = run.is_due(run.steps_per_epoch)
        if ends_epoch and not stop and "validation" in run.parts:
            pause = time.perf_counter()
            _validate(run, record)
            run.started += time.perf_counter() - pause
        if ends_epoch or run.is_due(options.save_every) or stop:
            run.save(record.attempt, data)
        run.step += 1
        if stop:
            return stop
    return 0


def _validate(run: _Run, record: _Record) -> None:
    figures = run.judge("validation").figures
    numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
    step = run.step + 1
    record.write({"event": "evaluation", "step": step, "part": "validation", **numbers})
    record.progress.note(
        f"step {step}, after epoch {run.epoch()[0] + 1}: validation "
        f"loss {figures['loss']:.3f}, {run.task.describe(figures)}"
    )


def finetune(options: FinetuneOptions, *, console: Console | None = None) -> FinetuneResult:
    """Fine-tune a pre-trained BERT for the task of the options.

    Pass `ClassifyOptions`, `TagOptions` or `AnswerOptions`. The run uses one process. On the CPU,
    the same seed gives the same log, except for times.

    The folder ``options.output`` receives these results.

    - ``model/`` has the weights, configuration and tokenizer in the layout of Hugging Face, after
      the last epoch. It is always either complete or absent.
    - ``metrics.json`` has the figures of the training, validation and test parts.
    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures of the validation part.
    - ``curves.png`` shows the loss and the main figure; ``confusion.png`` shows the confusion
      matrix of the validation and test parts.
    - ``checkpoints/`` has the last checkpoints from which the run can be resumed.

    If the folder has a checkpoint of a run with the same options and the same data, the run
    continues after that step. Its final weights are the same bits as those of a run that was never
    stopped, on the same machine.

    After SIGTERM or SIGINT (Ctrl-C), the run finishes its step, writes a checkpoint and raises
    SystemExit with status 143, or KeyboardInterrupt. A loss or a gradient that is not finite stops
    the run before the update, and the last checkpoint stays. If a file cannot be written, the run
    shows the error, continues, and tries again at the next save.

    Args:
        options: Options of the run, which decide the task.
        console: Where progress is shown; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        FileNotFoundError: If the model or a data file does not exist.
        ValueError: If the data, the model or the output folder is not usable, or if an earlier run
            in the folder has other options; nothing has been written then. For data, the message
            names the file and the line.
        ImportError: If matplotlib is not installed, or pyarrow for a .parquet file.
        RuntimeError: If a loss or a gradient is not finite; the message names the batch.
        OSError: If the last checkpoint, the log or a figure could not be written.
    """
    console = console or Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    refuse_existing(options.folder, overwrite=options.overwrite)
    _require_matplotlib()
    task = options.task()
    examples = read_parts(task, options, say)
    data = fingerprint(examples)
    found = None if options.overwrite else _resumable(options, task, data, say)
    source = Source(options.model)
    longest = min(task.longest or source.config.max_length, source.config.max_length)
    tokenizer = source.tokenizer(options.max_length or longest)
    parts = {name: Part(items, encode(task, items, tokenizer)) for name, items in examples.items()}
    if tokenizer.truncated:
        say(f"{tokenizer.truncated:,} texts were cut to {tokenizer.limit} tokens")
    run = _Run(options, task, parts, source, tokenizer)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    say(
        f"model: {trained:,} trained parameters on {run.device}, {run.total:,} steps of "
        f"{options.batch_size} sequences in {options.epochs} epochs"
    )
    if found is not None:
        run.restore(found)
        say(f"resumed after step {run.step:,} of {run.total:,}, from {found.folder}")
    return _finish(run, _prepare_folder(run, found, console), data)


def _require_matplotlib() -> None:
    try:
        # The pictures are drawn at the end of the run; an absence is reported at the start.
        import matplotlib  # noqa: F401
    except ImportError as error:
        message = "fine-tuning needs matplotlib: pip install 'fastbert[train]'"
        raise ImportError(message) from error


def _prepare_folder(run: _Run, found: state.Checkpoint | None, console: Console) -> _Record:
    """Remove the results of an earlier run that does not go on, and open the log."""
    folder = run.options.folder
    folder.mkdir(parents=True, exist_ok=True)
    commit.discard_dead(folder)
    if found is None:
        state.forget(folder)
    for name in (METRICS, CONFUSION):
        (folder / name).unlink(missing_ok=True)
    progress = TrainingProgress(console, run.total, run.step, _describe)

    def tell(failure: str) -> None:
        progress.note(f"step {min(run.step + 1, run.total)}: {failure}")

    rows = [] if found is None else rows_until(folder / LOG, run.step)
    return _Record(RunLog(folder / LOG, rows), progress, Attempts(tell))


def _finish(run: _Run, record: _Record, data: str) -> FinetuneResult:
    """Make the remaining steps, judge the model, and write the figures."""
    options, task, progress, attempt = run.options, run.task, record.progress, record.attempt
    signals = StopSignals()
    figures: dict[str, dict[str, Any]] = {}
    confusions: dict[str, Confusion] = {}
    try:
        with progress, signals:
            stop = _train(run, record, signals, data) or signals.received
        for name in () if stop else run.parts:
            judgement = run.judge(name)
            figures[name] = {
                "examples": len(run.parts[name].examples),
                **judgement.figures,
            }
            if judgement.confusion is not None and name != "train":
                confusions[name] = judgement.confusion
    except (KeyboardInterrupt, SystemExit):
        progress.note(f"interrupted in step {run.step + 1} of {run.total}; kept: {_kept(run)}")
        raise
    finally:
        record.close(options.folder / CURVES, {"loss": "loss", task.main[0]: task.main[1]})
    if stop:
        name = signal.Signals(stop).name
        progress.note(f"stopped by {name} after step {run.step} of {run.total}; kept: {_kept(run)}")
        raise stopped_by(stop)
    content = {
        "task": task.name,
        "steps": run.step,
        "seconds": run.seconds,
        "options": options.decisive(),
        "parts": figures,
    }
    attempt(METRICS, lambda: json_file.write(options.folder / METRICS, content))
    picture = options.folder / CONFUSION if confusions else None
    if picture is not None:
        attempt(CONFUSION, lambda: plot_confusion(confusions, picture))
    attempt.check(_kept(run))
    return FinetuneResult(
        model=options.folder / CHECKPOINT,
        metrics=options.folder / METRICS,
        log=options.folder / LOG,
        curves=options.folder / CURVES,
        confusion=picture,
        steps=run.step,
        seconds=run.seconds,
        figures=figures,
        summary={name: task.describe(found) for name, found in figures.items()},
    )


def _resumable(
    options: FinetuneOptions, task: Task, data: str, say: Callable[[str], None]
) -> state.Checkpoint | None:
    """Return the checkpoint that the run continues, or None.

    Raises:
        ValueError: If the checkpoint is of a run with another task, other data or other options.
    """
    found = state.newest(options.folder, say)
    if found is None:
        return None
    name = "examples of the data, by their SHA-256"
    given = {"task": task.name, name: data, **json.loads(json.dumps(options.decisive()))}
    content = found.content
    earlier = {"task": content.get("task"), name: content.get("data"), **content["options"]}
    for key, value in given.items():
        if value != earlier.get(key):
            raise ValueError(
                f"{key}: got {value!r}, but the run in {options.folder} has {earlier.get(key)!r}; "
                "allowed: the same, another folder, or overwrite=True (--overwrite), which starts "
                "anew"
            )
    return found


def _kept(run: _Run) -> str:
    return f"the checkpoint of step {run.saved}" if run.saved else "no checkpoint (see save_every)"
