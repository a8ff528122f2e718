"""A mistake in the data, the model or the options is an error before any file is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from finetuning_problems import reviews, run, write_rows

from fastbert.config import BertConfig
from fastbert.finetuning import ClassifyOptions, predict
from fastbert.modules import BertModel

GOOD = [{"text": "dog ran", "label": "animal"}, {"text": "mill the", "label": "place"}] * 4


@pytest.fixture
def refused(tmp_path):
    """Return a function that expects an error and no output folder, and returns the message."""

    def call(options) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as failure:
            run(options)
        assert not Path(options.output).exists()
        return str(failure.value)

    return call


def test_an_unknown_label_names_its_line(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    other = write_rows(tmp_path / "other.csv", [*GOOD[:2], {"text": "a", "label": "plant"}])
    message = refused(classify(data, validation=other))
    assert message == f"{other}, line 4: got the label 'plant', allowed: animal, place"


@pytest.mark.parametrize(
    ("there", "here"),
    [(["no", "yes"], [0, 1]), (["1.0", "2.0"], ["1", "2"]), ([0, 1], ["no", "x"])],
)
def test_labels_of_two_parts_are_not_matched_by_their_order(
    refused, classify, tmp_path, there, here
):
    def rows(labels):
        return [{"text": "dog", "label": label} for label in labels]

    data = write_rows(tmp_path / "train.jsonl", rows(there))
    other = write_rows(tmp_path / "other.jsonl", rows(here))
    message = refused(classify(data, validation=other))
    allowed = ", ".join(map(str, there))
    assert message == f"{other}, line 1: got the label {here[0]!r}, allowed: {allowed}"


def test_an_index_out_of_range_names_its_line(refused, classify, tmp_path):
    rows = [{"text": "dog", "label": 0}, {"text": "cat", "label": 2}]
    data = write_rows(tmp_path / "train.jsonl", rows)
    message = refused(classify(data, labels=("no", "yes"), held_out=0))
    assert f"{data}, line 2: got the label 2, allowed: no, yes, or an index from 0 to 1" in message


def test_numbers_that_are_labels_are_not_indices(refused, classify, tmp_path):
    rows = [{"text": "dog", "label": label} for label in (1, 2, 2)]
    data = write_rows(tmp_path / "train.jsonl", rows)
    other = write_rows(tmp_path / "other.jsonl", [{"text": "dog", "label": 0}])
    message = refused(classify(data, validation=other))
    assert message == f"{other}, line 1: got the label 0, allowed: 1, 2"


@pytest.mark.parametrize("label", [None, "", 1.5, True, {"a": 1}])
def test_a_value_that_is_no_label_names_its_line(refused, classify, tmp_path, label):
    data = write_rows(tmp_path / "train.jsonl", [*GOOD, {"text": "dog", "label": label}])
    message = refused(classify(data))
    assert f"{data}, line 9: got the label {label!r}, allowed: a name or an integer" in message


@pytest.mark.parametrize("label", ["high", "nan", "inf", "1e30", ""])
def test_a_number_that_is_not_finite_names_its_line(refused, classify, tmp_path, label):
    rows = [{"text": "dog", "label": "1.5"}, {"text": "cat", "label": label}]
    data = write_rows(tmp_path / "train.csv", rows)
    message = refused(classify(data, regression=True))
    assert f"{data}, line 3: got the number {label!r}, allowed: a finite number" in message


def test_a_single_label_is_refused(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD[:1] * 4)
    assert refused(classify(data)).startswith("labels: got animal, allowed: at least two")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_an_empty_file_is_named(refused, classify, tmp_path, suffix):
    data = write_rows(tmp_path / f"train{suffix}", GOOD)
    if suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(GOOD)[:0], data)
    else:
        data.write_text("")
    assert f"{data}: the file has no rows, allowed: at least one" in refused(classify(data))


def test_an_empty_text_of_a_folder_is_named(refused, classify, tmp_path):
    for label in ("neg", "pos"):
        (tmp_path / "d" / "train" / label).mkdir(parents=True)
        (tmp_path / "d" / "train" / label / "0.txt").write_text(label)
    empty = tmp_path / "d" / "train" / "pos" / "1.txt"
    empty.write_text(" \n")
    assert refused(classify(tmp_path / "d")) == f"{empty}: the file is empty, allowed: a text"


def test_a_part_that_does_not_exist_is_named(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    nowhere = tmp_path / "nowhere.csv"
    assert f"test: {nowhere} does not exist" in refused(classify(data, test=nowhere))
    assert f"data: {nowhere} does not exist" in refused(classify(nowhere))


def test_a_folder_without_a_training_part_and_one_with_two_are_refused(refused, classify, tmp_path):
    write_rows(tmp_path / "d" / "test.csv", GOOD)
    message = refused(classify(tmp_path / "d"))
    assert "has no training part, allowed: train.csv, train.tsv, train.jsonl, train.p" in message
    write_rows(tmp_path / "d" / "train.csv", GOOD)
    write_rows(tmp_path / "d" / "train-2.csv", GOOD)
    assert "several files for the part train: train-2.csv, train.csv" in refused(
        classify(tmp_path / "d")
    )


def test_a_vocabulary_that_does_not_fit_is_named(refused, classify, pretrained, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    model = tmp_path / "model"
    shutil.copytree(pretrained, model)
    config = BertConfig.from_json(model / "config.json")
    BertModel(config.replace(vocab_size=100)).save_pretrained(model)
    message = refused(classify(data, model=model))
    assert re.search(rf"the tokenizer of {model} has ids up to \d+, but config.json says", message)
    assert "vocab_size 100" in message


def test_a_model_of_another_family_is_refused(refused, classify, pretrained, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    model = tmp_path / "model"
    shutil.copytree(pretrained, model)
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**content, "model_type": "roberta"}))
    message = refused(classify(data, model=model))
    assert "has the model type 'roberta', allowed: bert, bert-alibi" in message


def test_a_model_that_does_not_exist_is_named(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    assert "no such folder" in refused(classify(data, model="no such folder"))


def test_a_length_above_the_positions_is_refused(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    message = refused(classify(data, max_length=49))
    assert message.startswith("max_length: got 49, allowed: at most 48, the positions of ")


def test_a_held_out_part_that_leaves_nothing_is_refused(refused, classify, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD[:2])
    message = refused(classify(data, held_out=0.9))
    assert message.startswith("held_out: got 0.9 of 2 examples or contexts, which leaves none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs: got 0, allowed: an integer >= 1"),
        ({"batch_size": True}, "batch_size: got True, allowed: an integer >= 1"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, allowed: a finite number > 0"),
        ({"warmup": 1.0}, r"warmup: got 1.0, allowed: a number in \[0, 1\)"),
        ({"held_out": -0.1}, r"held_out: got -0.1, allowed: a number in \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay: got -1, allowed: a finite number >= 0"),
        ({"precision": "fp16"}, "precision: got 'fp16', allowed: fp32, bf16"),
        ({"seed": -1}, "seed: got -1, allowed: an integer"),
        ({"backend": "gpu"}, "backend: got 'gpu', allowed: None, reference"),
        ({"save_every": 0}, "save_every: got 0, allowed: None or an integer >= 1"),
        ({"save_minutes": -1}, "save_minutes: got -1, allowed: None or a finite number > 0"),
        ({"max_length": 0}, "max_length: got 0, allowed: None or an integer >= 1"),
        ({"labels": ("a",)}, "labels: got a, allowed: at least two different names"),
        ({"labels": ("a", "a")}, "labels: got a, a, allowed: at least two different names"),
        ({"labels": ("a", "b"), "regression": True}, "labels and regression: got"),
    ],
)
def test_a_wrong_option_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ClassifyOptions(model="model", data="data", output="out", **changes)


def test_a_model_without_a_head_cannot_predict(pretrained, tmp_path):
    data = write_rows(tmp_path / "train.csv", GOOD)
    with pytest.raises(ValueError, match=r"is a BertForPreTraining, allowed: BertForSequenceCl"):
        predict(pretrained, data, tmp_path / "said.jsonl")
    with pytest.raises(ValueError, match=r"output: got .*said.csv', allowed: a .jsonl file, or"):
        predict(pretrained, data, tmp_path / "said.csv")
    assert not (tmp_path / "said.jsonl").exists()


@pytest.mark.parametrize("names", [{"0": "a", "2": "b"}, {"0": "c", "1": "c"}, ["a", "b"], 5, "xy"])
def test_labels_without_names_name_the_file_of_the_model(classify, tmp_path, names):
    data = write_rows(tmp_path / "train.csv", GOOD)
    model = run(classify(data, held_out=0.0, epochs=1))[0].model
    path = model / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "num_labels": 2, "id2label": names}))
    with pytest.raises(ValueError, match=rf"^{path}: .*allowed: "):
        predict(model, data, tmp_path / "said.jsonl")


def test_predictions_do_not_replace_the_data(tmp_path):
    data = write_rows(tmp_path / "mine.jsonl", GOOD)
    before = data.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(data)
    for output in (data, tmp_path / "." / "mine.jsonl", link):
        with pytest.raises(ValueError, match=r"output: got .*, the data themselves; allowed: "):
            predict("model", data, output)
        with pytest.raises(ValueError, match=r"output: got .*, the data themselves; allowed: "):
            predict("model", output, data)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"folder\.jsonl', a folder; allowed: another name"):
        predict("model", data, tmp_path / "folder.jsonl")
    assert data.read_bytes() == before


def test_a_head_that_lacks_a_weight_cannot_predict(classify, tmp_path):
    from fastbert.io import safetensors_file

    data = write_rows(tmp_path / "train.csv", reviews(24, 0))
    folder = run(classify(data, epochs=1))[0].model
    weights = safetensors_file.read(folder / "model.safetensors")
    del weights["classifier.bias"]
    safetensors_file.write(folder / "model.safetensors", weights)
    with pytest.raises(ValueError, match=rf"model: {folder} lacks classifier.bias"):
        predict(folder, data, tmp_path / "said.jsonl")
