"""Training of an encoder–decoder (Vaswani et al. 2017) on pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fastbert import json_file
from fastbert.finetuning.preparation import fingerprint
from fastbert.seq2seq.options import Seq2SeqOptions
from fastbert.seq2seq.preparation import Say, encode, read_parts, train_tokenizer
from fastbert.seq2seq.seq2seq_run import TASK, Judgement, Seq2SeqRun
from fastbert.training import checkpoints, meeting, resume
from fastbert.training.epoch_run import describe
from fastbert.training.log import CURVES, LOG
from fastbert.training.loop import open_record
from fastbert.training.meeting import start_processes
from fastbert.training.model_folder import CHECKPOINT, refuse_existing
from fastbert.training.record import Record
from fastbert.training.signals import StopSignals

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS = "metrics.json"
PANELS = {"loss": "loss with label smoothing (nats)", "exact_match": "exact match"}
# Numbers of outputs in the result: outputs of any kind, and outputs with a mistake.
SHOWN, MISTAKES = 5, 20


@dataclass(frozen=True)
class Seq2SeqResult:
    """The results of a seq2seq run.

    Attributes:
        model: Folder of the model.
        metrics: Path of ``metrics.json``.
        log: Path of ``log.jsonl``.
        curves: Path of ``curves.png``.
        steps: Number of steps.
        seconds: Duration of the steps in seconds, without evaluations.
        pairs: Number of pairs of the parts ``"train"`` and ``"validation"``.
        figures: The figures of the final model on the held-out pairs: ``loss``, and
            ``exact_match``, the fraction of the sources whose target is written exactly.
        examples: The first held-out pairs with the ``source``, the expected ``target`` and the
            ``output`` of the model.
        mistakes: The first held-out pairs with another output than the target.
    """

    model: Path
    metrics: Path
    log: Path
    curves: Path
    steps: int
    seconds: float
    pairs: dict[str, int]
    figures: dict[str, float]
    examples: list[dict[str, str]]
    mistakes: list[dict[str, str]]


def train(options: Seq2SeqOptions, *, console: Console | None = None) -> Seq2SeqResult:
    """Train an encoder–decoder on pairs of texts, and evaluate it on held-out pairs.

    The run uses one process, or all processes that ``torchrun`` or ``accelerate launch`` starts,
    with copies of the model (DDP). The processes divide the ``options.batch_size`` pairs of each
    step. On the CPU, the same seed gives the same log, except for times.

    The folder ``options.output`` receives these results.

    - ``model/`` has the weights, configuration and tokenizer after the last step.
      ``Transformer.from_pretrained`` opens the folder, and so does ``MarianMTModel`` of
      transformers unless ``normalize_before`` is set. The folder is always either complete or
      absent.
    - ``metrics.json`` has the figures of this model on the held-out pairs, and its first mistakes.
    - ``log.jsonl`` has one JSON object per line. The event ``"train"`` has means since the last
      such event, and the event ``"evaluation"`` has figures of the held-out pairs.
    - ``curves.png`` shows the loss and the exact match.
    - ``checkpoints/`` has the last checkpoints from which the run can be resumed.

    If the folder has a checkpoint of a run with the same options and data, the run continues after
    the step of this checkpoint. On the same machine with the same number of processes, its final
    weights are bitwise equal to the final weights of a run without a stop. Signals, divergence and
    failed writes are handled as in `fastbert.finetuning.finetune`.

    Args:
        options: Options of the run.
        console: Console that shows the progress; None shows it on the standard output.

    Returns:
        Paths and figures of the run.

    Raises:
        FileNotFoundError: If a data file does not exist.
        ValueError: If the data or the output folder are not usable, if another run is writing into
            the folder, or if an earlier run in the folder has other options. In these cases, no
            file has been written. For data, the message names the file and the line.
        ImportError: If accelerate or matplotlib is not installed, or pyarrow for a .parquet file.
        RuntimeError: If a loss or a gradient is not finite; the message names the batch.
        OSError: If the last checkpoint, the log or a figure could not be written.
    """
    console = console or Console()
    refuse_existing(options.folder, overwrite=options.overwrite)
    accelerator = start_processes("seq2seq training", options.folder)
    if not accelerator.is_main_process:
        console = Console(quiet=True)
    with resume.alone(options.folder, accelerator):
        return _train(options, console, accelerator)


def _train(options: Seq2SeqOptions, console: Console, accelerator: Accelerator) -> Seq2SeqResult:
    """Train in a folder that no other run writes to."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    pairs = read_parts(options)
    data = fingerprint(pairs)
    anew = resume.starts_anew(options.folder, options.overwrite, accelerator)
    checkpoint = None if anew else _resumable(options, data, accelerator, say)
    tokenizer = train_tokenizer(pairs["train"], options.merges or 0)
    parts = encode(pairs, tokenizer, options.max_length, say)
    run = Seq2SeqRun(options, parts, tokenizer, data, accelerator)
    say(
        f"{options.data_name}: {len(parts['train']):,} pairs to train on, "
        f"{len(parts['validation']):,} held out; {tokenizer.size:,} different pieces"
    )
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    say(
        f"model: {parameters:,} parameters on {run.device}, {run.total:,} steps of "
        f"{options.batch_size} pairs in {options.epochs} epochs on "
        f"{accelerator.num_processes} process(es)"
    )
    if checkpoint is not None:
        run.continue_from(checkpoint, say)
    signals = StopSignals()
    record = open_record(
        run, console, signals, resumed=checkpoint is not None, describe=describe, panels=PANELS
    )
    if run.first:
        if checkpoint is None:
            checkpoints.forget(options.folder)
        (options.folder / METRICS).unlink(missing_ok=True)
        meeting.begin(options.folder)
    return _finish(run, record, signals)


def _finish(run: Seq2SeqRun, record: Record, signals: StopSignals) -> Seq2SeqResult:
    """Make the remaining steps, evaluate the model, and write the figures."""
    options, attempt = run.options, record.attempt
    judgement = Judgement({}, [])
    with run.recorded(record):
        with record.progress, signals:
            stop = run.train(run.batches(), record, signals) or signals.received
        # All processes take part in an evaluation, so no process may stop alone.
        stop = run.largest(stop)
        if not stop:
            # The last step is evaluated, unless an earlier run made it.
            judgement = run.judgement or run.judge("validation")
    run.end_if_stopped(stop, record)
    told = [
        {"source": feature.pair.source, "target": feature.pair.target, "output": output}
        for feature, output in zip(run.parts["validation"], judgement.outputs, strict=True)
    ]
    mistakes = [each for each in told if each["output"] != each["target"]]
    result = Seq2SeqResult(
        model=options.folder / CHECKPOINT,
        metrics=options.folder / METRICS,
        log=options.folder / LOG,
        curves=options.folder / CURVES,
        steps=run.step,
        seconds=run.seconds,
        pairs={name: len(features) for name, features in run.parts.items()},
        figures=judgement.figures,
        examples=told[:SHOWN],
        mistakes=mistakes[:MISTAKES],
    )
    content = {
        "task": TASK,
        "steps": result.steps,
        "seconds": result.seconds,
        "options": options.decisive(),
        "pairs": result.pairs,
        "held_out": result.figures,
        "mistakes": result.mistakes,
    }
    if run.first:
        attempt(METRICS, lambda: json_file.write(options.folder / METRICS, content))
    attempt.check(record.kept(run.saved))
    return result


def _resumable(
    options: Seq2SeqOptions, data: str, accelerator: Accelerator, say: Say
) -> checkpoints.Checkpoint | None:
    """Return the checkpoint that the run continues, or None.

    Raises:
        ValueError: If the checkpoint is of another kind of run, or of a run with other data or
            options.
    """
    checkpoint = resume.find(options.folder, say, accelerator)
    if checkpoint is None:
        return None
    content, name = checkpoint.content, "pairs, by their SHA-256"
    given = {"kind of run": TASK, **options.decisive(), name: data}
    # Checkpoints of pre-training do not name their kind of run.
    earlier = {
        **content["options"],
        "kind of run": content.get("task", "pretraining"),
        name: content.get("data"),
    }
    resume.refuse_another_run(options.folder, given, earlier)
    return checkpoint
