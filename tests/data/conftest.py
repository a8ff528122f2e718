"""A small corpus and its tokenizer, which the tests of the data pipeline share."""

import json
import math

import pytest

from fastbert.data import NextSentencePairs, stories, train_tokenizer
from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.jobs import prepare


@pytest.fixture(scope="session")
def documents():
    return list(stories(400, seed=3))


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer(documents, 600)


@pytest.fixture(scope="session")
def prepared(documents, tokenizer, tmp_path_factory):
    """Return the folder of a prepared corpus: the stories in several shards, and one long story."""
    folder = tmp_path_factory.mktemp("prepared")
    tokenizer.save(folder / "given")
    text = folder / "stories.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(d)}) + "\n" for d in documents))
    (folder / "z.jsonl").write_text(json.dumps({"text": " ".join(documents[0]) * 60}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "PIECE_BYTES", 40_000)
        options = {"tokenizer": folder / "given", "workers": 1}
        prepare.prepare(prepare.PrepareOptions(folder, folder.with_name("corpus"), **options))
    return folder.with_name("corpus")


@pytest.fixture(scope="session")
def corpus(prepared):
    return PreparedCorpus(prepared)


@pytest.fixture(scope="session")
def pairs(documents, tokenizer):
    return NextSentencePairs(documents, tokenizer, max_length=96, seed=5)


@pytest.fixture(scope="session")
def assert_binomial():
    def check(successes, trials, probability):
        """Check a binomial count to 4.9 standard deviations, a two-sided probability of 1e-6."""
        deviation = math.sqrt(trials * probability * (1 - probability))
        assert abs(successes - trials * probability) < 4.9 * deviation

    return check
