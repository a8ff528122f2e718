"""transformers and fastbert open each other's Marian checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from marian_pair import PAD, batch, ours, stock

from fastbert.io import safetensors_file
from fastbert.modules.transformer import Transformer, TransformerConfig

TABLES = {
    "shared": {},
    "separate": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 131},
    "untied": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 131,
        "tie_word_embeddings": False,
    },
}
# These keys describe the file, not the model.
ABOUT_THE_FILE = {"transformers_version", "dtype", "_name_or_path"}


def reopened(folder):
    model, info = transformers.MarianMTModel.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tables", TABLES)
def test_there_and_back(tables, dtype, tmp_path):
    model = stock(**TABLES[tables]).to(dtype)
    built = ours(model, tmp_path / "stock")
    assert built.dtype == dtype
    assert built.num_parameters() == sum(p.numel() for p in model.parameters())
    built.save_pretrained(tmp_path / "ours")
    same_weights(reopened(tmp_path / "ours"), model)
    files = [
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("stock", "ours")
    ]
    known, written = ({k: v for k, v in f.items() if k not in ABOUT_THE_FILE} for f in files)
    assert known == {key: value for key, value in written.items() if key in known}
    again = Transformer.from_pretrained(tmp_path / "ours")
    same_weights(again, built)
    assert again.config == built.config
    assert again.generation == built.generation


def test_a_new_model_opens_in_transformers(tmp_path):
    config = TransformerConfig(
        vocab_size=101, d_model=48, encoder_layers=1, decoder_layers=2, max_position_embeddings=40
    )
    model = Transformer(config).eval()
    model.save_pretrained(tmp_path)
    inputs = batch(3, "none", 0)
    expected = reopened(tmp_path)(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert json.loads((tmp_path / "config.json").read_text())["label_smoothing"] == 0.1
    assert Transformer.from_pretrained(tmp_path).config == config


def test_learned_positions_open_in_transformers(tmp_path):
    config = TransformerConfig(
        vocab_size=101, d_model=48, encoder_layers=1, decoder_layers=1,
        max_position_embeddings=40, static_position_embeddings=False,
    )  # fmt: skip
    model, inputs = Transformer(config), batch(3, "none", 0)
    model(**inputs).loss.backward()
    for side in (model.encoder_embeddings, model.decoder_embeddings):
        assert side.position_embeddings.weight.grad.any()
    model.eval().save_pretrained(tmp_path)
    torch.testing.assert_close(model(**inputs).logits, reopened(tmp_path)(**inputs).logits)
    same_weights(Transformer.from_pretrained(tmp_path), model)


def test_an_older_checkpoint(tmp_path):
    """Versions 4 of transformers stored every name of a tied table, and the sinusoids."""
    model = stock()
    new = ours(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["final_logits_bias"] = model.final_logits_bias
    assert {"lm_head.weight", "model.encoder.embed_positions.weight"} < state.keys()
    torch.save(state, tmp_path / "pytorch_model.bin")
    same_weights(Transformer.from_pretrained(tmp_path), new)
    del state["model.shared.weight"], state["model.encoder.embed_tokens.weight"]
    del state["final_logits_bias"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    old = Transformer.from_pretrained(tmp_path)
    assert not old.head.bias.any()
    old.head.bias.copy_(new.head.bias)
    same_weights(old, new)


def test_shards(tmp_path):
    model = stock()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_weights(Transformer.from_pretrained(tmp_path), ours(model, tmp_path / "whole"))


def test_the_defaults_are_those_of_marian():
    from fastbert.io.marian import read_config

    config, stock_config = read_config({"model_type": "marian"}), transformers.MarianConfig()
    for name, value in config.to_dict().items():
        if hasattr(stock_config, name):
            assert getattr(stock_config, name) == value, name


def test_settings_of_a_published_model():
    """These are the keys of a config.json of Helsinki-NLP that transformers does not write."""
    from fastbert.io.marian import read_config, write_config

    content = transformers.MarianConfig(activation_function="relu").to_dict() | {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": 0.0,
        "extra_pos_embeddings": 58101,
        "force_bos_token_to_be_generated": False,
        "normalize_before": False,
        "normalize_embedding": False,
        "num_hidden_layers": 12,
        "static_position_embeddings": True,
    }
    config = read_config(content)
    assert config.extra["extra_pos_embeddings"] == 58101
    written = write_config(config)
    assert "num_hidden_layers" not in written
    assert read_config(written) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bart"}, "model_type: got 'bart', allowed: marian, fastbert_transformer"),
        ({"normalize_embedding": True}, "normalize_embedding: got True, allowed: False"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm: got True"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop: got 0.1, allowed: 0.0"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop: got 0.1, allowed: 0.0"),
        ({"normalize_before": True}, "normalize_before: got True, allowed: False, because"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: got 3, allowed: 2, as encoder_layers"),
        ({"d_model": 47}, "d_model: got 47, allowed: a multiple of encoder_attention_heads"),
        ({"d_model": None}, "d_model: got None"),
        ({"eos_token_id": 101}, "eos_token_id: got 101, allowed: None or 0 <= id <"),
        ({"pad_token_id": None}, "pad_token_id: got None"),
        ({"activation_function": "selu"}, "activation_function: got 'selu', allowed: gelu"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: got False, allowed: True with"),
        ({"decoder_vocab_size": 55}, "decoder_vocab_size: got 55, allowed: vocab_size"),
        ({"dropout": -1}, "dropout: got -1"),
        ({"label_smoothing": 2}, "label_smoothing: got 2"),
        ({"scale_embedding": 1}, "scale_embedding: got 1, allowed: True or False"),
        ({"decoder_layers": 3}, "missing: 26 weights: decoder.layer.2.attention"),
        (
            {"encoder_layers": 1},
            "not in the model of config.json: 16 weights: model.encoder.layers.1",
        ),
        ({"encoder_ffn_dim": 81}, "encoder.layer.0.intermediate.dense.bias: got shape"),
    ],
)
def test_refused_settings(changes, message, tmp_path):
    stock().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as raised:
        Transformer.from_pretrained(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_refused_weights(tmp_path):
    stock().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = safetensors_file.read(weights)
    safetensors_file.write(weights, tensors | {"model.extra.weight": torch.ones(1)})
    with pytest.raises(ValueError, match="1 weights: model"):
        Transformer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config_overrides: got 'layers', allowed: vocab_size"):
        Transformer.from_pretrained(tmp_path, layers=3)
    with pytest.raises(FileNotFoundError, match="path_or_hub_id"):
        Transformer.from_pretrained(tmp_path / "absent")
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file")
    with pytest.raises(ValueError, match="folder: got"):
        Transformer(TransformerConfig(vocab_size=PAD, d_model=16)).save_pretrained(tmp_path)
