"""ALiBi in fastbert's own models: stock BERT with the bias in its mask is the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fastbert import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel
from fastbert.io import families
from fastbert.modules.positions import DistanceSlopes
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytest.importorskip("transformers")

import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def alibi(kind: Any = BertModel, **changes: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES | changes, model_type="bert-alibi")).eval()


def batch(padding: str = "right") -> dict[str, Tensor]:
    exists = torch.arange(24) < torch.tensor([24, 9, 17])[:, None]
    if padding == "left":
        exists = exists.flip(1)
    elif padding == "middle":
        exists[:, 10:13] = False
    ids = torch.randint(1, 97, exists.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * exists, "attention_mask": exists.long()}


def stock_states(ours: BertModel, inputs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the states of stock BERT without positions, and with the bias in its mask."""
    config = transformers.BertConfig(**SIZES, attn_implementation="eager")
    stock = transformers.BertModel(config, add_pooling_layer=False).eval()
    missing = stock.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert [name for name in missing if "position" not in name] == []
    stock.embeddings.position_embeddings.weight.data.zero_()
    stock = stock.to(dtype)
    mask = inputs["attention_mask"]
    heads, length = 3, mask.shape[1]
    slopes = -build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    places = torch.arange(length)
    bias = slopes[:, None, None] * (places[:, None] - places).abs()
    bias = bias.to(dtype).expand(len(mask), heads, length, length)
    bias = bias.masked_fill(~mask.bool()[:, None, None], torch.finfo(dtype).min)
    return stock(inputs["input_ids"], attention_mask=bias).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 20])
def test_slopes_are_those_of_the_authors(heads) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(DistanceSlopes(heads).slopes), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", ["right", "left", "middle"])
def test_agrees_with_stock_bert_with_the_bias_in_its_mask(padding, dtype) -> None:
    ours, inputs = alibi().to(dtype), batch(padding)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        actual = ours(**inputs).last_hidden_state[real]
        oracle = stock_states(ours, inputs, torch.float64)
        assert_close("states", actual, oracle, Yardstick(lambda: stock_states(ours, inputs, dtype)))


def test_gradients_agree() -> None:
    ours, inputs = alibi(), batch()
    ours(**inputs).last_hidden_state[inputs["attention_mask"].bool()].square().sum().backward()
    actual = ours.encoder.layer[0].attention.self.qkv.weight.grad.clone()

    def expected(dtype: torch.dtype) -> Tensor:
        # The stock model has copies of the parameters, so the gradient is found by differences.
        weight = ours.encoder.layer[0].attention.self.qkv.weight
        slope = []
        for sign in (1e-4, -1e-4):
            with torch.no_grad():
                weight[5, 7] += sign
                slope.append(stock_states(ours, inputs, dtype).square().sum())
                weight[5, 7] -= sign
        return (slope[0] - slope[1]) / 2e-4

    torch.testing.assert_close(actual[5, 7].double(), expected(torch.float64), rtol=1e-2, atol=1e-3)


def test_the_position_of_a_sequence_in_its_row_changes_nothing() -> None:
    ours, right, left = alibi(), batch(), batch("left")
    with torch.no_grad():
        for row, length in enumerate((24, 9, 17)):
            ids = right["input_ids"][row : row + 1, :length]
            left["input_ids"][row, 24 - length :] = ids
            alone = ours(ids).last_hidden_state[0]
            for inputs, kept in ((right, slice(0, length)), (left, slice(24 - length, 24))):
                states = ours(**inputs).last_hidden_state[row, kept]
                torch.testing.assert_close(states, alone, atol=1e-5, rtol=1e-4)
        swapped = ours(right["input_ids"][:1].flip(1)).last_hidden_state.flip(1)
        torch.testing.assert_close(swapped, ours(right["input_ids"][:1]).last_hidden_state)


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM, BertForSequenceClassification])
def test_saved_and_reopened(kind, tmp_path) -> None:
    ours, inputs = alibi(kind), batch()
    ours.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == "bert-alibi"
    again = kind.from_pretrained(tmp_path).eval()
    assert again.config.architecture.distance_slopes
    with torch.no_grad():
        assert all(map(torch.equal, ours(**inputs).to_tuple(), again(**inputs).to_tuple()))
    with pytest.raises((ValueError, KeyError), match="bert-alibi"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_configuration_that_contradicts_itself_is_refused() -> None:
    choices = BertConfig(**SIZES, model_type="bert-alibi").architecture
    assert not choices.position_table
    with pytest.raises(ValueError, match=r"^model_type: got 'bert', allowed: 'bert-alibi' with"):
        BertConfig(**SIZES, architecture=choices)
    read = families.read_config({**SIZES, "model_type": "bert-alibi"})
    assert read.architecture == choices


def test_one_training_step_moves_every_parameter() -> None:
    ours, inputs = alibi(BertForMaskedLM).train(), batch()
    loss = ours(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
