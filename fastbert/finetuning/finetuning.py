"""Fine-tuning of a pre-trained BERT with a head (Devlin et al. 2019, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fastbert import json_file
from fastbert.finetuning.answer import NO_ANSWER_THRESHOLD
from fastbert.finetuning.finetuning_run import FinetuningRun
from fastbert.finetuning.model import Source
from fastbert.finetuning.multi_label import SEPARATOR
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.plots import plot_confusion
from fastbert.finetuning.preparation import Part, encode, fingerprint, read_parts
from fastbert.finetuning.task import Confusion, Task
from fastbert.training import checkpoints, meeting, resume
from fastbert.training.epoch_run import describe
from fastbert.training.log import CURVES, LOG
from fastbert.training.loop import open_record
from fastbert.training.meeting import start_processes
from fastbert.training.model_folder import CHECKPOINT, refuse_existing
from fastbert.training.options import check
from fastbert.training.pretraining_run import TASK as PRETRAINING
from fastbert.training.record import Record
from fastbert.training.signals import StopSignals

if TYPE_CHECKING:
    from accelerate import Accelerator

# Older checkpoints do not contain these options, and their runs used these values.
EARLIER = {
    "keep_epoch": "last",
    "multi_label": False,
    "label_separator": SEPARATOR,
    "no_answer_threshold": NO_ANSWER_THRESHOLD,
}
METRICS, CONFUSION = "metrics.json", "confusion.png"


@dataclass(frozen=True)
class FinetuneResult:
    """The results of a fine-tuning run.

    Attributes:
        model: Folder of the model.
        metrics: Path of ``metrics.json``.
        log: Path of ``log.jsonl``.
        curves: Path of ``curves.png``.
        confusion: Path of ``confusion.png``; None if there is no confusion matrix of the validation
            or test part, or if the picture could not be drawn.
        steps: Number of steps.
        seconds: Duration of the steps in seconds, without evaluations.
        best: The best evaluation: the name of the ``figure``, its ``value``, the ``epoch`` (from 1)
            and the ``step``. None without a validation part.
        kept: The ``epoch`` (from 1) and the ``step`` after which the weights in the folder
            ``model`` were current.
        stopped_early: Whether the run stopped because of ``options.patience``.
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
    best: dict[str, Any] | None
    kept: dict[str, int]
    stopped_early: bool
    figures: dict[str, dict[str, Any]]
    summary: dict[str, str]


def finetune(options: FinetuneOptions, *, console: Console | None = None) -> FinetuneResult:
    """Fine-tune a pre-trained BERT for the task of the options.

    Pass `ClassifyOptions`, `TagOptions` or `AnswerOptions`. The run uses one process, or all
    processes that ``torchrun`` or ``accelerate launch`` starts, with copies of the model (DDP). The
    processes divide the ``options.batch_size`` sequences of each step, so the gradient does not
    depend on the number of processes. On the CPU, the same seed gives the same log, except for
    times.

    The folder ``options.output`` receives these results.

    - ``model/`` has the weights, configuration and tokenizer in the layout of Hugging Face. The
      weights are from the best evaluation by the main figure of the task, or from the last step;
      see ``options.keep_epoch``. The folder is always either complete or absent.
    - ``metrics.json`` has the figures of this model on the training, validation and test parts.
    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures of the validation part. The event
      ``"stop"`` means that the run stopped early.
    - ``curves.png`` shows the loss and the main figure, and marks the best evaluation.
      ``confusion.png`` shows the confusion matrices of the validation and test parts.
    - ``checkpoints/`` has the last checkpoints from which the run can be resumed.

    If the folder has a checkpoint of a run with the same options, data and files of the model, the
    run continues after the step of this checkpoint. On the same machine with the same number of
    processes, its final weights are bitwise equal to the final weights of a run without a stop.
    With another number of processes, dropout draws other masks. One run at a time writes into a
    folder.

    After SIGTERM or SIGINT (Ctrl-C), the run finishes its step, writes a checkpoint and raises
    SystemExit with status 143, or KeyboardInterrupt. A loss or a gradient that is not finite
    changes no weight and stops the run, and the last checkpoint stays. On a GPU, the run stops at
    the next step that is logged or saved. If a file cannot be written, the run shows the error,
    continues, and tries again at the next save.

    Args:
        options: Options of the run, which decide the task.
        console: Console that shows the progress; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        FileNotFoundError: If the model or a data file does not exist.
        ValueError: If the data, the model or the output folder is not usable, if another run is
            writing into the folder, or if an earlier run in the folder has other options. In these
            cases, no file has been written. For data, the message names the file and the line.
        ImportError: If accelerate or matplotlib is not installed, or pyarrow for a .parquet file.
        RuntimeError: If a loss or a gradient is not finite; the message names the batch.
        OSError: If the last checkpoint, the log or a figure could not be written.
    """
    console = console or Console()
    refuse_existing(options.folder, overwrite=options.overwrite)
    accelerator = start_processes("fine-tuning", options.folder)
    if not accelerator.is_main_process:
        console = Console(quiet=True)
    with resume.alone(options.folder, accelerator):
        return _finetune(options, console, accelerator)


def _finetune(
    options: FinetuneOptions, console: Console, accelerator: Accelerator
) -> FinetuneResult:
    """Fine-tune a pre-trained BERT in a folder that no other run writes to."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    task = options.task()
    examples = read_parts(task, options, say)
    for name in () if "validation" in examples else ("patience", "eval_every"):
        value = getattr(options, name)
        check(name, value, "None without a validation part", value is None)
    data = fingerprint(examples)
    anew = resume.starts_anew(options.folder, options.overwrite, accelerator)
    source = Source(options.model)
    checkpoint = None if anew else _resumable(options, task, data, source, accelerator, say)
    longest = min(task.longest or source.config.max_length, source.config.max_length)
    tokenizer = source.tokenizer(options.max_length or longest)
    parts = {name: Part(items, encode(task, items, tokenizer)) for name, items in examples.items()}
    if tokenizer.truncated:
        say(f"{tokenizer.truncated:,} texts were cut to {tokenizer.limit} tokens")
    run = FinetuningRun(options, task, parts, source, tokenizer, data, accelerator)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    say(
        f"model: {trained:,} trained parameters on {run.device}, {run.total:,} steps of "
        f"{options.batch_size} sequences in {options.epochs} epochs on "
        f"{accelerator.num_processes} process(es)"
    )
    if checkpoint is not None:
        run.continue_from(checkpoint, say)
    signals = StopSignals()
    panels = {"loss": "loss", task.main[0]: task.main[1]}
    record = open_record(
        run, console, signals, resumed=checkpoint is not None, describe=describe, panels=panels
    )
    if run.first:
        _remove_earlier(options.folder, with_checkpoints=checkpoint is None)
        meeting.begin(options.folder)
    return _finish(run, record, signals)


def _remove_earlier(folder: Path, *, with_checkpoints: bool) -> None:
    """Remove the figures of an earlier run, and also its checkpoints if `with_checkpoints`."""
    if with_checkpoints:
        checkpoints.forget(folder)
    for name in (METRICS, CONFUSION):
        (folder / name).unlink(missing_ok=True)


def _finish(run: FinetuningRun, record: Record, signals: StopSignals) -> FinetuneResult:
    """Make the remaining steps, evaluate the model, and write the figures."""
    options, task, attempt = run.options, run.judging, record.attempt
    figures: dict[str, dict[str, Any]] = {}
    confusions: dict[str, Confusion] = {}
    with run.recorded(record):
        with record.progress, signals:
            stop = run.train(run.batches(), record, signals) or signals.received
        # All processes take part in an evaluation, so no process may stop alone.
        stop = run.largest(stop)
        if not stop:
            record.progress.note(_kept(run))
            # The figures are those of the model that the user receives.
            run.best.apply()
        for name in () if stop else run.parts:
            judgement = run.judge(name)
            figures[name] = {
                "examples": len(run.parts[name].examples),
                **judgement.figures,
            }
            if judgement.confusion is not None and name != "train":
                confusions[name] = judgement.confusion
    run.end_if_stopped(stop, record)
    best = run.best.evaluation and run.best.evaluation._asdict()
    content = {
        "task": task.name,
        "steps": run.step,
        "seconds": run.seconds,
        "best": best,
        "kept": run.kept(),
        "stopped_early": run.stops_early(),
        "options": options.decisive(),
        "parts": figures,
    }
    if run.first:
        attempt(METRICS, lambda: json_file.write(options.folder / METRICS, content))
    picture = options.folder / CONFUSION
    drawn = bool(confusions)
    if run.first and drawn:
        drawn = attempt.draw(CONFUSION, lambda: plot_confusion(confusions, picture))
    attempt.check(record.kept(run.saved))
    return FinetuneResult(
        model=options.folder / CHECKPOINT,
        metrics=options.folder / METRICS,
        log=options.folder / LOG,
        curves=options.folder / CURVES,
        confusion=picture if drawn else None,
        steps=run.step,
        seconds=run.seconds,
        best=best,
        kept=run.kept(),
        stopped_early=run.stops_early(),
        figures=figures,
        summary={name: task.describe(part_figures) for name, part_figures in figures.items()},
    )


def _kept(run: FinetuningRun) -> str:
    """Return a line that names the model that a finished run writes, and the reason."""
    last, evaluation = run.kept(), run.best.evaluation
    model = f"kept: the model after epoch {last['epoch']} of {run.options.epochs}"
    if run.options.eval_every is not None:
        model = f"kept: the model in epoch {last['epoch']} of {run.options.epochs}"
    model = f"{model} (step {last['step']})"
    if evaluation is None:
        return f"{model}, the last; no validation part says which is the best"
    best = f"the best by {run.judging.main[1]}, {evaluation.value:.4g}"
    if run.best.weights is not None:
        return f"{model}, {best}"
    return (
        f"{model}, the last; {best}, is that of epoch {evaluation.epoch} (step {evaluation.step})"
    )


def _resumable(
    options: FinetuneOptions,
    task: Task,
    data: str,
    source: Source,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> checkpoints.Checkpoint | None:
    """Return the checkpoint that the run continues, or None.

    Raises:
        ValueError: If the checkpoint is of a run with another task, another model, other data or
            other options.
    """
    checkpoint = resume.find(options.folder, say, accelerator)
    if checkpoint is None:
        return None
    content, name = checkpoint.content, "examples of the data, by their SHA-256"
    files = "files of the model, by their SHA-256"
    given = {"task": task.name, name: data, **options.decisive(), files: source.digest}
    # Older checkpoints of pre-training do not name a task.
    earlier = {
        "task": content.get("task", PRETRAINING),
        name: content.get("data"),
        **EARLIER,
        **content["options"],
        files: content.get("source"),
    }
    resume.refuse_another_run(options.folder, given, earlier)
    return checkpoint
