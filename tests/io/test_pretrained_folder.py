"""Whole models can be saved and loaded with fastbert and with transformers."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.io import checkpoint, safetensors_file

CONFIG = BertConfig(
    vocab_size=101,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=36,
    max_position_embeddings=16,
)
MODELS = [name for name in modules.__all__ if name.startswith("BertFor") and "Output" not in name]
MODELS.append("BertModel")
IDS = torch.randint(1, 101, (2, 9), generator=torch.Generator().manual_seed(0))


def inputs_of(name: str) -> dict[str, Tensor]:
    return {"input_ids": IDS[:, None] if name == "BertForMultipleChoice" else IDS}


def stored_names(folder: Path) -> set[str]:
    return set(safetensors.torch.load_file(folder / checkpoint.WEIGHTS))


def no_warning(function: Any, *arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tie", [True, False])
def test_there_and_back(name: str, tie: bool, tmp_path: Path) -> None:
    ours = getattr(modules, name)(CONFIG.replace(tie_word_embeddings=tie)).eval()
    ours.save_pretrained(tmp_path / "ours")
    stock, report = getattr(transformers, name).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    for key, tensor in stock.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key
    expected = stock(**inputs_of(name))
    for got, want in zip(ours(**inputs_of(name)), expected.to_tuple(), strict=True):
        torch.testing.assert_close(got, want)

    stock.save_pretrained(tmp_path / "stock")
    assert stored_names(tmp_path / "ours") == stored_names(tmp_path / "stock")
    again = no_warning(type(ours).from_pretrained, tmp_path / "stock")
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key
    assert not again.training


def test_config_json(tmp_path: Path) -> None:
    model = modules.BertForTokenClassification(CONFIG.replace(num_labels=5)).bfloat16()
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["architectures"] == ["BertForTokenClassification"]
    assert content["model_type"] == "bert"
    assert content["dtype"] == "bfloat16"
    assert len(content["id2label"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = modules.BertForTokenClassification.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.config == model.config
    single = modules.BertForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert single.dtype == torch.float32


def test_unknown_keys_of_a_configuration_survive(tmp_path: Path) -> None:
    extra = {"id2label": {"0": "no", "1": "yes"}, "torch_dtype": "float16", "custom": [1, 2]}
    modules.BertModel(CONFIG.replace(extra=extra)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["id2label"] == {"0": "no", "1": "yes"}
    assert content["custom"] == [1, 2]
    assert "torch_dtype" not in content


def test_overrides(tmp_path: Path) -> None:
    modules.BertModel(CONFIG).save_pretrained(tmp_path)
    model = modules.BertModel.from_pretrained(
        tmp_path, hidden_dropout_prob=0.0, backend="reference"
    )
    assert model.config.hidden_dropout_prob == 0.0
    assert model.backend == "reference"
    with pytest.raises(ValueError, match=r"config_overrides: got 'attn_implementation', allowed: "):
        modules.BertModel.from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.raises(ValueError, match="backend: got 'fast', allowed"):
        modules.BertModel.from_pretrained(tmp_path, backend="fast")


def test_the_body_of_a_pre_trained_model(tmp_path: Path) -> None:
    source = modules.BertForPreTraining(CONFIG)
    source.save_pretrained(tmp_path)
    body = no_warning(modules.BertModel.from_pretrained, tmp_path)
    for key, tensor in body.state_dict().items():
        assert torch.equal(tensor, source.state_dict()["bert." + key]), key


def test_a_head_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    source = modules.BertModel(CONFIG)
    source.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="newly initialized") as caught:
        model = modules.BertForPreTraining.from_pretrained(tmp_path)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "cls.predictions.transform.dense.weight" in message
    assert "cls.seq_relationship.bias" in message
    assert "decoder" not in message
    assert caught[0].filename == __file__
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, model.state_dict()["bert." + key]), key
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    assert model.cls.seq_relationship.weight.std() > 0


def test_a_masked_lm_has_no_pooler(tmp_path: Path) -> None:
    modules.BertForMaskedLM(CONFIG).save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"newly initialized: pooler.dense.weight, pooler.dense.bias\.$"
    ):
        modules.BertModel.from_pretrained(tmp_path)


def test_weights_that_no_bert_knows(tmp_path: Path) -> None:
    source = modules.BertModel(CONFIG)
    source.save_pretrained(tmp_path)
    tensors = dict(source.state_dict())
    tensors["embeddings.position_ids"] = torch.arange(16)
    tensors["adapter.weight"] = torch.zeros(3)
    safetensors_file.write(tmp_path / checkpoint.WEIGHTS, tensors)
    with pytest.warns(UserWarning, match=r"in the checkpoint, but unknown: adapter.weight\.$"):
        modules.BertModel.from_pretrained(tmp_path)


def test_old_names(tmp_path: Path) -> None:
    source = modules.BertForPreTraining(CONFIG)
    source.save_pretrained(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): t
        for name, t in source.state_dict().items()
        if not name.endswith("predictions.bias")
    }
    old = {name: tensor.clone() for name, tensor in old.items()}
    safetensors_file.write(tmp_path / checkpoint.WEIGHTS, old)
    model = no_warning(modules.BertForPreTraining.from_pretrained, tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[key]), key


def test_shards(tmp_path: Path) -> None:
    source = modules.BertModel(CONFIG)
    source.save_pretrained(tmp_path)
    (tmp_path / checkpoint.WEIGHTS).unlink()
    names = list(source.state_dict())
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        shard = {n: t for n, t in source.state_dict().items() if places[n] == place}
        safetensors_file.write(tmp_path / place, shard)
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model = no_warning(modules.BertModel.from_pretrained, tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[key]), key


def test_a_pickled_state_dict(tmp_path: Path) -> None:
    source = modules.BertModel(CONFIG)
    source.save_pretrained(tmp_path)
    (tmp_path / checkpoint.WEIGHTS).unlink()
    torch.save(source.state_dict(), tmp_path / checkpoint.PICKLED)
    model = modules.BertModel.from_pretrained(tmp_path)
    assert torch.equal(model.pooler.dense.weight, source.pooler.dense.weight)


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_a_sentence_transformers_folder(inner: str, tmp_path: Path) -> None:
    modules.BertModel(CONFIG).save_pretrained(tmp_path / inner)
    listing = [{"idx": 0, "path": inner, "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(listing))
    assert modules.BertModel.from_pretrained(tmp_path).config == CONFIG


def test_saving_again_replaces(tmp_path: Path) -> None:
    first, second = modules.BertModel(CONFIG), modules.BertModel(CONFIG)
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    again = modules.BertModel.from_pretrained(tmp_path)
    assert torch.equal(again.pooler.dense.weight, second.pooler.dense.weight)
    assert len(list(tmp_path.iterdir())) == 2


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    modules.BertModel(CONFIG).save_pretrained(tmp_path)
    (tmp_path / "plain").touch()
    expected = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {expected}


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path) -> None:
    source = modules.BertModel(CONFIG)
    source.save_pretrained(tmp_path)
    model = modules.BertModel.from_pretrained(tmp_path)
    size = os.path.getsize(tmp_path / checkpoint.WEIGHTS)
    (tmp_path / checkpoint.WEIGHTS).write_bytes(bytes(size))
    assert torch.equal(model.pooler.dense.weight, source.pooler.dense.weight)
