"""``fastbert explain`` and ``fastbert word-map`` write the right output and refuse bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastbert.analysis.explain import METHODS
from fastbert.data import WordPieceTokenizer
from fastbert.modules import BertForMaskedLM, BertForSequenceClassification

pytest.importorskip("captum")
TEXT = "the dog ran [home]."


@pytest.fixture(scope="module")
def classifier(model_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    config = BertForMaskedLM.from_pretrained(model_folder).config
    torch.manual_seed(2)
    BertForSequenceClassification(config.replace(num_labels=2)).save_pretrained(folder)
    WordPieceTokenizer.load(model_folder).save(folder, max_length=40)
    return folder


def test_explain_prints_a_table_writes_a_page_and_gives_json(run, classifier, tmp_path):
    page = tmp_path / "page.html"
    result = run("explain", classifier, TEXT, "-o", page)
    assert result.exit_code == 0, result.output
    for part in (*METHODS, "dog", "completeness error", "Spearman", str(page)):
        assert part in result.output
    text = page.read_text(encoding="utf-8")
    assert all(name in text for name in METHODS)
    assert "Kendall" in text
    result = run("explain", classifier, TEXT, "--json", "--target", "LABEL_1", "--steps", 3)
    content = json.loads(result.output)
    assert content["label"] == "LABEL_1"
    assert content["steps"] == 3
    assert content["words"] == ["the", "dog", "ran", "[", "home", "]", "."]
    assert list(content["attributions"]) == list(METHODS)
    assert len(content["attributions"]["leave-one-out"]["words"]) == 7
    total = sum(content["attributions"]["integrated gradients"]["pieces"])
    expected = content["logit"] - content["baseline"] + content["completeness_error"]
    assert total == pytest.approx(expected, abs=1e-5)


def test_explain_takes_a_pair(run, refused, classifier, tmp_path):
    page = tmp_path / "page.html"
    result = run("explain", classifier, TEXT, "--pair", "a dog", "--json", "-o", page)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["words"] == ["the", "dog", "ran", "[", "home", "]", ".", "a", "dog"]
    assert (content["pair"], content["second"]) == ("a dog", 7)
    assert page.read_text(encoding="utf-8").count('<p class="heat">') == 2 * len(METHODS)
    table = run("explain", classifier, TEXT, "--pair", "a dog")
    assert table.exit_code == 0, table.output
    assert "--pair: got '', allowed" in refused("explain", classifier, TEXT, "--pair", "")


def test_explain_refuses_bad_input_and_writes_nothing(
    refused, run, classifier, model_folder, tmp_path
):
    page = tmp_path / "page.html"
    assert "TEXT: got '', allowed: a text that is not blank" in refused(
        "explain", classifier, "", "-o", page
    )
    assert "allowed: at most 40, the positions of" in refused(
        "explain", classifier, "the " * 60, "-o", page
    )
    assert "target: got 'good', allowed: LABEL_0, LABEL_1" in refused(
        "explain", classifier, TEXT, "--target", "good", "-o", page
    )
    assert "classification head is incomplete" in refused("explain", model_folder, TEXT, "-o", page)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused("explain", empty, TEXT, "-o", page)
    (empty / "config.json").write_text(json.dumps({"model_type": "fnet"}))
    assert "fnet" in refused("explain", empty, TEXT, "-o", page)
    assert "allowed: a .html file" in refused("explain", classifier, TEXT, "-o", tmp_path / "x.txt")
    # The command checks the name of the output before it loads a model.
    absent = tmp_path / "absent"
    assert "got '" + str(tmp_path / "x.txt") in refused(
        "explain", absent, TEXT, "-o", tmp_path / "x.txt"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_explain_takes_another_family_of_transformers(run, model_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "distilbert"
    tokenizer = WordPieceTokenizer.load(model_folder)
    config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64,
        max_position_embeddings=30, initializer_range=0.3, id2label={0: "no", 1: "yes"},
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.DistilBertForSequenceClassification(config).eval()
    stock.save_pretrained(folder)
    tokenizer.save(folder)
    content = json.loads(run("explain", folder, TEXT, "--json").output)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        logits = stock(ids).logits[0]
    assert content["logit"] == pytest.approx(float(logits.max()), abs=1e-4)
    assert content["label"] == ("no", "yes")[int(logits.argmax())]
    assert sum(content["attributions"]["rollout"]["pieces"]) == pytest.approx(1, abs=1e-5)
    # DistilBERT has no token types, so a pair of texts is only a longer sequence.
    content = json.loads(run("explain", folder, TEXT, "--pair", "a dog", "--json").output)
    with torch.no_grad():
        logits = stock(torch.tensor([tokenizer.encode_pair(TEXT, "a dog")[0]])).logits[0]
    assert content["logit"] == pytest.approx(float(logits.max()), abs=1e-4)
    result = run("explain", folder, "the " * 29)
    assert result.exit_code == 2
    assert "got 31 tokens, allowed: at most 30" in " ".join(result.output.split())


def test_word_map_writes_a_page(run, refused, model_folder, tmp_path):
    texts, page = tmp_path / "texts.txt", tmp_path / "dog.html"
    texts.write_text("The dog ran home. A cat slept. My dog saw a bird.")
    result = run("word-map", model_folder, texts, "dog", "-o", page)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 of 2 sentences, 100.0% of the variance")
    assert page.read_text(encoding="utf-8").count("<circle") == 2
    content = json.loads(run("word-map", model_folder, texts, "dog", "-o", page, "--json").output)
    assert [occurrence["text"] for occurrence in content["occurrences"]] == [
        "The dog ran home.",
        "My dog saw a bird.",
    ]
    page.unlink()
    assert "a word in at least two" in refused("word-map", model_folder, texts, "cat", "-o", page)
    assert "layer: got 9" in refused(
        "word-map", model_folder, texts, "dog", "-o", page, "--layer", 9
    )
    assert not page.exists()
