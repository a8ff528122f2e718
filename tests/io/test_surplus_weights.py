"""Encoder weights that do not fit the configuration raise an error that names these weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.io import checkpoint

CONFIG = BertConfig(
    vocab_size=101,
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=36,
    max_position_embeddings=16,
)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "max_position_embeddings": 16,
}
# A row has the class of the family, its key for the number of layers, and a weight of the last
# layer.
LAYER = "encoder.layer.3."
FAMILIES: dict[str, tuple[str, str, str]] = {
    "roberta": ("Roberta", "num_hidden_layers", f"{LAYER}output.dense.weight"),
    "xlm-roberta": ("XLMRoberta", "num_hidden_layers", f"{LAYER}output.dense.weight"),
    "camembert": ("Camembert", "num_hidden_layers", f"{LAYER}output.dense.weight"),
    "electra": ("Electra", "num_hidden_layers", f"{LAYER}output.dense.weight"),
    "distilbert": ("DistilBert", "n_layers", "transformer.layer.3.ffn.lin1.weight"),
    "mpnet": ("MPNet", "num_hidden_layers", f"{LAYER}attention.attn.q.weight"),
    "nomic_bert": ("NomicBert", "num_hidden_layers", "encoder.layers.3.attn.Wqkv.weight"),
    "modernbert": ("ModernBert", "num_hidden_layers", "layers.3.attn.Wo.weight"),
}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / checkpoint.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))


def add_weights(folder: Path, **added: torch.Tensor) -> None:
    tensors = load_file(folder / checkpoint.WEIGHTS)
    save_file(tensors | added, folder / checkpoint.WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
@pytest.mark.parametrize("opened", ["BertModel", "BertForMaskedLM"])
def test_more_layers_than_the_configuration_says(kind, opened, tmp_path) -> None:
    getattr(modules, kind)(CONFIG).save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=1)
    message = (
        r"48 weights of the encoder have no place .* num_hidden_layers 1: .*"
        r"encoder\.layer\.1\.attention\.self\.query\.weight.*and 38 more"
    )
    with pytest.raises(ValueError, match=message) as caught:
        getattr(modules, opened).from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_layers_in_every_family(family, prefix, tmp_path) -> None:
    name, key, weight = FAMILIES[family]
    torch.manual_seed(0)
    head = "ForMaskedLM" if prefix else "Model"
    sizes = SIZES | ({"pad_token_id": 1} if family == "modernbert" else {})
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, name + head)(config).save_pretrained(tmp_path)
    assert any(stored.endswith(weight) for stored in load_file(tmp_path / checkpoint.WEIGHTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The model with this head has no pooler.
        modules.BertModel.from_pretrained(tmp_path)
    changes: dict[str, Any] = {key: 3}
    if family == "modernbert":
        changes["layer_types"] = config.layer_types[:3]
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match="weights of the encoder have no place") as caught:
        modules.BertModel.from_pretrained(tmp_path)
    assert "3." in str(caught.value)


def test_an_adapter_in_a_layer_is_not_dropped(tmp_path) -> None:
    modules.BertModel(CONFIG).save_pretrained(tmp_path)
    name = "encoder.layer.2.attention.self.query.lora_A.weight"
    add_weights(tmp_path, **{name: torch.zeros(2, 24)})
    with pytest.raises(ValueError, match=f"1 weight of the encoder has no place .*{name}"):
        modules.BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_heads_and_buffers_of_old_checkpoints_are_no_surplus(prefix, tmp_path) -> None:
    kind = modules.BertForMaskedLM if prefix else modules.BertModel
    kind(CONFIG).save_pretrained(tmp_path)
    add_weights(
        tmp_path,
        **{
            f"{prefix}embeddings.position_ids": torch.arange(16)[None],
            f"{prefix}embeddings.token_type_ids": torch.zeros(1, 16).long(),
            f"{prefix}pooler.dense.weight": torch.zeros(24, 24),
            f"{prefix}pooler.dense.bias": torch.zeros(24),
            "classifier.weight": torch.zeros(2, 24),
            "classifier.bias": torch.zeros(2),
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind.from_pretrained(tmp_path)


def albert(folder: Path, **sizes: int) -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**{**SIZES, "embedding_size": 16, **sizes})
    transformers.AlbertModel(config).save_pretrained(folder)


def test_layers_that_albert_shares_are_no_surplus(tmp_path) -> None:
    """Three groups of two layers have six stored layers, whatever `num_hidden_layers` is."""
    albert(tmp_path, num_hidden_groups=3, inner_group_num=2)
    for layers in (3, 4, 12):
        change_config(tmp_path, num_hidden_layers=layers)
        assert len(modules.BertModel.from_pretrained(tmp_path).encoder.layer) == 6
    # With fewer layers than groups, transformers does not run the last groups either.
    change_config(tmp_path, num_hidden_layers=2)
    ours = modules.BertModel.from_pretrained(tmp_path)
    stock = transformers.AlbertModel.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        states = (side.eval()(ids).last_hidden_state for side in (ours, stock))
        torch.testing.assert_close(*states)


def test_groups_that_albert_does_not_have_are_surplus(tmp_path) -> None:
    albert(tmp_path, num_hidden_groups=2)
    change_config(tmp_path, num_hidden_groups=1)
    with pytest.raises(ValueError, match=r"no place .*albert_layer_groups\.1\.albert_layers\.0"):
        modules.BertModel.from_pretrained(tmp_path)
