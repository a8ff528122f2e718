"""The built-in tasks have the targets that they state, and no held-out text is trained on."""

from __future__ import annotations

import dataclasses

import pytest
from seq2seq_problems import write_pairs

from fastbert.seq2seq import Seq2SeqOptions
from fastbert.seq2seq.found_text import paragraphs
from fastbert.seq2seq.preparation import encode, read_parts, train_tokenizer
from fastbert.seq2seq.tasks import LONGEST, TASKS

DRAWS = 3000


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, task._replace(draws=DRAWS))


def parts_of(task: str, **changes):
    return read_parts(Seq2SeqOptions(output="unused", task=task, held_out=0.1, **changes))


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_source_target_or_group_is_trained_on(task):
    train, held_out = (set(part) for part in parts_of(task).values())
    assert len(held_out) > DRAWS / 40
    assert len(train) > DRAWS / 2
    for field in ("source", "target", "group"):
        of_train = {getattr(pair, field) for pair in train}
        of_held_out = {getattr(pair, field) for pair in held_out}
        assert not of_train & of_held_out, field


def test_pairs_of_a_file_with_the_same_source_stay_together(tmp_path):
    path = tmp_path / "pairs.tsv"
    rows = [f"word {n % 20}\t{n}" for n in range(60)]
    path.write_text("\n".join(["source\ttarget", *rows]), encoding="utf-8")
    parts = read_parts(Seq2SeqOptions(output="unused", pairs=path, held_out=0.2))
    sources = {name: [pair.source for pair in pairs] for name, pairs in parts.items()}
    assert {name: len(of_part) for name, of_part in sources.items()} == {
        "train": 48,
        "validation": 12,
    }
    assert not set(sources["train"]) & set(sources["validation"])


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides_the_pairs(task):
    first = parts_of(task)
    assert parts_of(task) == first
    assert parts_of(task, seed=1) != first


@pytest.mark.parametrize("task", ["hyphens", "reverse"])
def test_the_text_is_from_the_paragraphs(task):
    texts = paragraphs(None)
    assert len(texts) > 500
    assert all(text == " ".join(text.split()) for text in texts)
    for pairs in parts_of(task).values():
        for pair in pairs:
            assert pair.group in texts
            assert len(pair.source) <= LONGEST
            text = pair.target if task == "hyphens" else pair.source
            assert text in pair.group


def test_a_hyphen_divides_a_word_and_is_removed():
    [*pairs] = [pair for part in parts_of("hyphens").values() for pair in part]
    for pair in pairs:
        before, after = pair.source.split("-\n")
        assert pair.target == before + after
        assert before[-2:].isalpha()
        assert after[:2].isalpha()
    # Words are divided at different places of the text.
    assert len({pair.source.index("-\n") for pair in pairs}) > 40


def test_the_target_of_reverse_is_reversed():
    for part in parts_of("reverse").values():
        assert all(list(pair.target) == list(reversed(pair.source)) for pair in part)


def test_numbers_have_up_to_nine_digits_and_four_spellings():
    pairs = [pair for part in parts_of("numbers").values() for pair in part]
    assert {len(pair.target) for pair in pairs} == set(range(1, 10))
    forty_two = {
        pair.source for pair in pairs if pair.target.endswith("42") and len(pair.target) > 2
    }
    assert any("forty-two" in source for source in forty_two)
    assert any("forty two" in source for source in forty_two)
    assert {" and " in pair.source for pair in pairs} == {True, False}


def test_the_corpus_of_the_user_replaces_the_text(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"Paragraph {n} of the mill. It ran." for n in range(30)))
    for task in ("hyphens", "reverse"):
        parts = parts_of(task, corpus=corpus)
        groups = {pair.group for pairs in parts.values() for pair in pairs}
        assert groups <= {f"Paragraph {n} of the mill. It ran." for n in range(30)}


def test_pairs_with_more_pieces_are_left_out_and_counted(tmp_path):
    path = write_pairs(tmp_path / "pairs.tsv", "abcd")
    with path.open("a", encoding="utf-8") as file:
        file.write("abcde\ta\n" * 3 + "a\tabcde\n" * 2 + "abcd\tabcd\n")
    options = Seq2SeqOptions(output="unused", pairs=path, held_out=0.2)
    parts = read_parts(dataclasses.replace(options, max_length=4))
    tokenizer = train_tokenizer(parts["train"], 0)
    said: list[str] = []
    features = encode(parts, tokenizer, 4, said.append)
    assert sum(map(len, features.values())) == 65
    assert all(max(map(len, feature[:2])) <= 5 for part in features.values() for feature in part)
    counts = [int(text.split()[1]) for text in said]
    assert sum(counts) == 5
    with pytest.raises(ValueError, match=r"max_length: got 2, but all .* of the part train have"):
        encode(parts, tokenizer, 2, said.append)
