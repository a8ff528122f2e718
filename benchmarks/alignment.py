"""The alignment that each score learns on a toy task of translation.

    python -m benchmarks.alignment --out FOLDER [--steps 800] [--threads 2]

A grammar writes English sentences with their French translations, in which adjectives follow the
noun and adverbs follow the verb. A translator with one bidirectional GRU, one GRU and one alignment
between them is trained for each score of ``fastbert.modules.alignment``. The results are the share
of right words and the share of the weights on the right word, on sentences that were held out, and
a picture of the weights for one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import json_file
from fastbert.machine import describe
from fastbert.modules import alignment
from fastbert.picture import picture

DETERMINERS = {"the": "le", "a": "un", "this": "ce", "my": "mon", "your": "ton"}
ADJECTIVES = {
    "black": "noir", "white": "blanc", "red": "rouge", "green": "vert", "fast": "rapide",
    "wild": "sauvage", "shy": "timide", "calm": "calme",
}  # fmt: skip
NOUNS = {
    "dog": "chien", "cat": "chat", "horse": "cheval", "wolf": "loup", "fox": "renard",
    "duck": "canard", "rabbit": "lapin", "lion": "lion", "rat": "rat",
}  # fmt: skip
VERBS = {
    "sees": "voit", "hears": "entend", "follows": "suit", "finds": "trouve", "fears": "craint",
    "knows": "connaît",
}  # fmt: skip
ADVERBS = {"often": "souvent", "always": "toujours", "rarely": "rarement", "now": "maintenant"}
DICTIONARY = DETERMINERS | ADJECTIVES | NOUNS | VERBS | ADVERBS | {".": "."}
SHOWN = "the fast black dog often sees a white cat ."
SIZE = 32
BATCH = 64


class Pair(NamedTuple):
    """A sentence, its translation, and the place in the sentence of each translated word."""

    source: list[str]
    target: list[str]
    places: list[int]


def translate(source: Sequence[str]) -> Pair:
    """Translate a sentence: adjectives follow their noun, in reverse, and adverbs their verb."""
    places: list[int] = []
    waiting: list[int] = []
    for place, word in enumerate(source):
        if word in ADJECTIVES or word in ADVERBS:
            waiting.append(place)
            continue
        places += [place, *reversed(waiting)]
        waiting = []
    return Pair(list(source), [DICTIONARY[source[place]] for place in places], places)


def sentence(rng: random.Random) -> tuple[str, ...]:
    """Draw a sentence: two noun phrases with a verb between them, and perhaps an adverb."""

    def phrase() -> list[str]:
        adjectives = rng.sample(list(ADJECTIVES), rng.choice((0, 1, 1, 2)))
        return [rng.choice(list(DETERMINERS)), *adjectives, rng.choice(list(NOUNS))]

    adverb = [rng.choice(list(ADVERBS))] if rng.random() < 0.5 else []
    return (*phrase(), *adverb, rng.choice(list(VERBS)), *phrase(), ".")


def sentences(train: int, test: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return pairs to train and pairs to test, all different; the first test pair is ``SHOWN``."""
    rng, found = random.Random(seed), {tuple(SHOWN.split()): None}
    while len(found) < train + test:
        found.setdefault(sentence(rng))
    pairs = [translate(words) for words in found]
    return pairs[test:], pairs[:test]


class Batch(NamedTuple):
    """Pairs as tensors; 0 is padding, and the places of padding are -1."""

    source: Tensor
    target: Tensor
    places: Tensor


SOURCE = {word: n for n, word in enumerate(DICTIONARY, 1)}
TARGET = {word: n for n, word in enumerate(DICTIONARY.values(), 1)}


def batch_of(pairs: Sequence[Pair]) -> Batch:
    """Return pairs as one padded batch."""

    def padded(rows: list[list[int]], filling: int) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [filling] * (longest - len(row)) for row in rows])

    return Batch(
        padded([[SOURCE[word] for word in pair.source] for pair in pairs], 0),
        padded([[TARGET[word] for word in pair.target] for pair in pairs], 0),
        padded([pair.places for pair in pairs], -1),
    )


class Translator(nn.Module):
    """An encoder and a decoder with an alignment between them, after Luong et al. 2015.

    The decoder reads the earlier words of the right translation, so that all words of a sentence
    are computed at once. Its states are the queries, and the states of the encoder are the keys and
    the values. The decoder starts at 0, so it knows the sentence through the alignment only.
    """

    def __init__(self, align: alignment.Alignment) -> None:
        super().__init__()
        self.source = nn.Embedding(len(SOURCE) + 1, SIZE, padding_idx=0)
        self.target = nn.Embedding(len(TARGET) + 1, SIZE, padding_idx=0)
        self.encoder = nn.GRU(SIZE, SIZE // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(SIZE, SIZE, batch_first=True)
        self.align = align
        self.joined = nn.Linear(2 * SIZE, SIZE)
        self.words = nn.Linear(SIZE, len(TARGET) + 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits, weights, and the log-probability of the positions of hard attention."""
        mask = batch.source != 0
        packed = nn.utils.rnn.pack_padded_sequence(
            self.source(batch.source), mask.sum(1), batch_first=True, enforce_sorted=False
        )
        keys, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        query, _ = self.decoder(self.target(F.pad(batch.target, (1, -1))))
        is_hard = self.align.attend == "hard"
        options = {"return_log_probability": True} if is_hard else {}
        context, weights, *rest = self.align(query, keys, keys, mask, **options)
        both = torch.tanh(self.joined(torch.cat([context, query], dim=-1)))
        return self.words(both), weights, rest[0] if rest else None


def general(**options: Any) -> alignment.Alignment:
    return alignment.General(SIZE, SIZE, **options)


# Name of a contender → the function that makes its alignment. The picture leaves out the first.
CONTENDERS: dict[str, Callable[[], alignment.Alignment]] = {
    "content-based, β = 1": alignment.ContentBased,
    "content-based, β = 8": lambda: alignment.ContentBased(strength=8.0),
    "additive": lambda: alignment.Additive(SIZE, SIZE, SIZE),
    "location-based": lambda: alignment.LocationBased(SIZE, 16),
    "general": general,
    "dot": alignment.Dot,
    "scaled dot": alignment.ScaledDot,
    "general, local monotonic, D = 2": lambda: general(local=alignment.Monotonic(2)),
    "general, local predictive, D = 2": lambda: general(local=alignment.Predictive(SIZE, 2)),
    "general, hard": lambda: general(attend="hard"),
}


class Row(NamedTuple):
    """The result of one score: shares on the test pairs, and the weights of the first pair."""

    name: str
    right_words: float
    weight_on_right_word: float
    largest_on_right_word: float
    seconds: float
    weights: list[list[float]]


def train(model: Translator, pairs: Sequence[Pair], steps: int, rate: float) -> None:
    """Train by the log-likelihood of the words, and hard attention by REINFORCE too."""
    rng, reinforce = random.Random(0), alignment.Reinforce()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        batch = batch_of(rng.sample(pairs, min(BATCH, len(pairs))))
        logits, _, log_probability = model(batch)
        real = batch.target != 0
        losses = F.cross_entropy(logits.mT, batch.target, ignore_index=0, reduction="none")
        loss = losses.sum() / real.sum()
        if log_probability is not None:
            # The position of a word changes the likelihood of this word only.
            loss = loss + reinforce(log_probability * real, -losses) * len(real) / real.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def judge(name: str, model: Translator, pairs: Sequence[Pair], seconds: float) -> Row:
    """Return the shares on test pairs."""
    batch = batch_of(pairs)
    logits, weights, _ = model.eval()(batch)
    real = batch.target != 0
    right = (logits.argmax(-1) == batch.target)[real]
    on_right = weights.gather(-1, batch.places.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    share = (on_right / weights.sum(-1))[real]
    largest = (weights.argmax(-1) == batch.places)[real]
    shown = weights[0, : len(pairs[0].target), : len(pairs[0].source)]
    shares = [float(x.double().mean()) for x in (right, share, largest)]
    rounded = [[round(x, 4) for x in row] for row in shown.tolist()]
    return Row(name, *shares, seconds, rounded)


def table(rows: Sequence[Row]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| score | right words | weight on the right word | largest weight on the right word |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        shares = (row.right_words, row.weight_on_right_word, row.largest_on_right_word)
        lines.append(f"| {row.name} | {' | '.join(f'{x:.1%}' for x in shares)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path, caption: str) -> None:
    """Draw the weights of the first test pair, a panel for each score."""
    from matplotlib.patches import Rectangle

    pair = translate(SHOWN.split())
    with picture(path, 10, 10.2) as figure:
        panels = figure.subplots(3, 3, sharex=True, sharey=True)
        for axes, row in zip(panels.flat, rows[1:], strict=True):
            image = axes.imshow(row.weights, cmap="Blues", vmin=0, vmax=1)
            for line, place in enumerate(pair.places):
                corner = (place - 0.46, line - 0.46)
                axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, color="tab:orange", lw=2))
            axes.set_title(row.name, fontsize=10.5)
            axes.set_xticks(range(len(pair.source)), pair.source, rotation=60, ha="right")
            axes.set_yticks(range(len(pair.target)), pair.target)
            axes.tick_params(length=0, labelsize=10)
        bar = figure.colorbar(image, ax=panels, shrink=0.4, aspect=30, pad=0.01)
        bar.set_label("attention weight")
        figure.suptitle(caption, fontsize=6.5)


def main() -> None:
    """Train a translator for each score, and write ``alignment.json``, ``.md`` and ``.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--steps", type=int, default=800, help="updates of each translator")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--train", type=int, default=4000, help="sentences to train")
    parser.add_argument("--test", type=int, default=500, help="sentences that are held out")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs, held_out = sentences(options.train, options.test, seed=0)
    rows = []
    for name, make in CONTENDERS.items():
        torch.manual_seed(0)
        model, began = Translator(make()), time.monotonic()
        train(model, pairs, options.steps, options.learning_rate)
        rows.append(judge(name, model, held_out, time.monotonic() - began))
        print(f"{name}: {rows[-1].seconds:.1f} s", flush=True)
    machine = describe()
    about = (
        f"{options.train} generated pairs to train, {options.test} to test; {options.steps} steps "
        f"of {BATCH} pairs; size {SIZE}; fp32"
    )
    text = table(rows)
    print(f"\n{about}\n{text}")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "machine": dataclasses.asdict(machine)}
    json_file.write(
        options.out / "alignment.json",
        {**content, "rows": [row._asdict() for row in rows]},
        json_file.record,
    )
    header = "\n".join([about, *machine.lines()])
    (options.out / "alignment.md").write_text(f"{text}\n\n{header}\n", encoding="utf-8")
    draw(rows, options.out / "alignment.png", header)


if __name__ == "__main__":
    main()
