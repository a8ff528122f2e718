"""A page shows the right name of its model."""

from __future__ import annotations

import pytest

import fastbert
from fastbert.viewer.model_name import model_name


@pytest.mark.parametrize(
    ("place", "source", "name"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", "", "all-MiniLM-L6-v2"),
        # The configuration of a fine-tuned model names the model that was fine-tuned.
        ("runs/tweets", "bert-base-uncased", "tweets"),
        ("runs/tweets/model", "google-bert/bert-base-uncased", "bert-base-uncased"),
        ("runs/tweets/model", "", "tweets"),
        ("runs/tweets/final_model/", "./checkpoint-500", "tweets"),
        ("tweets/Best-Model/0_Transformer", "", "tweets"),
        ("models--gt--tweets/snapshots/" + "0123456789" * 4, "", "models--gt--tweets"),
        # A generic word, such as "model", may be a part of a name.
        ("model/tweet-model", "", "tweet-model"),
        ("out/checkpoints/1", "", None),
        ("model", "model", None),
        ("", "", None),
    ],
)
def test_the_name_is_no_generic_word(place, source, name):
    assert model_name(place, source) == name


def test_a_relative_folder_has_the_folders_above_it(tmp_path, monkeypatch):
    folder = tmp_path / "tweets" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert model_name(".") == "tweets"
    monkeypatch.chdir(folder.parent)
    assert model_name("model") == "tweets"


def test_a_model_without_a_place_has_the_name_of_its_class(masked_lm, tokenizer):
    html = fastbert.view(masked_lm, tokenizer, "The old mill.").html
    assert '"title":"Attention of BertForMaskedLM"' in html


def test_a_model_of_transformers_has_the_name_of_its_folder(tokenizer, masked_lm, tmp_path):
    transformers = pytest.importorskip("transformers")
    masked_lm.save_pretrained(tmp_path / "tweets" / "model")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "tweets" / "model")
    html = fastbert.view(model, tokenizer, "The old mill.").html
    assert '"title":"Attention of tweets"' in html
