"""Pre-train the same BERT with fastbert and with transformers on real text, side by side.

    python -m benchmarks.real_text --out FOLDER [--steps 300] [--threads 2]

The text is the prose of the installed packages' docstrings. ``fastbert prepare`` cleans it, trains
a vocabulary and writes a corpus. The two models have the same initial weights and no dropout. In
each step, both models get the same padded batch, one after the other, and the order alternates. The
optimizer of both is AdamW with the same settings. The time of a step contains forward, backward,
clipping and the update. Both models are evaluated on the same batches of held-out documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.docstrings import documents, installed
from fastbert import BertConfig, BertForPreTraining, json_file
from fastbert.data import PreparedBatches, PreparedCorpus, PreparedExamples
from fastbert.data.masking import IGNORED
from fastbert.integrations import stock_models
from fastbert.jobs.prepare import PrepareOptions, prepare
from fastbert.machine import describe
from fastbert.training.log import PANELS
from fastbert.training.optimizer import make_optimizer

OURS, STOCK = "fastbert", "transformers"
HELD_OUT = 0.05
# An evaluation uses at most this many of the held-out batches, which are in random order.
EVALUATED = 32
CLIP_NORM = 1.0
Batch = dict[str, Tensor]


def write_corpus(packages: list[str], vocab_size: int, folder: Path) -> PreparedCorpus:
    """Write the text of packages to ``folder/text.jsonl`` and prepare it in ``folder/corpus``."""
    text = folder / "text.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with text.open("w", encoding="utf-8") as file:
        for document in documents(packages):
            file.write(json.dumps({"text": "\n\n".join(document.paragraphs)}) + "\n")
    prepare(PrepareOptions(text, folder / "corpus", vocab_size=vocab_size, workers=1))
    return PreparedCorpus(folder / "corpus")


def split(corpus: PreparedCorpus, length: int, tokens: int) -> tuple[PreparedBatches, list[Batch]]:
    """Return padded batches for training, and batches of the held-out documents."""
    order = np.random.default_rng(0).permutation(len(corpus))
    count = max(2, round(HELD_OUT * len(corpus)))

    def batches(chosen: np.ndarray) -> PreparedBatches:
        examples = PreparedExamples(corpus, max_length=length, seed=0, documents=np.sort(chosen))
        return PreparedBatches(examples, tokens_per_batch=tokens, packed=False)

    return batches(order[count:]), batches(order[:count]).epoch(0)[:EVALUATED]


class Trainee:
    """A model and its optimizer, with the time and the loss of each step.

    Attributes:
        model: The model.
        seconds: Seconds of each step.
        losses: Loss of each step, in nats.
    """

    def __init__(self, model: nn.Module, learning_rate: float, steps: int) -> None:
        """Build the optimizer for a number of steps."""
        self.model = model
        self._optimizer, self._schedule = make_optimizer(
            model, learning_rate=learning_rate, weight_decay=0.01, warmup=0.1, total_steps=steps
        )
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batch: Batch) -> None:
        """Make one update on ``batch``, and record its time and loss."""
        self.model.train()
        begun = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - begun)
        self._schedule.step()
        self.losses.append(float(loss.detach()))


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """Return the loss in nats and the accuracy of MLM and of NSP, from the logits of a model."""
    model.eval()
    sums = dict.fromkeys(PANELS, 0.0)
    masked = pairs = 0
    for batch in batches:
        inputs = {n: x for n, x in batch.items() if n not in ("labels", "next_sentence_label")}
        output = model(**inputs)
        chosen = batch["labels"] != IGNORED
        for task, logits, wanted in (
            ("mlm", output.prediction_logits[chosen], batch["labels"][chosen]),
            ("nsp", output.seq_relationship_logits, batch["next_sentence_label"]),
        ):
            sums[f"{task}_loss"] += float(
                nn.functional.cross_entropy(logits, wanted, reduction="sum")
            )
            sums[f"{task}_accuracy"] += int((logits.argmax(-1) == wanted).sum())
        masked += int(chosen.sum())
        pairs += len(batch["next_sentence_label"])
    return {name: value / (masked if "mlm" in name else pairs) for name, value in sums.items()}


def baseline(batches: list[Batch]) -> float:
    """Return the MLM accuracy of always predicting the most frequent label."""
    labels = torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in batches])
    return int(labels.bincount().max()) / len(labels)


def trainees(config: BertConfig, learning_rate: float, steps: int) -> dict[str, Trainee]:
    """Return both models with the same initial weights."""
    torch.manual_seed(0)
    ours = BertForPreTraining(config)
    stock = stock_models.untrained_pretraining_model(config, "sdpa")
    stock.load_state_dict(ours.state_dict(), strict=True)
    return {
        name: Trainee(model, learning_rate, steps) for name, model in ((OURS, ours), (STOCK, stock))
    }


def contest(
    models: dict[str, Trainee],
    training: PreparedBatches,
    held_out: list[Batch],
    steps: int,
    evaluations: int,
) -> list[dict[str, Any]]:
    """Train both models in turns, and return their figures on held-out batches by step."""
    rows: list[dict[str, Any]] = []
    due = {round(steps * i / evaluations) for i in range(evaluations + 1)}
    done = epoch = 0
    while True:
        for batch in training.epoch(epoch):
            if done in due:
                rows += [
                    {"step": done, "engine": name, **evaluate(trainee.model, held_out)}
                    for name, trainee in models.items()
                ]
                for row in rows[-len(models) :]:
                    print(line(row), flush=True)
            if done == steps:
                return rows
            order = list(models.values())
            for trainee in order if done % 2 else order[::-1]:
                trainee.step(batch)
            done += 1
        epoch += 1


def line(row: dict[str, Any]) -> str:
    """Return the losses and accuracies of an evaluation as a line of a table."""
    return (
        f"| {row['step']} | {row['engine']} | {row['mlm_loss']:.4f} | {row['mlm_accuracy']:.2%} "
        f"| {row['nsp_loss']:.4f} | {row['nsp_accuracy']:.2%} |"
    )


def draw(rows: list[dict[str, Any]], models: dict[str, Trainee], path: Path, caption: str) -> None:
    """Draw the held-out figures of both models in the same axes, and the losses of the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(2, 3).flat)
    for name, style in ((OURS, "-"), (STOCK, "k--")):
        for axes, (key, title) in zip(panels, PANELS.items(), strict=False):
            chosen = [row for row in rows if row["engine"] == name]
            axes.plot([r["step"] for r in chosen], [r[key] for r in chosen], style, label=name)
            axes.set(title=f"held-out {title}", xlabel="step")
        panels[4].plot(models[name].losses, style, label=name, linewidth=1)
    panels[4].set(title="training loss (nats)", xlabel="step")
    apart = [abs(a - b) for a, b in zip(models[OURS].losses, models[STOCK].losses, strict=True)]
    panels[5].semilogy(range(1, len(apart) + 1), [max(x, 1e-8) for x in apart])
    panels[5].set(title="difference of the two training losses (nats)", xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
    for axes in panels[:5]:
        axes.legend()
    figure.suptitle(caption, fontsize=9)
    figure.savefig(path, dpi=100)


def summary(models: dict[str, Trainee]) -> dict[str, float]:
    """Return the times of the steps, their ratio, and the largest difference of the losses."""
    ours, stock = models[OURS], models[STOCK]
    ratios = [b / a for a, b in zip(ours.seconds, stock.seconds, strict=True)]
    apart = [abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)]
    return {
        "seconds_per_step_fastbert": statistics.median(ours.seconds),
        "seconds_per_step_transformers": statistics.median(stock.seconds),
        "ratio_of_total_times": sum(stock.seconds) / sum(ours.seconds),
        "median_ratio_of_steps": statistics.median(ratios),
        "largest_difference_of_losses": max(apart),
        "final_difference_of_losses": apart[-1],
    }


def main() -> None:
    """Prepare the text, train both models and write ``real_text.json`` and ``real_text.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--packages", nargs="+", help="packages whose docstrings are the text")
    parser.add_argument("--preset", default="mini", help="sizes of the model")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--max-length", type=int, default=128, help="tokens per example")
    parser.add_argument("--tokens-per-batch", type=int, default=1024, help="padding included")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both engines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    corpus = write_corpus(options.packages or installed(), options.vocab_size, options.out)
    training, held_out = split(corpus, options.max_length, options.tokens_per_batch)
    config = BertConfig.preset(
        options.preset,
        vocab_size=corpus.tokenizer.vocab_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    text_bytes = (options.out / "text.jsonl").stat().st_size
    about = (
        f"{text_bytes / 1e6:.1f} MB of docstrings, {len(corpus):,} documents, "
        f"{corpus.manifest.count('tokens'):,} tokens after cleaning; "
        f"BERT {options.preset}, {options.steps} steps of {options.tokens_per_batch:,} tokens"
    )
    print(about, flush=True)
    models = trainees(config, options.learning_rate, options.steps)
    rows = contest(models, training, held_out, options.steps, options.evaluations)
    machine = describe()
    result = {
        "about": about,
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": dataclasses.asdict(machine),
        "mlm_baseline_accuracy": baseline(held_out),
        **summary(models),
        "held_out": rows,
        "losses": {name: trainee.losses for name, trainee in models.items()},
        "seconds": {name: trainee.seconds for name, trainee in models.items()},
    }
    json_file.write(options.out / "real_text.json", result, json_file.record)
    draw(rows, models, options.out / "real_text.png", "\n".join([about, *machine.lines()]))
    for name, value in summary(models).items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
