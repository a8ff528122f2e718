"""The demo's ``report.md``, ``report.json`` and speed chart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert import machine
from fastbert.bench.plots import plot_bench

if TYPE_CHECKING:
    from fastbert.bench.encoder import EncoderRow
    from fastbert.demo.reopen import Reopened
    from fastbert.testing.parity import ParityRow
    from fastbert.training.examples import Example
    from fastbert.training.pretraining import TrainResult

# A later demo recognizes the folder of an earlier demo by this first line of its report.
TITLE = "# fastbert demo"


@dataclass(frozen=True)
class Target:
    """One claim of the demo.

    Attributes:
        name: The claim.
        figure: The measured figure, as text.
        needed: The required figure, as text.
        passed: Whether the figure is sufficient.
    """

    name: str
    figure: str
    needed: str
    passed: bool


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo.

    Attributes:
        folder: Folder of the results.
        corpus: Path of the user's corpus, or ``"built-in stories"``.
        targets: The claims, each with its figure.
        training: Results of the pre-training.
        examples: Masked words in held-out text, with the predictions of the model.
        reopened: Comparison with transformers; None if transformers is not installed.
        parity: Errors of every operation and of a training step against the reference.
        speed: Measurements of the encoder.
        seconds: Duration of each phase, in seconds.
    """

    folder: Path
    corpus: str
    targets: list[Target]
    training: TrainResult
    examples: list[Example]
    reopened: Reopened | None
    parity: list[ParityRow]
    speed: list[EncoderRow]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether all targets are reached."""
        return all(target.passed for target in self.targets)

    @property
    def report(self) -> Path:
        """Path of ``report.md``."""
        return self.folder / "report.md"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def _result(passed: bool) -> str:
    return "ok" if passed else "**missed**"


def _targets(report: DemoReport) -> list[str]:
    rows = [(t.name, t.figure, t.needed, _result(t.passed)) for t in report.targets]
    return ["## Targets", "", *_table(("target", "figure", "needed", "result"), rows)]


def _training(report: DemoReport) -> list[str]:
    result, figures = report.training, report.training.evaluation
    lines = [
        "## Pre-training",
        "",
        f"Corpus: {report.corpus}. {result.parameters:,} parameters, {result.steps:,} steps, "
        f"{result.tokens:,} tokens in {result.seconds:.0f} s "
        f"({result.tokens_per_second:,.0f} tokens/s).",
        "",
    ]
    if figures is not None:
        rows = [
            ("masked LM", f"{figures['mlm_loss']:.3f}", f"{figures['mlm_accuracy']:.1%}"),
            ("always the most frequent token", "", f"{figures['mlm_baseline_accuracy']:.1%}"),
            ("next sentence", f"{figures['nsp_loss']:.3f}", f"{figures['nsp_accuracy']:.1%}"),
        ]
        lines += _table(("held-out", "loss (nats)", "accuracy"), rows)
    lines += ["![curves](curves.png)", ""]
    if report.examples:
        rows = [(e.text, e.truth, ", ".join(e.guesses)) for e in report.examples]
        lines += ["Predictions of the model for masked words in held-out text:", ""]
        lines += _table(("text", "was", "guesses"), rows)
    return lines


def _reopened(report: DemoReport) -> list[str]:
    lines = ["## The checkpoint in transformers", ""]
    reopened = report.reopened
    if reopened is None:
        return [*lines, "transformers is not installed, so no comparison was made.", ""]
    same = "gave the same ids" if reopened.same_ids else "**gave different ids**"
    lines += [
        f"transformers {reopened.transformers} opened `model/` and computed one padded batch of "
        f"{reopened.pairs} pairs of up to {reopened.longest} tokens. Both tokenizers {same}. "
        "The table has the errors of fastbert in fp32 against transformers in float64. The "
        "yardstick is the error of transformers in fp32.",
        "",
    ]
    rows = [
        (t.name, f"{t.error:.2e}", f"{t.yardstick:.2e}", f"{t.ratio:.2f}", _result(t.passed))
        for t in reopened.tensors
    ]
    return lines + _table(("tensor", "error", "yardstick", "ratio", "result"), rows)


def summarise_parity(rows: Iterable[ParityRow]) -> list[tuple[str, str, str, int, float, bool]]:
    """Summarize the parity of each operation, backend and dtype.

    Returns:
        One tuple per group: operation, backend, dtype, number of tensors, worst ratio, and whether
        all tensors passed.
    """
    groups: dict[tuple[str, str, str], list[ParityRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.dtype), []).append(row)
    return [
        (*key, len(group), max(row.ratio for row in group), all(row.passed for row in group))
        for key, group in groups.items()
    ]


def _parity(report: DemoReport) -> list[str]:
    rows = [
        (op, backend, dtype, str(count), f"{worst:.2f}", _result(passed))
        for op, backend, dtype, count, worst, passed in summarise_parity(report.parity)
    ]
    return [
        "## Parity",
        "",
        "The table has the forward pass and the gradients of every operation, on every backend "
        "that runs on this machine. The ratio is error ÷ yardstick. At a ratio of 1, the operation "
        "is as exact as PyTorch in the same dtype. `fastbert check` runs more cases.",
        "",
        *_table(("operation", "backend", "dtype", "tensors", "worst ratio", "result"), rows),
    ]


def _speed_cells(row: EncoderRow) -> tuple[str, ...]:
    if row.seconds is None:
        return (row.shape, row.dtype, row.engine, row.refused or "", "", "")
    faster = "" if row.speedup is None else f"{row.speedup:.2f} ×"
    tokens = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    return (row.shape, row.dtype, row.engine, f"{row.seconds * 1e3:.1f}", tokens, faster)


def _speed(report: DemoReport) -> list[str]:
    header = ("batch", "dtype", "engine", "ms", "real tokens/s", "against transformers' best")
    return [
        "## Speed",
        "",
        "The table has medians of the encoder's forward pass with random weights, all measured in "
        "one run.",
        "",
        *_table(header, map(_speed_cells, report.speed)),
        "![speed](speed.png)",
        "",
    ]


def render(report: DemoReport, seed: int) -> str:
    """Return the text of ``report.md``."""
    phases = ", ".join(f"{name.lower()} {s:.0f} s" for name, s in report.seconds.items())
    lines = [
        TITLE,
        "",
        f"{'Passed' if report.passed else '**Failed**'}. Seed {seed}. Time: {phases}; "
        f"together {sum(report.seconds.values()):.0f} s.",
        "",
        *[f"- {line}" for line in machine.describe().lines()],
        "",
        *_targets(report),
        *_training(report),
        *_reopened(report),
        *_parity(report),
        *_speed(report),
        "## Files",
        "",
        "- `model/`: weights, configuration, tokenizer; opens with `fastbert` and `transformers`",
        "- `log.jsonl`: one object per logged step · `report.json`: the results above as JSON",
        "",
    ]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else repr(value)


def write_report(report: DemoReport, seed: int) -> None:
    """Write ``speed.png``, ``report.json`` and, last, ``report.md`` to the report's folder."""
    speed = report.folder / ".speed.partial.png"
    plot_bench(speed, [], report.speed, machine.describe())
    speed.replace(report.folder / "speed.png")
    content = {"passed": report.passed, "seed": seed, **dataclasses.asdict(report)}
    for name, text in (
        ("report.json", json.dumps(content, indent=1, default=_plain) + "\n"),
        ("report.md", render(report, seed)),
    ):
        partial = report.folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(report.folder / name)
