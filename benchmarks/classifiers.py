"""Fine-tune and compare classifiers of texts: training runs, a table and curves of accuracy."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastbert import BertConfig, BertModel, json_file
from fastbert.finetuning import ClassifyOptions, finetune
from fastbert.machine import describe
from fastbert.training.log import read_log

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Classifier:
    """The results of one fine-tuned classifier.

    Attributes:
        name: Name in the table.
        options: Epochs, learning rate and batch size, as text.
        accuracy: Accuracy after the last epoch, by the name of the part.
        examples: Number of examples, by the name of the part.
        per_epoch: Accuracy of the validation part after each epoch.
        seconds: Duration of the steps, in seconds.
    """

    name: str
    options: str
    accuracy: dict[str, float]
    examples: dict[str, int]
    per_epoch: list[float]
    seconds: float


def untrained(config: BertConfig, tokenizer: Path, folder: Path) -> Path:
    """Write a model with random weights and a copy of a tokenizer to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt") and path.name != "config.json":
            shutil.copy(path, folder)
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def train(name: str, options: ClassifyOptions) -> Classifier:
    """Fine-tune a classifier and return its results; an earlier run in the folder is resumed.

    The progress is shown on stderr, and the classifier's line of the table is printed on stdout.
    """
    console = Console(stderr=True)
    console.print(f"{name}:", highlight=False)
    result = finetune(options, console=console)
    rows = [row for row in read_log(result.log) if row["event"] == "evaluation"]
    classifier = Classifier(
        name,
        f"{options.epochs} epochs, {options.learning_rate:g}, {options.batch_size} texts",
        {part: result.figures[part]["accuracy"] for part in PARTS if part in result.figures},
        {part: result.figures[part]["examples"] for part in PARTS if part in result.figures},
        [row["accuracy"] for row in rows],
        result.seconds,
    )
    print(line(classifier), flush=True)
    return classifier


HEADER = (
    "| model | epochs, learning rate, batch | train | validation | test |\n|---|---|---:|---:|---:|"
)


def line(classifier: Classifier) -> str:
    """Return the results as a line of the Markdown table that begins with `HEADER`."""
    cells = [f"{classifier.accuracy[p]:.1%}" if p in classifier.accuracy else "" for p in PARTS]
    return f"| {classifier.name} | {classifier.options} | {' | '.join(cells)} |"


def write(
    folder: Path, stem: str, about: str, classifiers: Sequence[Classifier], **more: Any
) -> None:
    """Write ``<stem>.json``, ``<stem>.md`` and ``<stem>.png`` with results and the machine."""
    machine = describe()
    rows = [dataclasses.asdict(classifier) for classifier in classifiers]
    content = {"about": about, "machine": dataclasses.asdict(machine), "rows": rows, **more}
    json_file.write(folder / f"{stem}.json", content, json_file.record)
    table = "\n".join([HEADER, *map(line, classifiers)])
    header = "\n".join([about, *machine.lines()])
    (folder / f"{stem}.md").write_text(f"{table}\n\n{header}\n", encoding="utf-8")
    _draw(classifiers, folder / f"{stem}.png", header)


def _draw(classifiers: Sequence[Classifier], path: Path, caption: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for classifier in classifiers:
        label = f"{classifier.name} ({classifier.options})"
        epochs = range(1, len(classifier.per_epoch) + 1)
        axes.plot(epochs, classifier.per_epoch, "o-", markersize=4, label=label)
    axes.set(xlabel="epoch", ylabel="accuracy on the validation part")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle(caption, fontsize=6)
    figure.savefig(path, dpi=100)
