"""A small corpus and its tokenizer, shared by the tests of the data pipeline."""

import math

import pytest

from fastbert.data import NextSentencePairs, stories, train_tokenizer


@pytest.fixture(scope="session")
def documents():
    return list(stories(400, seed=3))


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer(documents, 600)


@pytest.fixture(scope="session")
def pairs(documents, tokenizer):
    return NextSentencePairs(documents, tokenizer, max_length=96, seed=5)


@pytest.fixture(scope="session")
def assert_binomial():
    def check(successes, trials, probability):
        """The normal tail of the count is above 1e-6 on either side (4.9 standard deviations)."""
        deviation = math.sqrt(trials * probability * (1 - probability))
        assert abs(successes - trials * probability) < 4.9 * deviation

    return check
