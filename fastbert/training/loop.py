"""The steps of a training run, with their log, evaluations, saves and interruptions.

Pre-training and fine-tuning share this loop. They differ in the update, the figures of a row of the
log, the evaluation, and the state that a checkpoint needs.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console
from torch import Tensor

from fastbert.io import commit
from fastbert.training import checkpoints
from fastbert.training.attempts import Attempts
from fastbert.training.divergence import Divergence
from fastbert.training.log import LOG, LogRow, RunLog, rows_until
from fastbert.training.model_folder import CHECKPOINT, has_weights_of, save_checkpoint
from fastbert.training.progress import TrainingProgress
from fastbert.training.record import Record
from fastbert.training.schedules import continue_schedule
from fastbert.training.signals import StopSignals, stopped_by
from fastbert.training.trackers import Tracker

if TYPE_CHECKING:
    from accelerate import Accelerator


class RunOptions(Protocol):
    """The options that the loop reads."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""

    @property
    def log_every(self) -> int:
        """Number of steps between two rows of the log."""

    @property
    def save_every(self) -> int | None:
        """Number of steps between two checkpoints; None sets no number."""

    @property
    def save_minutes(self) -> float | None:
        """Largest number of minutes between two checkpoints; None sets no limit."""

    @property
    def keep_checkpoints(self) -> int:
        """Number of newest checkpoints that are not deleted."""

    def decisive(self) -> dict[str, Any]:
        """Return the options that determine the results, as values of JSON."""


class Run(ABC):
    """The state that the steps of a run share.

    Attributes:
        task: Name of the task, which is stored in checkpoints.
        options: Options of the run.
        accelerator: accelerate's `Accelerator` of the run.
        model: The model.
        own_optimizer: The optimizer of the parameters of `model`.
        schedule: The schedule of the learning rate.
        tokenizer: The tokenizer, which a checkpoint contains.
        first: Whether this process writes the files of the run.
        total: Number of steps.
        step: Number of steps that were made.
        saved: Step of the last checkpoint; 0 means that there is none.
        seconds: Duration of the steps in seconds, without evaluations.
    """

    task: str
    options: RunOptions
    model: Any
    own_optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    tokenizer: checkpoints.StoredTokenizer
    total: int

    def __init__(self, options: RunOptions, accelerator: Accelerator) -> None:
        """Start before the first step."""
        self.options, self.accelerator = options, accelerator
        self.device = device = accelerator.device
        self.first = accelerator.is_main_process
        self.step = self.saved = 0
        self.seconds = 0.0
        # `started` is the time at which the steps since the last row of the log began. If some of
        # these steps were made before the run was resumed, `before` is their duration in seconds.
        self.started = self.before = 0.0
        # `saved_at` is the time at which the last checkpoint was written, or the steps began.
        self.saved_at = 0.0
        self.divergence = Divergence(device)

    @abstractmethod
    def update(self, batch: Any) -> Tensor:
        """Make one update, and return the gradient's norm before clipping."""

    def train_step(self, batch: Any) -> float:
        """Make one update, and return the gradient's norm before clipping.

        The result is NaN if the step is not logged, because reading the norm waits for the device.
        """
        norm = self.update(batch)
        return float(norm) if self.is_due(self.options.log_every) else math.nan

    def train_mode(self) -> None:
        """Switch the model to training mode."""
        self.model.train()

    @abstractmethod
    def refuse_divergence(self) -> None:
        """Raise RuntimeError if a gradient was not finite; such a gradient changes no weight."""

    @abstractmethod
    def row(self, norm: float) -> LogRow:
        """Return the row of the log for this step, and reset the sums since the last row."""

    @abstractmethod
    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""

    @abstractmethod
    def evaluate(self, record: Record) -> None:
        """Evaluate the model after the current step, and write the figures into the log."""

    def has_ended(self) -> bool:
        """Return whether no step is left to make."""
        return self.step == self.total

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return the values of JSON that a checkpoint needs."""

    @abstractmethod
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors that a checkpoint needs, by the stem of their file."""

    def is_due(self, every: int | None) -> bool:
        """Return whether the current step (from 1) ends an interval of `every` steps or the run."""
        step = self.step + 1
        return step == self.total or (every is not None and step % every == 0)

    def saves(self) -> bool:
        """Return whether a checkpoint follows the current step."""
        return self.is_due(self.options.save_every)

    def is_late(self) -> bool:
        """Return whether the last checkpoint of any process is older than `save_minutes`."""
        minutes = self.options.save_minutes
        if minutes is None:
            return False
        return bool(self.largest(time.monotonic() - self.saved_at >= 60 * minutes))

    def export(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Any:
        """Return the model that is written into the folder of the run.

        Args:
            tensors: The tensors of the checkpoint of the same step.
        """
        return self.model

    def largest(self, number: int) -> int:
        """Return the largest `number` of all processes of the run."""
        if self.accelerator.num_processes == 1:
            return number
        own = torch.tensor([int(number)], device=self.device)
        return int(self.accelerator.gather(own).max())

    def meet(self) -> None:
        """Wait until all processes of the run have called this method."""
        self.accelerator.wait_for_everyone()

    def gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of all processes on the CPU, with a row for each process.

        Args:
            own: Tensors of this process, with the same names and shapes in all processes.
        """
        rows = {
            name: self.accelerator.gather(tensor[None].to(self.device))
            for name, tensor in own.items()
        }
        return {name: tensor.cpu() for name, tensor in rows.items()}

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the random-number generators of this process."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            states["device"] = module.get_rng_state(self.device)
        return states

    def restore_random(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the random-number states of a checkpoint with the same number of processes.

        Args:
            saved: The states that `random_state` returned, with a row for each process.
        """
        own = {name: saved[name][self.accelerator.process_index] for name in self.random_state()}
        for name, current in self.random_state().items():
            checkpoints.check_like(name, own[name], current)
        # torch crashes if the state is a view of a larger tensor, so the row is copied.
        torch.set_rng_state(own["cpu"].clone())
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            module.set_rng_state(own["device"].clone(), self.device)

    def replace_random(self, seed: int) -> None:
        """Seed the random numbers of a run that is resumed with another number of processes."""
        own = self.accelerator.process_index
        torch.manual_seed((seed + own + (self.step << 20)) % 2**63)

    def lap(self) -> float:
        """Return the seconds since the last row of the log, and add them to `seconds`."""
        seconds = time.perf_counter() - self.started
        self.seconds += seconds
        return seconds

    def train(self, batches: Iterable[Any], record: Record, signals: StopSignals) -> int:
        """Make the remaining steps.

        Args:
            batches: The argument of `update` for each step, from the current step on.
            record: Receives the rows of the log.
            signals: The signals that stop the run after a step.

        Returns:
            The number of the signal that stopped the run, or 0.
        """
        if self.has_ended():
            self._complete(record.attempt)
            return 0
        self.train_mode()
        self.started, self.saved_at = time.perf_counter() - self.before, time.monotonic()
        for batch in batches:
            norm = self.train_step(batch)
            logged = self.is_due(self.options.log_every)
            # On devices other than the CPU, the check waits, so only logged steps make it.
            if self.device.type == "cpu" or logged:
                self.refuse_divergence()
            if logged:
                self._report(norm, record)
            self.schedule.step()
            record.progress.step()
            stop = self.largest(signals.received)
            if self.evaluates() and not stop:
                pause = time.perf_counter()
                self.evaluate(record)
                self.started += time.perf_counter() - pause
            if self.saves() or stop or self.is_late():
                self.save(record.attempt)
            self.step += 1
            if stop or self.has_ended():
                return stop
        raise AssertionError("the batches end before the steps")

    def _report(self, norm: float, record: Record) -> None:
        row = self.row(norm)
        record.write(row)
        left = self.seconds / (self.step + 1) * (self.total - self.step - 1)
        record.progress.report(row, left)
        self.started = time.perf_counter()

    def save(self, attempt: Attempts) -> None:
        """Write the model, and a checkpoint from which the run resumes after this step."""
        self.refuse_divergence()
        tensors = self.tensors()
        if self.first and attempt("the checkpoint", lambda: self._write_state(tensors)):
            self.saved = self.step + 1
            attempt("the model", lambda: self._write_model(self.export(tensors)))
        self.saved_at = time.monotonic()
        self.meet()

    def _complete(self, attempt: Attempts) -> None:
        """Write the model of a finished run, unless the folder ``model`` has these weights."""
        tensors = self.tensors()
        if self.first:
            model = self.export(tensors)
            if not has_weights_of(self.options.folder / CHECKPOINT, model):
                attempt("the model", lambda: self._write_model(model))

    def _write_state(self, tensors: dict[str, Mapping[str, Tensor]]) -> None:
        options = self.options
        content = {
            "task": self.task,
            "seconds": self.seconds,
            "before": time.perf_counter() - self.started,
            "options": options.decisive(),
            **self.content(),
        }
        keep = options.keep_checkpoints
        checkpoints.save(options.folder, self.step + 1, content, tensors, self.tokenizer, keep)

    def _write_model(self, model: Any) -> None:
        save_checkpoint(self.options.folder / CHECKPOINT, model, self.tokenizer)

    def restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the state of the run from a checkpoint."""
        content = checkpoint.content
        if content["step"] > self.total:
            raise ValueError(
                f"{checkpoint.folder / checkpoints.STATE}: step: got {content['step']}, "
                f"allowed: at most the {self.total} steps of the run"
            )
        self.step = self.saved = content["step"]
        self.seconds, self.before = content["seconds"], content["before"]
        with checkpoint.fitting("weights") as weights:
            checkpoints.restore_weights(self.model, weights)
        with checkpoint.fitting("optimizer") as moments:
            checkpoints.restore_moments(self.own_optimizer, moments)
        continue_schedule(self.schedule, self.step)

    def continue_from(self, checkpoint: checkpoints.Checkpoint, say: Callable[[str], None]) -> None:
        """Restore the state of the run from a checkpoint, and show the user a line about it."""
        self.restore(checkpoint)
        say(f"resumed after step {self.step:,} of {self.total:,}, from {checkpoint.folder}")
        # Older checkpoints of one process do not have the number of processes.
        earlier = checkpoint.content.get("processes", 1)
        if earlier != self.accelerator.num_processes:
            say(f"the checkpoint is of {earlier} process(es), so dropout draws other masks")

    @contextlib.contextmanager
    def recorded(self, record: Record) -> Iterator[None]:
        """Close `record` at the end of the ``with`` block, and report an interruption."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            kept = record.kept(self.saved)
            record.progress.note(
                f"interrupted in step {self.step + 1} of {self.total}; kept: {kept}"
            )
            raise
        finally:
            record.close()

    def end_if_stopped(self, stop: int, record: Record) -> None:
        """Raise the exception of a signal that stopped the run, unless `stop` is 0."""
        if stop:
            name, kept = signal.Signals(stop).name, record.kept(self.saved)
            record.progress.note(
                f"stopped by {name} after step {self.step} of {self.total}; kept: {kept}"
            )
            raise stopped_by(stop)


def open_record(
    run: Run,
    console: Console,
    signals: StopSignals,
    *,
    resumed: bool,
    describe: Callable[[LogRow], str],
    panels: Mapping[str, str],
    tracker: Tracker | None = None,
) -> Record:
    """Create the folder of a run, open its log, and prepare its messages.

    Args:
        run: The run, at the step where it begins.
        console: Where progress is shown.
        signals: The signals that stop the run.
        resumed: Whether the log has rows of steps before the current step.
        describe: Formats a training row of the log in one line.
        panels: The title of each panel of the curves by the name of its figure.
        tracker: Also receives the rows of the log; None if the run has no tracker.

    Returns:
        The `Record`, which writes the log and shows the messages.

    Raises:
        OSError: If the folder or the log cannot be written.
        ValueError: If a line of the log of a resumed run is damaged.
    """
    folder = run.options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if run.first:
        commit.discard_dead(folder)
    progress = TrainingProgress(console, run.total, run.step, describe)

    def tell(failure: str) -> None:
        step = min(run.step + 1, run.total)
        end = "" if step == run.total or signals.received else "; training continues"
        progress.note(f"step {step}: {failure}{end}")

    rows = rows_until(folder / LOG, run.step) if run.first and resumed else []
    log = RunLog(folder / LOG, rows) if run.first else None
    return Record(folder, log, progress, Attempts(tell), panels, tracker)
