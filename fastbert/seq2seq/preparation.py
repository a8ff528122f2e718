"""The pairs of a run, and their pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fastbert.finetuning.splits import hold_out
from fastbert.seq2seq.found_text import paragraphs
from fastbert.seq2seq.options import Seq2SeqOptions
from fastbert.seq2seq.pairs import Pair, read_pairs
from fastbert.seq2seq.tasks import TASKS, draw_pairs
from fastbert.seq2seq.tokenizer import PieceTokenizer

# The tokenizer is trained on at most this number of pairs.
MOST_TOKENIZER_PAIRS = 20_000

Say = Callable[[str], None]


class Feature(NamedTuple):
    """The ids of a pair; both lists end with the id of ``</s>``."""

    source: list[int]
    target: list[int]
    pair: Pair


def read_parts(options: Seq2SeqOptions) -> dict[str, list[Pair]]:
    """Read or draw the pairs of a run, and hold out a part of them.

    Args:
        options: The options of the run.

    Returns:
        The pairs of the parts ``"train"`` and ``"validation"``. No source and no group is in both.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If the data are not usable. The message names the file and the line.
    """
    if options.task is None:
        pairs = read_pairs(Path(options.pairs or ""), options.source_field, options.target_field)
    else:
        task = TASKS[options.task]
        texts = paragraphs(options.corpus) if task.needs_text else []
        pairs = draw_pairs(task, texts, options.seed)
        if not pairs:
            raise ValueError(
                f"corpus: {options.corpus} has no word that can be divided, allowed: prose"
            )
    train, held_out = hold_out(pairs, options.held_out, options.seed, lambda pair: pair.group)
    return {"train": train, "validation": held_out}


def train_tokenizer(pairs: Sequence[Pair], merges: int) -> PieceTokenizer:
    """Find the pieces of the sources and targets of the training part."""
    step = -(-len(pairs) // MOST_TOKENIZER_PAIRS)
    return PieceTokenizer.train(
        (text for pair in pairs[::step] for text in (pair.source, pair.target)), merges
    )


def encode(
    parts: Mapping[str, Sequence[Pair]], tokenizer: PieceTokenizer, max_length: int, say: Say
) -> dict[str, list[Feature]]:
    """Encode the pairs of all parts.

    Args:
        parts: The pairs by the name of the part.
        tokenizer: The tokenizer.
        max_length: Largest number of pieces of a source and of a target.
        say: Shows a line of text to the user, with the number of pairs that are left out because
            they have more pieces.

    Returns:
        The features of each part.

    Raises:
        ValueError: If no pair of a part is left.
    """
    features: dict[str, list[Feature]] = {}
    for name, pairs in parts.items():
        sources = tokenizer.encode([pair.source for pair in pairs])
        targets = tokenizer.encode([pair.target for pair in pairs])
        whole = map(Feature, sources, targets, pairs)
        # `max_length` does not count the token at the end.
        kept = [each for each in whole if max(map(len, each[:2])) <= max_length + 1]
        if not kept:
            raise ValueError(
                f"max_length: got {max_length}, but all {len(pairs):,} pairs of the part {name} "
                "have more pieces; allowed: a larger number"
            )
        if len(kept) < len(pairs):
            say(
                f"{name}: {len(pairs) - len(kept):,} of {len(pairs):,} pairs with more than "
                f"{max_length} pieces are left out (--max-length)"
            )
        features[name] = kept
    return features
