"""The demo, which trains, evaluates, saves, reopens and times a small BERT in minutes.

Every claim of the demo is a target with a measured figure. If one target is missed, the demo fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastbert.bench.encoder import (
    MINILM,
    EncoderRow,
    EncoderShape,
    bench_encoder,
    half_padded,
)
from fastbert.data import read_documents, stories
from fastbert.demo.reopen import Pair, Reopened, compare_with_transformers
from fastbert.demo.report import TITLE, DemoReport, Target, write_report
from fastbert.testing import parity
from fastbert.testing.model_parity import check_model
from fastbert.training.examples import Example, predict_words
from fastbert.training.model_folder import CHECKPOINT
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import Documents, split_documents
from fastbert.training.pretraining import TrainResult, pretrain

# A model that is trained on the built-in corpus must reach these figures on held-out stories.
MLM_TIMES_BASELINE = 3.0
NSP_ACCURACY = 0.85
# Expected durations of the phases of a demo in the default size.
EXPECTED = {
    "Corpus": "a second",
    "Pre-training": "1 to 3 minutes on two idle cores",
    "Predictions of the model": "a second",
    "The checkpoint in transformers": "5 seconds, most of them for importing transformers",
    "Parity of every operation and of a training step": "5 seconds",
    "Speed of the encoder": "a minute",
}


@dataclass(frozen=True)
class DemoSize:
    """The amount of work of the demo; the default takes 2 to 4 minutes on two idle cores.

    Attributes:
        documents: Number of stories of the built-in corpus.
        training: Fields of ``PretrainOptions``, by name, for `fastbert.training.pretrain`.
        speed: Batches on which the encoder is timed.
        speed_seconds: Time for each measurement, in seconds.
        speed_dtypes: Dtypes in which the encoder is timed.
    """

    documents: int = 10_000
    training: dict[str, Any] = field(
        default_factory=lambda: {
            "preset": "tiny",
            "config": {
                "num_attention_heads": 4,
                "max_position_embeddings": 128,
                # The usual 0.02 suits a width of 768. A narrow model learns faster with larger
                # initial weights.
                "initializer_range": 0.05,
                # Such a short run underfits, so dropout would only cost accuracy and time.
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "vocab_size": 1024,
            "max_length": 64,
            "tokens_per_batch": 1024,
            "steps": 3400,
            "learning_rate": 1.5e-3,
            "held_out": 0.05,
            "log_every": 100,
            "eval_every": 850,
            "eval_batches": 100,
        }
    )
    speed: tuple[EncoderShape, ...] = (
        EncoderShape("MiniLM-L6 8×128 full", MINILM, (128,) * 8),
        EncoderShape("MiniLM-L6 8×128 half padded", MINILM, half_padded(8, 128)),
    )
    speed_seconds: float = 6.0
    speed_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


class _Phases:
    """Prints each phase with its expected duration, and prints and stores its real duration."""

    def __init__(self, console: Console, total: int, expected: Mapping[str, str]) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console
        self._total = total
        self._expected = expected

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[str], None]]:
        number = len(self.seconds) + 1
        expected = f": takes {self._expected[name]}" if name in self._expected else ""
        self._console.print(
            f"\n[bold]{number}/{self._total} {name}[/]{expected}", highlight=False, soft_wrap=True
        )
        started = time.perf_counter()
        yield lambda text: self._console.print(
            f"  {text}", highlight=False, markup=False, soft_wrap=True
        )
        self.seconds[name] = time.perf_counter() - started
        self._console.print(f"  done in {self.seconds[name]:.1f} s", highlight=False)


def _refuse_foreign(folder: Path) -> None:
    """Raise ValueError if `folder` is a file or has a checkpoint that no earlier demo wrote."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file, allowed: a folder, or an unused name")
    report = folder / "report.md"
    own = report.is_file() and report.read_text(encoding="utf-8").startswith(TITLE)
    if (folder / CHECKPOINT).exists() and not own:
        raise ValueError(
            f"out: {folder} holds a checkpoint that no demo wrote, allowed: another folder"
        )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Write a preliminary report to the folder before the block writes a checkpoint there.

    The report marks the folder as the output of a demo, so that a later demo may replace the
    results of a demo that was stopped. If the block raises an error and there is no checkpoint, the
    report is deleted.
    """
    new, report = not folder.exists(), folder / "report.md"
    unmarked = not report.exists()
    if unmarked:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(f"{TITLE}\n\nThis demo has not finished.\n", encoding="utf-8")
    try:
        yield
    except BaseException:
        if unmarked and not (folder / CHECKPOINT).exists():
            report.unlink()
            if new:
                with suppress(OSError):  # The folder is not empty if the run has begun its log.
                    folder.rmdir()
        raise


def _sample_pairs(documents: Documents, count: int) -> list[Pair]:
    """Build pairs of consecutive texts whose lengths differ, so that a batch has padding."""
    pairs = []
    for index, document in enumerate(documents[:count]):
        middle = len(document) // 2
        size = 1 + index % 3
        pairs.append(
            (" ".join(document[:middle][-size:]), " ".join(document[middle : middle + size]))
        )
    return pairs


def _training_targets(figures: dict[str, float]) -> list[Target]:
    baseline = figures["mlm_baseline_accuracy"]
    times = figures["mlm_accuracy"] / max(baseline, 1e-9)
    return [
        Target(
            "held-out masked-LM accuracy",
            f"{figures['mlm_accuracy']:.1%} = {times:.1f} × most frequent token",
            f"at least {MLM_TIMES_BASELINE:g} × {baseline:.1%}",
            times >= MLM_TIMES_BASELINE,
        ),
        Target(
            "held-out next-sentence accuracy",
            f"{figures['nsp_accuracy']:.1%}",
            f"at least {NSP_ACCURACY:.0%}",
            figures["nsp_accuracy"] >= NSP_ACCURACY,
        ),
    ]


def _reopened_target(reopened: Reopened) -> Target:
    broken = [tensor.name for tensor in reopened.tensors if not tensor.passed]
    figure = f"largest difference {reopened.largest_difference:.1e}"
    if broken:
        figure += "; broken: " + ", ".join(broken)
    if not reopened.same_ids:
        figure += "; the tokenizers differ"
    return Target(
        f"the checkpoint in transformers {reopened.transformers}",
        figure,
        "every tensor within the tolerance rule (fp32), same token ids",
        reopened.passed,
    )


def _parity_target(rows: list[parity.ParityRow]) -> Target:
    failed = sum(not row.passed for row in rows)
    return Target(
        "parity of every operation, and of a training step",
        f"{len(rows) - failed} of {len(rows)} tensors",
        "all within the tolerance rule",
        failed == 0,
    )


def _speed_target(rows: list[EncoderRow]) -> Target:
    """Return the target that every backend is exact enough to be timed.

    The speed itself is not a target, because the demo runs on machines of any speed.
    """
    refused = sorted({row.engine for row in rows if row.refused is not None})
    return Target(
        "every backend's encoder is exact enough to be timed",
        f"refused: {', '.join(refused)}" if refused else "none refused",
        "none refused by the parity gate",
        not refused,
    )


def _read(corpus: str | os.PathLike[str] | None, size: DemoSize, seed: int) -> Documents:
    """Read the user's corpus, or generate the built-in corpus."""
    if corpus is not None:
        return list(read_documents(corpus))
    return list(stories(size.documents, seed))


def _look(
    result: TrainResult, held_out: Documents, max_length: int, phase: _Phases
) -> tuple[list[Example], Reopened | None]:
    """Predict masked words with the saved model and compare the model with transformers."""
    with phase("Predictions of the model") as say:
        examples = predict_words(result.checkpoint, held_out[:4], max_length)
        for example in examples:
            say(f"{example.text}  →  {', '.join(example.guesses)}  (was: {example.truth})")
    with phase("The checkpoint in transformers") as say:
        pairs = _sample_pairs(held_out, 12)
        reopened = compare_with_transformers(result.checkpoint, pairs, max_length=max_length)
        if reopened is None:
            say("transformers is not installed, so the checkpoint is not compared with it")
        else:
            say(_reopened_target(reopened).figure)
    return examples, reopened


def _measure(size: DemoSize, phase: _Phases) -> tuple[list[parity.ParityRow], list[EncoderRow]]:
    """Measure the errors of every operation and of a training step, and the encoder's speed."""
    with phase("Parity of every operation and of a training step") as say:
        rows = [*parity.check(quick=True), *check_model()]
        say(f"{_parity_target(rows).figure} within the tolerance rule")
    with phase("Speed of the encoder") as say:
        speed = bench_encoder(
            size.speed, dtypes=size.speed_dtypes, seconds=size.speed_seconds, notify=say
        )
    return rows, speed


def run_demo(
    out_dir: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    seed: int = 0,
    size: DemoSize | None = None,
    console: Console | None = None,
) -> DemoReport:
    """Train, evaluate and save a small BERT, reopen it in transformers, and time the encoder.

    The demo also compares every operation with the reference. It writes ``report.md``,
    ``report.json``, plots, the log of the training and ``model/``. A missed target does not raise
    an error, so the caller reads ``DemoReport.passed``.

    Args:
        out_dir: Folder of the results. The results of an earlier demo there are replaced.
        corpus: File or folder for `fastbert.data.read_documents`, instead of the built-in stories.
            The accuracies on this corpus are reported, but they are not targets, because the
            attainable accuracy of an arbitrary corpus is unknown.
        seed: Seed of the stories and of the training.
        size: Amount of work; None takes 2 to 4 minutes on two idle cores.
        console: Where progress is shown; None shows it on the standard output.

    Returns:
        The results.

    Raises:
        ValueError: If the corpus or the folder is not usable; nothing has been written then.
    """
    folder, size, console = Path(out_dir), size or DemoSize(), console or Console()
    _refuse_foreign(folder)
    options = PretrainOptions(output=folder, overwrite=True, seed=seed, **size.training)
    phase = _Phases(console, 6, EXPECTED if size == DemoSize() else {})
    source = "built-in stories" if corpus is None else os.fspath(corpus)
    with phase("Corpus") as say:
        documents = _read(corpus, size, seed)
        say(f"{source}: {len(documents):,} documents, {sum(map(len, documents)):,} sentences")
        say(f"it begins: {' '.join(documents[0])[:160]} …")
    with phase("Pre-training"), _claimed(folder):
        result = pretrain(options, documents=documents, console=console)
    _, held_out = split_documents(documents, fraction=options.held_out, seed=seed)
    examples, reopened = _look(result, held_out, options.max_length, phase)
    rows, speed = _measure(size, phase)
    targets = _training_targets(result.evaluation) if corpus is None and result.evaluation else []
    if reopened is not None:
        targets.append(_reopened_target(reopened))
    targets += [_parity_target(rows), _speed_target(speed)]
    report = DemoReport(
        folder, source, targets, result, examples, reopened, rows, speed, phase.seconds
    )
    write_report(report, seed)
    return report
