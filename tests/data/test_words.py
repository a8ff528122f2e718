"""The words of a sentence have all its characters except white space, and the right positions."""

from __future__ import annotations

import random

import pytest

from fastbert.data.words import split_words


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Ada sings.", "Ada|sings|."),
        ("  “Ada-Mae's 3.5 m,” (she) said…", "“|Ada-Mae's|3.5|m|,|”|(|she|)|said|…"),
        ("U.S. and e-mail a.b@c.de !?", "U.S|.|and|e-mail|a.b@c.de|!|?"),
        ("我爱北京。New York!", "我|爱|北|京|。|New|York|!"),
        ("カナ", "カ|ナ"),
        ("नमस्ते दुनिया।", "नमस्ते|दुनिया|।"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_words(sentence, words):
    assert [word.text for word in split_words(sentence)] == list(filter(None, words.split("|")))


def test_the_words_are_at_their_places_and_leave_nothing_out():
    draw = random.Random(0)
    for _ in range(500):
        sentence = "".join(draw.choices("ab.,-'  \n\u00a0漢カ।े𠀀!“", k=draw.randint(0, 30)))
        words = split_words(sentence)
        assert all(sentence.startswith(word.text, word.start) for word in words)
        assert "".join(word.text for word in words) == "".join(sentence.split())
        assert [word.start for word in words] == sorted({word.start for word in words})
