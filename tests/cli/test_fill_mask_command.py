"""``fastbert fill-mask`` predicts the masked words as transformers does."""

from __future__ import annotations

import json

import pytest
import torch

from fastbert.data import WordPieceTokenizer
from fastbert.modules import BertForMaskedLM, BertModel


def test_candidates_are_the_likeliest(run, model_folder):
    text = "the [MASK] is in the garden."
    result = run("fill-mask", model_folder, text, "--top-k", 3, "--json")
    (mask,) = json.loads(result.stdout)["masks"]
    tokenizer = WordPieceTokenizer.load(model_folder)
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        logits = BertForMaskedLM.from_pretrained(model_folder)(input_ids=ids).logits
    best = logits[0, mask["position"]].softmax(-1).topk(3)
    assert ids[0, mask["position"]] == tokenizer.mask_id
    assert [row["id"] for row in mask["candidates"]] == best.indices.tolist()
    probabilities = [row["probability"] for row in mask["candidates"]]
    assert probabilities == best.values.tolist()
    for row in mask["candidates"]:
        assert row["token"] == tokenizer.id_to_token(row["id"])
        assert "[MASK]" not in row["sentence"]


def test_each_mask_has_a_table(run, model_folder):
    result = run("fill-mask", model_folder, "[MASK] saw [MASK].", "--top-k", 1)
    assert result.exit_code == 0
    assert result.stdout.count("[MASK] at token") == 2


def test_no_mask(refused, model_folder):
    line = refused("fill-mask", model_folder, "nothing to fill")
    assert "TEXT: got 'nothing to fill', allowed: text with at least one [MASK]" in line


def test_too_long(refused, model_folder):
    assert "allowed: at most 40" in refused("fill-mask", model_folder, "[MASK] " * 60)


def test_no_folder(refused, tmp_path):
    assert "nowhere" in refused("fill-mask", tmp_path / "nowhere", "[MASK]")


def test_unknown_backend(refused, model_folder):
    assert "got 'rocm'" in refused("fill-mask", model_folder, "[MASK]", "--backend", "rocm")


def test_a_model_without_the_head_is_refused(refused, model_folder, tmp_path):
    with pytest.warns(UserWarning, match="pooler"):
        BertModel.from_pretrained(model_folder).save_pretrained(tmp_path)
    WordPieceTokenizer.load(model_folder).save(tmp_path)
    assert "the masked-LM head is incomplete" in refused("fill-mask", tmp_path, "[MASK]")
