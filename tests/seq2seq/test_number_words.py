"""A parser of number words gives back the number, in every way of spelling."""

from __future__ import annotations

import random

import pytest

from fastbert.seq2seq.number_words import LIMIT, ONES, TENS, number_words

VALUES = {name: value for value, name in enumerate(ONES)}
VALUES |= {name: 10 * value for value, name in enumerate(TENS, 2)}


def parsed(text: str) -> int:
    """Return the number of some words, by adding and multiplying from left to right."""
    total = group = 0
    for word in text.replace("-", " ").split():
        if word == "hundred":
            group *= 100
        elif word in ("thousand", "million"):
            total, group = total + group * {"thousand": 10**3, "million": 10**6}[word], 0
        elif word != "and":
            group += VALUES[word]
    return total + group


@pytest.mark.parametrize("joined", ["-", " "])
@pytest.mark.parametrize("middle", ["and ", ""])
def test_the_words_of_a_number_are_parsed_to_the_number(joined, middle):
    chance = random.Random(0)
    numbers = [*range(2100), *(chance.randrange(10 ** chance.randint(4, 9)) for _ in range(2000))]
    spelt = [number_words(n, joined=joined, middle=middle) for n in (*numbers, LIMIT - 1)]
    assert [parsed(text) for text in spelt] == [*numbers, LIMIT - 1]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (42, "forty-two"),
        (100, "one hundred"),
        (119, "one hundred and nineteen"),
        (1001, "one thousand and one"),
        (1100, "one thousand one hundred"),
        (80_000_000, "eighty million"),
        (1_000_070, "one million and seventy"),
    ],
)
def test_the_words_are_those_of_english(number, words):
    assert number_words(number) == words


@pytest.mark.parametrize("number", [-1, LIMIT])
def test_a_number_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=rf"number: got {number}, allowed: an integer from 0 to"):
        number_words(number)
