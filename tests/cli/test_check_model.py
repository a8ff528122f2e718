"""``fastbert check MODEL [TEXTS]`` accepts right models and reports wrong models."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers")

from fastbert.integrations import accelerate as integration
from fastbert.parity import LeftOut, Row

FP32 = ("--dtype", "float32")


@pytest.fixture
def wrong(monkeypatch) -> None:
    """Make accelerated encoders return states that are too large by a thousandth."""
    honest = integration._run

    def run(*arguments: Any) -> Any:
        out = honest(*arguments)
        out["last_hidden_state"] = out.last_hidden_state * 1.001
        return out

    monkeypatch.setattr(integration, "_run", run)


@pytest.fixture
def texts(tmp_path) -> Any:
    path = tmp_path / "texts.txt"
    path.write_text("The dog ran.\nA bird sat in the tree.\n", encoding="utf-8")
    return path


def test_a_right_model_passes(run, model_folder):
    result = run("check", model_folder)
    assert result.exit_code == 0, result.output
    assert "logits" in result.stdout
    assert "bfloat16" in result.stdout
    assert "gradients" in result.stdout
    assert "pass by the tolerance rule" in result.stdout
    assert "FAILED" not in result.stdout


def test_a_wrong_model_fails_and_the_field_is_named(run, model_folder, wrong, texts):
    result = run("check", model_folder, texts, *FP32)
    assert result.exit_code == 1, result.output
    assert "rows FAILED by the tolerance rule" in result.stdout
    assert "texts 1-2, inference, float32: logits [float32]: max error" in result.stdout


def test_json_has_a_line_per_row(run, model_folder, texts):
    result = run("check", model_folder, texts, *FP32, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert list(content) == ["rows", "left_out", "model", "passed"]
    assert {tuple(row) for row in content["rows"]} == {Row._fields}
    assert content["passed"] is True
    assert {row["dtype"] for row in content["rows"]} == {"float32"}
    assert json.loads(result.stdout.splitlines()[1]) == content["rows"][0]


def test_json_of_a_wrong_model(run, model_folder, wrong, texts):
    result = run("check", model_folder, texts, *FP32, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False


def test_json_has_what_is_left_out(run, tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, intermediate_size=40, **sizes)
    transformers.BertForQuestionAnswering(config).save_pretrained(tmp_path)
    result = run("check", tmp_path, *FP32, "--json")
    assert result.exit_code == 0, result.output
    left_out = json.loads(result.stdout)["left_out"]
    assert {tuple(each) for each in left_out} == {LeftOut._fields}
    assert {each["field"] for each in left_out} == {"loss"}


def test_pairs_of_texts(run, model_folder, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"one": "The dog ran.", "two": "A bird sat."}\n', encoding="utf-8")
    fields = ("--field", "one", "--pair-field", "two")
    assert run("check", model_folder, path, *fields, *FP32).exit_code == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--op", "layer_norm"), "--op: got 'layer_norm' with MODEL"),
        (("--quick",), "--quick: got True with MODEL"),
        (("--arch", "90"), "--arch: got '90' with MODEL"),
        (("--emulate", "sm_90"), "--emulate: got 'sm_90' with MODEL"),
        (("--backend", "cpu"), "--backend: got 'cpu' with MODEL"),
        (("--field", "body"), "--field: got 'body' without TEXTS"),
        (("--dtype", "int8"), "--dtype: got 'int8', allowed: float32"),
    ],
)
def test_options_that_make_no_sense_together(refused, model_folder, options, named):
    assert named in refused("check", model_folder, *options)


def test_a_field_without_texts(refused):
    assert "--pair-field: got 'b' without TEXTS" in refused("check", "--pair-field", "b")


def test_bad_input(refused, model_folder, tmp_path):
    assert "no such folder" in refused("check", tmp_path / "missing")
    assert "INPUT" in refused("check", model_folder, tmp_path)
    assert "missing.txt" in refused("check", model_folder, tmp_path / "missing.txt")
    (tmp_path / "config.json").write_text('{"model_type": "convbert"}', encoding="utf-8")
    assert str(tmp_path) in refused("check", tmp_path)


def test_a_model_that_cannot_be_served(refused, tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ConvBertConfig(vocab_size=50, intermediate_size=40, **sizes)
    transformers.ConvBertModel(config).save_pretrained(tmp_path)
    assert "got ConvBertModel" in refused("check", tmp_path)
