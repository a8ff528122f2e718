"""Attention-based classifiers of movie reviews: trained from scratch, and fine-tuned.

    python -m benchmarks.attention_classifiers --reviews aclImdb --pretrained MODEL --out FOLDER
    python -m benchmarks.attention_classifiers --out FOLDER

Encoders with 8 or 16 heads and 6 or 12 layers are trained from scratch for 20 epochs, and a
pre-trained BERT is fine-tuned for 5 epochs. The reviews have the layout of the IMDB reviews
(Maas et al. 2011): ``train/pos/*.txt``, ``train/neg``, ``test/pos`` and ``test/neg``. A tenth of
the training part is held out for validation.

Without ``--reviews``, reviews are generated, and a small BERT is pre-trained on their text first.
The figures of generated reviews only show that the experiment runs.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.classifiers import HEADER, train, untrained, write
from fastbert import BertConfig
from fastbert.data import stories, train_tokenizer
from fastbert.data.sentences import split_sentences
from fastbert.data.text_folders import read_text_folder
from fastbert.finetuning import ClassifyOptions
from fastbert.training import PretrainOptions, pretrain

# Each pair has a positive and a negative word; "not" before a word reverses its meaning.
OPINIONS = (("good", "bad"), ("moving", "boring"), ("clever", "silly"), ("funny", "dull"))
SUBJECTS = ("The film", "The plot", "The cast", "The ending", "The music")
ADVERBS = ("not", "quite", "really", "truly", "very")
PRETRAINED = "google-bert/bert-base-uncased"


def review(is_good: bool, story: list[str], rng: random.Random) -> str:
    """Return the first two sentences of a story, with two good or two bad opinions inserted."""
    sentences = story[:2]
    for _ in range(2):
        adverb = rng.choice(ADVERBS)
        word = rng.choice(OPINIONS)[is_good == (adverb == "not")]
        opinion = f"{rng.choice(SUBJECTS)} was {adverb} {word}."
        sentences.insert(rng.randrange(len(sentences) + 1), opinion)
    return " ".join(sentences)


def write_reviews(folder: Path, count: int) -> None:
    """Write `count` generated reviews for training and `count` for test, in the layout of IMDB."""
    for seed, part in enumerate(("train", "test")):
        rng = random.Random(seed)
        for number, story in enumerate(stories(count, seed=seed)):
            label = ("neg", "pos")[number % 2]
            path = folder / part / label / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(review(label == "pos", story, rng), encoding="utf-8")


def sentences(folder: Path) -> Iterator[list[str]]:
    """Yield the sentences of each review; a space replaces each HTML tag ``<br />``."""
    for record in read_text_folder(folder):
        yield split_sentences(str(record.values[0]).replace("<br />", " "))


def pretrained(reviews: Path, tokenizer: Path, hidden: int, steps: int, folder: Path) -> Path:
    """Pre-train a small BERT on the generated reviews, and return the folder of the model."""
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    documents = ["\n".join(document) for document in sentences(reviews / "train")]
    text.write_text("\n\n".join(documents), encoding="utf-8")
    options = PretrainOptions(
        folder / "run",
        corpus=text,
        preset="tiny",
        config=sizes(hidden, heads=2, layers=2),
        tokenizer=tokenizer,
        max_length=128,
        tokens_per_batch=2048,
        steps=steps,
        learning_rate=2e-3,
    )
    pretrain(options, console=Console(quiet=True))
    return folder / "run" / "model"


def sizes(hidden: int, *, heads: int, layers: int) -> dict[str, int]:
    """Return the sizes of an encoder as fields of its configuration."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


def main() -> None:
    """Train all classifiers, and write ``attention_classifiers.json``, ``.md`` and ``.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--reviews", type=Path, help="folder of reviews; default generated ones")
    parser.add_argument("--pretrained", help=f"folder or hub id; with --reviews {PRETRAINED}")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--hidden-size", type=int, help="256 with --reviews, and 64 without")
    parser.add_argument("--max-length", type=int, help="256 with --reviews, and 128 without")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=20, help="epochs from scratch")
    parser.add_argument("--pretrained-epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, help="from scratch")
    parser.add_argument("--pretrained-rate", type=float, help="of the pre-trained model")
    parser.add_argument("--count", type=int, default=600, help="generated reviews of each part")
    parser.add_argument("--pretrain-steps", type=int, default=600, help="on generated reviews")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    real = options.reviews is not None
    hidden = options.hidden_size or (256 if real else 64)
    length = options.max_length or (256 if real else 128)
    scratch_rate = options.learning_rate or (1e-4 if real else 5e-4)
    pretrained_rate = options.pretrained_rate or (3e-5 if real else 1e-3)
    reviews = options.reviews or options.out / "reviews"
    if not real:
        write_reviews(reviews, options.count)
    tokenizer = options.out / "tokenizer"
    train_tokenizer(sentences(reviews / "train"), options.vocab_size).save(tokenizer)
    vocab_size = len((tokenizer / "vocab.txt").read_text(encoding="utf-8").splitlines())

    def classify(name: str, model: Path | str, epochs: int, rate: float) -> ClassifyOptions:
        return ClassifyOptions(
            model=model,
            data=reviews,
            output=options.out / name,
            epochs=epochs,
            learning_rate=rate,
            max_length=length,
            precision=options.precision,
            keep_epoch="last",
            log_every=50,
        )

    about = f"{'real' if real else 'generated'} reviews; from scratch with hidden size {hidden}"
    print(f"{about}\n{HEADER}", flush=True)
    classifiers = []
    for layers in options.layers:
        for heads in options.heads:
            folder = options.out / f"untrained-{layers}-{heads}"
            shape = sizes(hidden, heads=heads, layers=layers)
            config = BertConfig(vocab_size=vocab_size, max_position_embeddings=length, **shape)
            untrained(config, tokenizer, folder)
            chosen = classify(f"scratch-{layers}-{heads}", folder, options.epochs, scratch_rate)
            classifiers.append(train(f"from scratch, {layers} layers, {heads} heads", chosen))
    model = options.pretrained or (
        PRETRAINED
        if real
        else pretrained(
            reviews, tokenizer, hidden, options.pretrain_steps, options.out / "pretrained"
        )
    )
    chosen = classify("fine-tuned", model, options.pretrained_epochs, pretrained_rate)
    classifiers.append(train("pre-trained, fine-tuned", chosen))
    write(options.out, "attention_classifiers", about, classifiers)


if __name__ == "__main__":
    main()
