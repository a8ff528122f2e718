"""Tags of words are aligned, learned and scored, and the model loads in transformers."""

from __future__ import annotations

import json
import random

import pytest
import torch
from finetuning_problems import NAMES, OTHERS, PLACES, run, write_rows

from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning import metrics, predict
from fastbert.modules import BertForTokenClassification


def sentences(count: int, seed: int) -> list[dict]:
    """Return sentences with two kinds of entities: an animal and the word after it, or a place."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        words, tags = [], []
        for _ in range(draw.randint(2, 4)):
            words += draw.choices(OTHERS, k=draw.randint(1, 2))
            tags += ["O"] * (len(words) - len(tags))
            if draw.random() < 0.5:
                words += [draw.choice(NAMES), "Xyzzy"]
                tags += ["B-ANI", "I-ANI"]
            else:
                words.append(draw.choice(PLACES))
                tags.append("B-LOC")
        rows.append({"tokens": words, "tags": tags})
    return rows


def write_conll(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["-DOCSTART- -X- O", ""]
    for row in rows:
        lines += [f"{w} NN {t}" for w, t in zip(row["tokens"], row["tags"], strict=True)] + [""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def trained(tag, tmp_path):
    data = write_conll(tmp_path / "data" / "eng.train", sentences(120, 0)).parent
    write_conll(data / "eng.testa", sentences(20, 1))
    write_conll(data / "eng.testb", sentences(30, 2))
    return run(tag(data, epochs=5))


def spans(tags):
    """Return the entities of well-formed BIO tags: first word, word after the last, and kind."""
    entities, start = set(), None
    for i, tag in enumerate([*tags, "O"]):
        if start is not None and not tag.startswith("I-"):
            entities.add((start, i, tags[start][2:]))
            start = None
        if tag.startswith("B-") or (tag.startswith("I-") and start is None):
            start = i
    return entities


def test_learns_writes_and_predicts(drawn, trained, tmp_path):
    result, text = trained
    assert "examples: 120 train, 20 validation, 30 test" in text
    figures = result.figures["test"]
    assert figures["f1"] >= 0.95
    assert figures["accuracy"] >= 0.95
    assert result.confusion.read_bytes().startswith(b"\x89PNG")
    predict(result.model, tmp_path / "data" / "eng.testb", tmp_path / "said.jsonl")
    said = [
        json.loads(line)
        for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    truth = [row["tags"] for row in sentences(30, 2)]
    right = sum(
        a == b for s, t in zip(said, truth, strict=True) for a, b in zip(s["tags"], t, strict=True)
    )
    assert figures["accuracy"] == pytest.approx(right / sum(map(len, truth)))
    given, wanted = [spans(row["tags"]) for row in said], [spans(tags) for tags in truth]
    hits = sum(len(a & b) for a, b in zip(given, wanted, strict=True))
    f1 = 2 * hits / (sum(map(len, given)) + sum(map(len, wanted)))
    assert figures["f1"] == pytest.approx(f1)


def test_transformers_opens_the_result_with_the_same_logits(trained):
    transformers = pytest.importorskip("transformers")
    folder = trained[0].model
    stock = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert stock.config.id2label == {0: "B-ANI", 1: "B-LOC", 2: "I-ANI", 3: "O"}
    ours = BertForTokenClassification.from_pretrained(folder)
    ids = torch.randint(5, 200, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, stock(ids).logits)


def test_words_are_aligned_as_in_transformers(pretrained):
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoTokenizer.from_pretrained(pretrained)
    ours = ModelTokenizer(pretrained, 48)
    draw = random.Random(0)
    for _ in range(30):
        words = draw.choices([*NAMES, "Xyzzy", "U.S.", "don't", "Zürich", "漢字", "a-b"], k=5)
        expected = stock(words, is_split_into_words=True)
        places = [expected.word_ids().index(number) for number in range(len(words))]
        (encoded,) = ours.encode_words(words)
        assert encoded.ids == expected["input_ids"]
        assert (encoded.first, encoded.places) == (0, places)


def test_a_long_sentence_is_divided_between_words_and_no_word_is_lost(pretrained):
    words = [*OTHERS, "Xyzzy", "\u200b"] * 10
    tokenizer = ModelTokenizer(pretrained, 16)
    parts = list(tokenizer.encode_words(words))
    assert len(parts) > 2
    assert all(len(part.ids) <= 16 for part in parts)
    numbers = [part.first + i for part in parts for i in range(len(part.places))]
    assert numbers == list(range(len(words)))


def test_entities_are_those_of_seqeval():
    wanted = [["B-A", "I-A", "O", "I-B", "B-B", "S-A", "E-A"], ["O", "B-A", "I-B", "I-B", "O"]]
    assert metrics.entities(wanted[0]) == [
        *(("A", 0, 1), ("B", 3, 3), ("B", 4, 4), ("A", 5, 5), ("A", 6, 6)),
    ]
    assert metrics.entities(wanted[1]) == [("A", 1, 1), ("B", 2, 3)]


def test_scores_of_entities_are_those_of_seqeval():
    draw = random.Random(5)
    tags = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "XY")]
    truth = [draw.choices(tags, k=6) for _ in range(40)]
    given = [[t if draw.random() < 0.8 else draw.choice(tags) for t in row] for row in truth]
    scores = metrics.entity_scores(truth, given)
    # seqeval 1.2.2 in its default mode computes these figures from the same tags.
    assert scores["precision"] == pytest.approx(0.8163265306122449)
    assert scores["recall"] == pytest.approx(0.837696335078534)
    assert scores["f1"] == pytest.approx(0.82687338501292)
    one = scores["entities"]["X"]
    assert (one["precision"], one["support"]) == (pytest.approx(0.8543689320388349), 99)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.conll", "Ada B-PER\nsings\n", "line 2: got 1 columns, allowed: 2"),
        ("t.conll", "Ada\nsings\n", "line 1: got 1 column, allowed: a word and its tag"),
        ("t.conll", "\n\n", "the file has no sentence, allowed: at least one"),
        (
            "t.jsonl",
            '{"tokens": ["a", "b"], "tags": ["O", "X"]}\n{"tokens": ["a", "b"], "tags": ["O"]}\n',
            "line 2: got 2 words and 1 tags, allowed: a tag for each word",
        ),
        ("t.jsonl", '{"tokens": [], "tags": []}\n', "line 1: tokens: got []"),
        ("t.csv", "a,b\n", "got the suffix '.csv', allowed: .jsonl, .parquet, .conll"),
    ],
)
def test_broken_data_are_named_with_their_line(tag, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError) as failure:
        run(tag(path))
    assert str(failure.value).startswith(str(path))
    assert message in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_tag_is_named_with_its_line(tag, tmp_path):
    train = write_rows(tmp_path / "a.jsonl", sentences(9, 0))
    other = write_rows(tmp_path / "b.jsonl", [{"tokens": ["dog"], "tags": ["B-CAR"]}])
    with pytest.raises(ValueError, match=rf"{other}, line 1: got the label 'B-CAR', allowed: B-A"):
        run(tag(train, test=other))
