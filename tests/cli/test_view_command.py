"""``fastbert view``."""

from __future__ import annotations

import json
import shutil

import pytest

from fastbert.modules import BertModel


def test_a_page_is_written(run, model_folder, tmp_path):
    path = tmp_path / "new" / "page.html"
    result = run("view", model_folder, "the [MASK] is old", "--pair", "a boy", "-o", path, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["output"] == str(path)
    assert summary["bytes"] == path.stat().st_size
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "TEXT: got '', allowed: a text that is not empty"),
        (("a", "--pair", " "), "--pair: got ' ', allowed: a text that is not empty"),
        (("old " * 60,), "tokens, allowed: at most 40, the model's positions"),
        (("a", "--layers", "0,two"), "--layers: got '0,two', allowed: numbers separated by"),
        (("a", "--layers", "7"), "layers: got layer 7, allowed"),
        (("a", "--backend", "rocm"), "--backend: got 'rocm', allowed"),
    ],
)
def test_a_mistake_leaves_no_file(refused, model_folder, tmp_path, arguments, message):
    assert message in refused("view", model_folder, *arguments, "-o", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("birds/model", None, "birds"),
        ("birds/model", "gt/owls", "owls"),
        ("birds", "gt/owls", "birds"),
        ("birds/model", ["owls"], "birds"),
    ],
)
def test_the_name_of_the_model(run, model_folder, tmp_path, folder, source, name):
    copy = shutil.copytree(model_folder, tmp_path / folder)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config |= {} if source is None else {"_name_or_path": source}
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = run("view", copy, "the [MASK]", "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f'"title":"Attention of {name}"' in html


def test_no_folder(refused, tmp_path):
    assert "nowhere" in refused("view", tmp_path / "nowhere", "a", "-o", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_as_output_is_refused(refused, model_folder, tmp_path):
    assert "a folder; allowed: the name of a file" in refused(
        "view", model_folder, "a", "-o", tmp_path
    )


def test_a_model_of_another_family(run, tmp_path):
    """``view`` accepts the folder of an ALBERT with a masked-LM head, saved by transformers."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "mill"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token="[MASK]", pad_token="[PAD]", sep_token="[SEP]"
    )
    sizes = {"hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2}
    config = transformers.AlbertConfig(
        vocab_size=7, num_attention_heads=2, intermediate_size=40, **sizes
    )
    transformers.AlbertForMaskedLM(config).save_pretrained(tmp_path / "model")
    wrapped.save_pretrained(tmp_path / "model")
    result = run("view", tmp_path / "model", "a [MASK]", "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"kind":"mask"' in html
    assert f'"model":"{tmp_path.name}"' in html


def test_a_model_without_a_head(run, model_folder, tmp_path):
    from fastbert.data import WordPieceTokenizer

    with pytest.warns(UserWarning, match="pooler"):
        BertModel.from_pretrained(model_folder).save_pretrained(tmp_path / "model")
    WordPieceTokenizer.load(model_folder).save(tmp_path / "model")
    result = run("view", tmp_path / "model", "a [MASK]", "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert '"prediction":null' in (tmp_path / "page.html").read_text(encoding="utf-8")
