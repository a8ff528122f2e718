from collections import Counter
from itertools import islice

import pytest

from fastbert.data import stories


def test_same_seed_same_stories_and_a_longer_run_begins_alike():
    assert list(stories(20, seed=1)) == list(islice(stories(40, seed=1), 20))
    assert list(stories(20, seed=1)) != list(stories(20, seed=2))


def test_shape_of_the_corpus():
    corpus = list(stories(2000, seed=0))
    assert all(8 <= len(story) <= 14 for story in corpus)
    sentences = [sentence for story in corpus for sentence in story]
    assert all(s[0].isupper() and s.endswith(".") and "{" not in s for s in sentences)
    assert all(4 <= len(s.split()) <= 16 for s in sentences)
    words = Counter(w.strip(".,").lower() for s in sentences for w in s.split())
    assert 400 <= len(words) <= 900
    # Every word must occur often enough for a model to learn the word.
    assert min(words.values()) >= 5
    assert len({tuple(story) for story in corpus}) == len(corpus)


def test_characters_carry_through_a_story():
    for story in stories(50, seed=4):
        names = Counter(w.strip(".,") for s in story for w in s.split()[1:] if w[0].isupper())
        names = {name for name in names if name not in ("Monday", "Sunday", "Friday", "Saturn")}
        assert len(names) <= 2
        assert any(name in " ".join(story[len(story) // 2 :]) for name in names)


def test_no_stories_and_a_negative_number():
    assert list(stories(0, seed=0)) == []
    with pytest.raises(ValueError, match="num_documents: got -1"):
        stories(-1, seed=0)
