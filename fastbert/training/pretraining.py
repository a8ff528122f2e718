"""Pre-training with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.training import checkpoints, meeting, resume
from fastbert.training.log import CURVES, LOG, panels_of
from fastbert.training.loop import open_record
from fastbert.training.meeting import start_processes
from fastbert.training.model_folder import CHECKPOINT, refuse_existing
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import fingerprint, gather_documents, prepare
from fastbert.training.pretraining_run import TASK, PretrainingRun
from fastbert.training.progress import describe
from fastbert.training.signals import StopSignals
from fastbert.training.trackers import Tracker, require_tracker
from fastbert.training.verification import verify

if TYPE_CHECKING:
    from accelerate import Accelerator


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


def pretrain(
    options: PretrainOptions,
    *,
    documents: Iterable[list[str]] | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Pre-train a BERT with masked-LM and next-sentence losses (Devlin et al. 2019, section 3.1).

    The run uses one process, or all processes that ``torchrun`` or ``accelerate launch`` starts,
    with copies (DDP) or shards (FSDP2) of the model. Every process takes ``options.accumulate``
    batches of up to ``options.tokens_per_batch`` tokens per step. With another
    ``options.objective``, the sentence-order loss or no loss replaces the next-sentence loss. On
    the CPU, the same seed gives the same log, except for times.

    The folder ``options.output`` receives four results.

    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures on held-out documents.
    - ``curves.png`` shows the losses and accuracies.
    - ``model/`` has the weights or their moving average, the configuration and the tokenizer in the
      layout of Hugging Face. It is always either complete or absent.
    - ``checkpoints/`` has the last checkpoints from which the run can be resumed.

    If the folder has a checkpoint of a run with the same options and the same text, the run
    continues after the step of the checkpoint. On the same machine and with as many processes, its
    final weights are bit-identical to those of a run that was never stopped; the number of
    `workers` may differ. A run may also continue with another number of processes, if a step has as
    many batches as before. A checkpoint that is damaged is reported, and an earlier checkpoint is
    used. One run at a time writes into a folder.

    After SIGTERM or SIGINT (Ctrl-C), the run finishes its step, writes a checkpoint and raises
    SystemExit with status 143, or KeyboardInterrupt. A second signal, at least one second after the
    first, ends the run at once, without another checkpoint.

    A gradient that is not finite changes no weight and stops the run, and the last checkpoint
    stays. On a GPU, the run stops at the next step that is logged or saved.

    If a file cannot be written, the run shows the error, continues, and tries again at the next
    save. The earlier checkpoint stays complete.

    Args:
        options: Options of the run.
        documents: Documents, each a list of sentences, instead of ``options.corpus``.
        console: Where progress is shown; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        ValueError: If the corpus or the output folder is not usable, if another run is writing into
            the folder, or if an earlier run in the folder has other options; nothing has been
            written then.
        ImportError: If accelerate, matplotlib or the tracker is not installed.
        RuntimeError: If a loss or a gradient is not finite.
        OSError: If the last attempt to write a checkpoint, the model, the log, the curves or the
            rows of the tracker failed.
    """
    console = console or Console()
    refuse_existing(options.folder, overwrite=options.overwrite)
    require_tracker(options.tracker)
    accelerator = start_processes("pre-training", options.folder, tracker=options.tracker)
    if not accelerator.is_main_process:
        console = Console(quiet=True)
    with resume.alone(options.folder, accelerator):
        return _pretrain(options, documents, console, accelerator)


def _pretrain(
    options: PretrainOptions,
    documents: Iterable[list[str]] | None,
    console: Console,
    accelerator: Accelerator,
) -> TrainResult:
    """Pre-train a BERT in a folder that no other run writes to."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    gathered = gather_documents(options, documents)
    if isinstance(gathered, PreparedCorpus):
        verify(gathered, accelerator, console)
    text = fingerprint(gathered)
    anew = resume.starts_anew(options.folder, options.overwrite, accelerator)
    checkpoint = None if anew else _resumable(options, text, accelerator, say)
    tokenizer = None if checkpoint is None else checkpoint.tokenizer()
    batches_per_step = accelerator.num_processes * options.accumulate
    prepared = prepare(options, gathered, say, tokenizer, batches_per_step)
    run = PretrainingRun(options, prepared, text, accelerator)
    parameters = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"model: {parameters:,} parameters on {accelerator.device}, {run.total:,} steps of up to "
        f"{options.tokens_per_batch:,} tokens on {accelerator.num_processes} process(es)"
        + (f", {options.accumulate} batches each" if options.accumulate > 1 else ""),
        highlight=False,
        soft_wrap=True,
    )
    if run.peak is None:
        say(
            "model FLOPs utilization is left out: the peak of this processor in "
            f"{options.precision} is not known"
        )
    if checkpoint is not None:
        run.continue_from(checkpoint, say)
    tracker = None
    if run.first and options.tracker is not None:
        settings = options.decisive()
        tracker = Tracker(
            options.tracker, accelerator, options.folder, step=run.step, settings=settings
        )
    signals = StopSignals()
    record = open_record(
        run,
        console,
        signals,
        resumed=checkpoint is not None,
        describe=describe,
        panels=panels_of(options.objective),
        tracker=tracker,
    )
    if run.first and anew:
        checkpoints.forget(options.folder)
    if run.first:
        meeting.begin(options.folder)
    # The processes that prepare batches ignore signals, and end when `batches` is closed.
    with (
        run.recorded(record),
        record.progress,
        signals,
        contextlib.closing(run.batches()) as batches,
    ):
        stop = run.train(batches, record, signals) or signals.received
    run.end_if_stopped(stop, record)
    record.attempt.check(record.kept(run.saved))
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
    text: str,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> checkpoints.Checkpoint | None:
    """Return the checkpoint that the run continues, or None if there is no checkpoint.

    Raises:
        ValueError: If the checkpoint is of a run with other options, or another text or number of
            batches per step.
    """
    checkpoint = resume.find(options.folder, say, accelerator)
    if checkpoint is None:
        return None
    name, batches = "text of the corpus, by its SHA-256", "processes × accumulate"
    given = {
        "task": TASK,
        batches: accelerator.num_processes * options.accumulate,
        name: text,
        **options.decisive(),
    }
    content = checkpoint.content
    # Checkpoints of older versions name no task. They also lack the options that were added later,
    # and their runs behaved as with the defaults of these options.
    earlier = {
        "task": content.get("task", TASK),
        batches: content.get("processes", 1) * content.get("accumulate", 1),
        name: content.get("documents"),
        **PretrainOptions(options.output).decisive(),
        **content["options"],
    }
    resume.refuse_another_run(options.folder, given, earlier)
    return checkpoint
