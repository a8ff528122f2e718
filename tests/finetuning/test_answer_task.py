"""Answers to questions: windows, learning, the figures, and loading the model in transformers."""

from __future__ import annotations

import json
import random

import pytest
import torch
from finetuning_problems import NAMES, OTHERS, PLACES, run, write_rows

from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.data.squad import Answer, Question
from fastbert.finetuning import predict
from fastbert.finetuning.answer import AnswerQuestions
from fastbert.finetuning.metrics import exact_match, word_f1
from fastbert.modules import BertForQuestionAnswering


def questions(count: int, seed: int, *, length: int = 8, without: float = 0.0) -> list[dict]:
    """Return questions whose answer, if any, is the only name of an animal in the context."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        words = draw.choices((*OTHERS, *PLACES), k=length)
        answers: dict = {"text": [], "answer_start": []}
        if draw.random() >= without:
            place, name = draw.randrange(length), draw.choice(NAMES)
            words[place] = name
            start = len(" ".join(words[:place])) + (place > 0)
            answers = {"text": [name], "answer_start": [start]}
        row = {"id": f"q{seed}-{number}", "question": "the new", "context": " ".join(words)}
        rows.append({**row, "answers": answers})
    return rows


def write_squad(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = []
    for row in rows:
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(*row["answers"].values(), strict=True)
        ]
        entry = {"id": row["id"], "question": row["question"], "answers": answers}
        paragraphs.append(
            {"context": row["context"], "qas": [{**entry, "is_impossible": not answers}]}
        )
    path.write_text(json.dumps({"version": "2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


def said(result, data, tmp_path):
    predict(result.model, data, tmp_path / "said.jsonl")
    return [
        json.loads(line)
        for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_learns_writes_and_predicts(answer, tmp_path):
    data = write_squad(tmp_path / "data" / "train-v1.1.json", questions(160, 0)).parent
    write_squad(data / "dev-v1.1.json", questions(20, 1))
    test = write_rows(tmp_path / "test.jsonl", questions(40, 2))
    result, text = run(answer(data, test=test, epochs=6))
    assert "examples: 160 train, 20 validation, 40 test" in text
    figures = result.figures["test"]
    assert figures["exact_match"] >= 0.9
    predictions = said(result, test, tmp_path)
    truth = questions(40, 2)
    assert [row["id"] for row in predictions] == [row["id"] for row in truth]
    right = [
        a["answer"] == b["answers"]["text"][0] for a, b in zip(predictions, truth, strict=True)
    ]
    assert figures["exact_match"] == sum(right) / 40
    assert result.confusion is None

    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoModelForQuestionAnswering.from_pretrained(result.model).eval()
    ours = BertForQuestionAnswering.from_pretrained(result.model)
    ids = torch.randint(5, 200, (2, 9))
    with torch.no_grad():
        a, b = ours(ids), stock(ids)
    torch.testing.assert_close(a.start_logits, b.start_logits)
    torch.testing.assert_close(a.end_logits, b.end_logits)


def test_long_contexts_are_read_in_windows(answer, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", questions(120, 0, length=30))
    test = write_rows(tmp_path / "test.jsonl", questions(30, 1, length=60))
    options = answer(train, test=test, max_length=24, stride=6, epochs=4)
    result, _ = run(options)
    # A context of 60 words has several windows of at most 24 tokens.
    assert result.steps > 4 * 120 // 8
    assert result.figures["test"]["exact_match"] >= 0.9


def test_questions_without_an_answer_are_learnt(answer, tmp_path):
    train = write_squad(tmp_path / "train.json", questions(200, 0, without=0.4))
    test = write_squad(tmp_path / "test.json", questions(40, 1, without=0.4))
    result, _ = run(answer(train, test=test, epochs=6))
    assert result.figures["test"]["exact_match"] >= 0.9
    empty = [not row["answers"]["text"] for row in questions(40, 1, without=0.4)]
    are_empty = [not row["answer"] for row in said(result, test, tmp_path)]
    assert sum(a == b for a, b in zip(empty, are_empty, strict=True)) >= 36
    assert 8 < sum(are_empty) < 32


def test_windows_are_those_of_transformers(pretrained):
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoTokenizer.from_pretrained(pretrained)
    context = " ".join(random.Random(0).choices((*NAMES, *OTHERS, "Xyzzy", "U.S."), k=50))
    expected = stock(
        *("dog ran", context),
        truncation="only_second",
        max_length=24,
        stride=6,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    windows = ModelTokenizer(pretrained, 24).encode_windows("dog ran", context, 6)
    assert len(windows) > 3
    assert [window.ids for window in windows] == expected["input_ids"]
    assert [window.token_types for window in windows] == expected["token_type_ids"]
    for number, window in enumerate(windows):
        offsets = [
            offset if sequence == 1 else None
            for offset, sequence in zip(
                expected["offset_mapping"][number], expected.sequence_ids(number), strict=True
            )
        ]
        assert window.offsets == offsets


@pytest.mark.parametrize(
    ("given", "truths", "exact", "f1"),
    [
        ("The Cat!", ["a cat"], 1.0, 1.0),
        ("big cat", ["cat"], 0.0, 2 / 3),
        ("dog", ["cat", "dog"], 1.0, 1.0),
        ("dog dog", ["dog"], 0.0, 2 / 3),
        ("cat", [], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("", ["cat"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),
        ("in the year 1990", ["year 1990", "1990"], 0.0, 0.8),
    ],
)
def test_exact_match_and_f1_are_those_computed_by_hand(given, truths, exact, f1):
    assert exact_match(given, truths) == exact
    assert word_f1(given, truths) == pytest.approx(f1)


def test_broken_data_are_named(answer, tmp_path):
    rows = questions(4, 0)
    rows[2]["answers"] = {"text": ["elephant"], "answer_start": [3]}
    for path in (tmp_path / "a.jsonl", tmp_path / "b.json"):
        (write_rows if path.suffix == ".jsonl" else write_squad)(path, rows)
        with pytest.raises(ValueError, match="'elephant' is not in its context at the char") as e:
            run(answer(path))
        place = "line 3" if path.suffix == ".jsonl" else "data 0, paragraph 2, question 0"
        assert str(e.value).startswith(f"{path}, {place} (id q0-2)")
    for content, message in (
        ('{"data": []}', "has no question, allowed: at least one"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "data 0, paragraph 0: context: got nothing"),
        ("[1]", "no list .data., allowed: the layout of SQuAD"),
        ("{", "not valid JSON"),
    ):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            run(answer(tmp_path / "c.json"))
    good = write_rows(tmp_path / "d.jsonl", questions(8, 0))
    with pytest.raises(ValueError, match="stride: got -1, allowed: an integer >= 0"):
        answer(good, stride=-1)
    assert not (tmp_path / "out").exists()


def test_a_window_with_a_part_of_the_answer_has_no_answer(pretrained, answer, tmp_path):
    words = ["old", "the", "saw", "dog", "cat", "fox", "ran", "and", "new", "hen"]
    context = " ".join(words)
    start = context.index("dog")
    asked = Question("place", "id", "mill", context, (Answer("dog cat fox", start),))
    # A window consists of [CLS] mill [SEP], at most six words of the context, and [SEP].
    tokenizer = ModelTokenizer(pretrained, 10)
    features = AnswerQuestions(3, 30).features(asked, tokenizer)
    spans = [(f["start_positions"], f["end_positions"]) for f in features]
    places = [[words.index(context[a:b]) for a, b in filter(None, f["offsets"])] for f in features]
    assert places == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [6, 7, 8, 9]]
    assert spans == [(6, 8), (3, 5), (0, 0)]
    features = AnswerQuestions(2, 30).features(asked, tokenizer)
    spans = [(f["start_positions"], f["end_positions"]) for f in features]
    # The second window has only the end of the answer, so it counts as a window without an answer.
    assert spans == [(6, 8), (0, 0)]
