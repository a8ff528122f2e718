"""The demo: from a seed to a trained, evaluated, saved, reopened and timed BERT, in minutes.

Every claim is a target with a figure; a missed one makes the whole demo fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
from fastbert.testing import parity
from fastbert.testing.model_parity import check_model
from fastbert.training.checkpoint import CHECKPOINT
from fastbert.training.examples import Example, fill_masks
from fastbert.training.loop import TrainResult, pretrain
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import Documents, split_documents
from fastbert.training.reopen import Pair, Reopened, compare_with_transformers
from fastbert.training.report import TITLE, DemoReport, Target, write_report

# What the built-in corpus must reach on held-out stories.
MLM_TIMES_BASELINE = 3.0
NSP_ACCURACY = 0.85


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does. The default is made for two slow cores and about four minutes."""

    documents: int = 10_000
    training: dict[str, Any] = field(
        default_factory=lambda: {
            "preset": "tiny",
            "config": {
                "num_attention_heads": 4,
                "max_position_embeddings": 128,
                # 0.02 suits a width of 768; a narrow model learns sooner from larger weights.
                "initializer_range": 0.05,
                # A run this short underfits: dropout would only cost accuracy and time.
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
    """Announces each phase and keeps how long it took."""

    def __init__(self, console: Console, total: int) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console
        self._total = total

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[str], None]]:
        number = len(self.seconds) + 1
        self._console.print(
            f"\n[bold]{number}/{self._total} {name}[/]", highlight=False, soft_wrap=True
        )
        started = time.perf_counter()
        yield lambda text: self._console.print(
            f"  {text}", highlight=False, markup=False, soft_wrap=True
        )
        self.seconds[name] = time.perf_counter() - started


def _refuse_foreign(folder: Path) -> None:
    """The demo replaces what an earlier demo wrote, and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file, allowed: a folder, or a name not taken")
    report = folder / "report.md"
    own = report.is_file() and report.read_text(encoding="utf-8").startswith(TITLE)
    if (folder / CHECKPOINT).exists() and not own:
        raise ValueError(
            f"out: {folder} holds a checkpoint that no demo wrote, allowed: another folder"
        )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Marks the folder as a demo's before it holds a checkpoint, so that a demo that is stopped can
    begin again there."""
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
                with suppress(OSError):  # the log of a run that has begun
                    folder.rmdir()
        raise


def _sample_pairs(documents: Documents, count: int) -> list[Pair]:
    """Neighbouring halves of different lengths, so that padding them together leaves padding."""
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
    """Speed is no target, as the machine is anyone's; that every engine may be timed is one."""
    refused = sorted({row.engine for row in rows if row.refused is not None})
    return Target(
        "every backend's encoder is exact enough to be timed",
        f"refused: {', '.join(refused)}" if refused else "none refused",
        "none refused by the parity gate",
        not refused,
    )


def _read(corpus: str | os.PathLike[str] | None, size: DemoSize, seed: int) -> Documents:
    """The user's corpus, or the built-in one."""
    if corpus is not None:
        return list(read_documents(corpus))
    return list(stories(size.documents, seed))


def _look(
    result: TrainResult, held_out: Documents, max_length: int, phase: _Phases
) -> tuple[list[Example], Reopened | None]:
    """Fills blanks with the saved model and compares it with transformers."""
    with phase("What it learnt") as say:
        examples = fill_masks(result.checkpoint, held_out[:4], max_length)
        for example in examples:
            say(f"{example.text}  →  {', '.join(example.guesses)}  (was: {example.truth})")
    with phase("The checkpoint in transformers") as say:
        pairs = _sample_pairs(held_out, 12)
        reopened = compare_with_transformers(result.checkpoint, pairs, max_length=max_length)
        if reopened is None:
            say("transformers is not installed: not compared")
        else:
            say(_reopened_target(reopened).figure)
    return examples, reopened


def _measure(size: DemoSize, phase: _Phases) -> tuple[list[parity.ParityRow], list[EncoderRow]]:
    """The parity table and the speed table."""
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
    """Trains a tokenizer and a small BERT, evaluates it on held-out text, reopens it in
    transformers, checks every operation and times the encoder.

    Writes ``report.md``, ``report.json``, plots, the log and ``model/`` to ``out_dir``; what an
    earlier demo left there is replaced. ``corpus`` (see ``fastbert.data.read_documents``) takes the
    place of the built-in stories; its accuracies are reported but are no targets, as nobody knows
    what can be learnt from it. The caller decides by ``DemoReport.passed``. Raises ValueError for
    an unusable corpus or folder before anything is written.
    """
    folder, size, console = Path(out_dir), size or DemoSize(), console or Console()
    _refuse_foreign(folder)
    options = PretrainOptions(output=folder, overwrite=True, seed=seed, **size.training)
    phase = _Phases(console, 6)
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
