"""The built-in tasks: number words to digits, words divided by a hyphen, and reversed text.

Each task draws its pairs with a seed. The same seed gives the same pairs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastbert.seq2seq.number_words import number_words
from fastbert.seq2seq.pairs import Pair

# The largest number of digits, and the numbers of characters of a source that is a text.
MOST_DIGITS = 9
SHORTEST, LONGEST = 8, 64
HYPHEN = "-\n"
# A word of ASCII letters is divided with at least two letters on either side.
_DIVISIONS = re.compile(r"(?<=[A-Za-z][a-z])(?=[a-z]{2})")


class Task(NamedTuple):
    """A task whose pairs are drawn at random.

    Attributes:
        draw: Function from a random generator and paragraphs of text to a pair, or to None if the
            chosen part of the text gives no pair.
        needs_text: Whether the task needs paragraphs of text.
        draws: Number of pairs that are drawn.
        merges: Default of `Seq2SeqOptions.merges`.
        epochs: Default of `Seq2SeqOptions.epochs`.
    """

    draw: Callable[[random.Random, Sequence[str]], Pair | None]
    needs_text: bool
    draws: int
    merges: int
    epochs: int


def draw_pairs(task: Task, texts: Sequence[str], seed: int) -> list[Pair]:
    """Draw pairs; those that repeat an earlier source are left out.

    Args:
        task: The task.
        texts: The paragraphs of text; empty if the task needs no text.
        seed: Seed of the pairs.

    Returns:
        The pairs. Pairs with the same target have the same group.
    """
    chance = random.Random(seed)
    by_source: dict[str, Pair] = {}
    groups: dict[str, str] = {}
    for _ in range(task.draws):
        pair = task.draw(chance, texts)
        # A text that is in several paragraphs belongs to the first of them that was drawn.
        if pair is not None and groups.setdefault(pair.target, pair.group) == pair.group:
            by_source.setdefault(pair.source, pair)
    return list(by_source.values())


def _numbers(chance: random.Random, texts: Sequence[str]) -> Pair:
    """Draw a number, which is a group of its own; its words are spelt in one of four ways."""
    number = chance.randrange(10 ** chance.randint(1, MOST_DIGITS))
    words = number_words(number, joined=chance.choice("- "), middle=chance.choice(("and ", "")))
    return Pair(str(number), words, str(number), group=str(number))


def _hyphens(chance: random.Random, texts: Sequence[str]) -> Pair | None:
    """Draw a part of a text in which one word is divided by a hyphen at the end of a line."""
    paragraph, part = _part(chance, texts, LONGEST - len(HYPHEN))
    places = [match.start() for match in _DIVISIONS.finditer(part)]
    if not places:
        return None
    place = chance.choice(places)
    return Pair(paragraph, part[:place] + HYPHEN + part[place:], part, group=paragraph)


def _reverse(chance: random.Random, texts: Sequence[str]) -> Pair:
    """Draw a part of a text, whose target has the characters in reverse order."""
    paragraph, part = _part(chance, texts, LONGEST)
    return Pair(paragraph, part, part[::-1], group=paragraph)


def _part(chance: random.Random, texts: Sequence[str], longest: int) -> tuple[str, str]:
    """Draw a paragraph, and consecutive words of it.

    Args:
        chance: The random generator.
        texts: The paragraphs.
        longest: Largest number of characters of the words.

    Returns:
        The paragraph and the words.
    """
    paragraph = chance.choice(texts)
    words = paragraph.split(" ")
    words = words[chance.randrange(len(words)) :]
    size = chance.randint(SHORTEST, longest)
    part = words[0]
    for word in words[1:]:
        if len(part) + 1 + len(word) > size:
            break
        part += f" {word}"
    return paragraph, part[:size]


TASKS = {
    "hyphens": Task(_hyphens, needs_text=True, draws=80_000, merges=0, epochs=2),
    "numbers": Task(_numbers, needs_text=False, draws=40_000, merges=250, epochs=3),
    "reverse": Task(_reverse, needs_text=True, draws=80_000, merges=0, epochs=2),
}
