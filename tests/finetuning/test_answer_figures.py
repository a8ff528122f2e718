"""Questions without an answer: figures, thresholds, predictions.json and saved options."""

from __future__ import annotations

import json
import random

import pytest
from finetuning_problems import OTHERS, PLACES, run, write_rows
from test_answer_task import questions, write_squad

from fastbert.config import BertConfig
from fastbert.finetuning import predict
from fastbert.finetuning.answer_figures import answer_figures
from fastbert.finetuning.metrics import exact_match, word_f1

SCORES = {"exact": exact_match, "f1": word_f1}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", range(12))
def test_figures_and_thresholds_are_those_of_a_search_over_all_thresholds(seed):
    draw = random.Random(seed)
    words = ["cat", "big cat", "dog ran", "the owl"]
    truths = [draw.choice([[], [draw.choice(words)], words[:2]]) for _ in range(30)]
    truths[:2] = [[], ["cat"]]
    candidates = [draw.choice(words) for _ in truths]
    # The differences have few possible values, so that several questions have the same difference.
    differences = [draw.randrange(-4, 5) / 2 for _ in truths]
    answers = ["" if d > 0 else c for c, d in zip(candidates, differences, strict=True)]
    figures = answer_figures(answers, candidates, differences, truths)
    kinds = {"HasAns": [bool(t) for t in truths], "NoAns": [not t for t in truths]}
    for name, score in SCORES.items():
        given = [score(a, t) for a, t in zip(answers, truths, strict=True)]
        assert figures["exact_match" if name == "exact" else name] == pytest.approx(mean(given))
        for kind, chosen in kinds.items():
            of_kind = [g for g, is_chosen in zip(given, chosen, strict=True) if is_chosen]
            assert figures[f"{kind}_{name}"] == pytest.approx(mean(of_kind))
            assert figures[f"{kind}_total"] == len(of_kind)

        def at(threshold, score=score):
            said = [
                "" if d > threshold else c for c, d in zip(candidates, differences, strict=True)
            ]
            return mean(score(a, t) for a, t in zip(said, truths, strict=True))

        best = max(at(threshold / 2) for threshold in range(-10, 11))
        assert figures[f"best_{name}"] == pytest.approx(best)
        assert at(figures[f"best_{name}_thresh"]) == pytest.approx(best)


def test_a_threshold_for_no_answer_at_all_is_below_every_difference():
    figures = answer_figures(["cat", "cat"], ["cat", "cat"], [-3.0, -2.0], [[], []])
    assert figures["best_exact"] == 1.0
    assert -3.1 < figures["best_exact_thresh"] < -3.0
    assert "HasAns_exact" not in figures
    assert figures["NoAns_exact"] == 0.0


def test_figures_of_questions_with_answers_are_two():
    assert answer_figures(["cat"], ["cat"], [1.0], [["cat"]]) == {"exact_match": 1.0, "f1": 1.0}


def test_an_answer_of_an_article_only_is_not_a_right_one():
    assert answer_figures(["a"], ["a"], [0.0], [["the", "cat"]])["exact_match"] == 0.0


@pytest.fixture
def trained(answer, tmp_path):
    train = write_squad(tmp_path / "train.json", questions(160, 0, without=0.4))
    test = write_squad(tmp_path / "test.json", questions(40, 1, without=0.4))
    # The model makes some errors, so that the threshold changes the figures.
    return run(answer(train, test=test, epochs=3, no_answer_threshold=1.5)), test


def test_a_run_reports_the_figures_and_keeps_the_threshold(trained, tmp_path):
    (result, text), test = trained
    figures = result.figures["test"]
    for kind in ("HasAns", "NoAns"):
        assert figures.keys() >= {f"{kind}_exact", f"{kind}_f1", f"{kind}_total"}
    assert figures["HasAns_total"] + figures["NoAns_total"] == 40
    assert "without one; at best" in text
    content = json.loads((result.model / "config.json").read_text(encoding="utf-8"))
    assert content["null_score_diff_threshold"] == 1.5
    truth = {row["id"]: row["answers"]["text"] for row in questions(40, 1, without=0.4)}
    lines = tmp_path / "said.jsonl"
    for threshold in (None, figures["best_exact_thresh"]):
        predict(result.model, test, lines, no_answer_threshold=threshold)
        predict(result.model, test, tmp_path / "said.json", no_answer_threshold=threshold)
        rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        kept = 1.5 if threshold is None else threshold
        for row in rows:
            assert (row["answer"] == "") == (row["no_answer"] - row["score"] > kept)
        said = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))
        assert said == {row["id"]: row["answer"] for row in rows}
        assert said.keys() == truth.keys()
        exact = mean(exact_match(said[key], truth[key]) for key in truth)
        name = "exact_match" if threshold is None else "best_exact"
        assert exact == pytest.approx(figures[name])


def test_transformers_opens_a_model_with_these_keys(trained):
    transformers = pytest.importorskip("transformers")
    (result, _), _ = trained
    config = transformers.AutoConfig.from_pretrained(result.model)
    assert config.doc_stride == 128
    transformers.AutoModelForQuestionAnswering.from_pretrained(result.model)


def long_questions(count: int) -> list[dict]:
    """Return questions so long that a window has fewer context tokens than the default stride."""
    rows = questions(count, 0, length=30)
    asked = " ".join(random.Random(0).choices((*OTHERS, *PLACES), k=14))
    return [{**row, "question": asked} for row in rows]


def test_predict_reads_its_own_validation_part(answer, tmp_path):
    data = write_rows(tmp_path / "train.jsonl", long_questions(40))
    options = {"max_length": 24, "stride": 2, "longest_answer": 1, "epochs": 1}
    result, _ = run(answer(data, **options))
    output = tmp_path / "said.jsonl"
    assert predict(result.model, data, output).max_length == 24
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert {len(row["answer"].split()) for row in rows} == {1}
    predict(result.model, data, output, longest_answer=4)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert max(len(row["answer"].split()) for row in rows) > 1
    with pytest.raises(ValueError, match="which leaves 7 tokens for a context, allowed: more than"):
        predict(result.model, data, output, stride=8)
    first = predict(result.model, data, output)
    assert predict(result.model, data, output, stride=5).sequences > first.sequences


def test_a_model_without_the_keys_has_the_defaults_and_may_be_given_a_threshold(answer, tmp_path):
    data = write_rows(tmp_path / "train.jsonl", questions(40, 0))
    result, _ = run(answer(data, epochs=1))
    path = result.model / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("doc_stride", "max_answer_length", "null_score_diff_threshold"):
        del content[key]
    path.write_text(json.dumps(content))
    config = BertConfig.from_json(path)
    assert "doc_stride" not in config.extra
    predict(result.model, data, tmp_path / "said.json")
    assert all(json.loads((tmp_path / "said.json").read_text(encoding="utf-8")).values())
    predict(result.model, data, tmp_path / "said.json", no_answer_threshold=-1000)
    assert not any(json.loads((tmp_path / "said.json").read_text(encoding="utf-8")).values())
    path.write_text(json.dumps({**content, "doc_stride": "wide"}))
    with pytest.raises(ValueError, match=rf"^{path}: stride: got 'wide', allowed: an integer >= 0"):
        predict(result.model, data, tmp_path / "said.json")
    with pytest.raises(ValueError, match=r"^longest_answer: got 0, allowed: an integer >= 1"):
        predict(result.model, data, tmp_path / "said.json", longest_answer=0)


def test_two_questions_with_one_id_have_no_json(answer, tmp_path):
    rows = questions(16, 0)
    data = write_rows(tmp_path / "train.jsonl", rows)
    result, _ = run(answer(data, epochs=1))
    twice = write_rows(tmp_path / "twice.jsonl", [*rows, rows[3]])
    with pytest.raises(ValueError, match=r"line 17 .*: its id is that of .*line 4"):
        predict(result.model, twice, tmp_path / "said.json")
    predict(result.model, twice, tmp_path / "said.jsonl")


def test_options_of_questions_are_refused_for_other_models(classify, answer, tmp_path):
    rows = [{"text": "dog", "label": "a"}, {"text": "cat", "label": "b"}] * 6
    data = write_rows(tmp_path / "train.jsonl", rows)
    model = run(classify(data, epochs=1))[0].model
    with pytest.raises(ValueError, match=r"output: got .*said\.json', allowed: a \.jsonl file, be"):
        predict(model, data, tmp_path / "said.json")
    for name in ("stride", "longest_answer", "no_answer_threshold"):
        with pytest.raises(ValueError, match=rf"{name}: got 3, allowed: None, because .* does not"):
            predict(model, data, tmp_path / "said.jsonl", **{name: 3})
    with pytest.raises(ValueError, match="no_answer_threshold: got nan, allowed: a finite number"):
        answer(data, no_answer_threshold=float("nan"))
