"""State dicts have transformers' names, although query, key and value share one parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor
from transformers_pair import SIZES, batch, pair

from fastbert import modules
from fastbert.config import BertConfig

HEADS = [name for name in modules.__all__ if name.startswith("BertFor") and "Output" not in name]
QUERY = "encoder.layer.0.attention.self.query.weight"
FUSED = "encoder.layer.0.attention.self.qkv.weight"


@pytest.fixture
def model() -> modules.BertModel:
    return modules.BertModel(BertConfig(**SIZES))


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["BertModel", *HEADS])
@pytest.mark.parametrize("tie", [True, False])
def test_names_shapes_and_order_are_those_of_transformers(name: str, tie: bool) -> None:
    stock_config = transformers.BertConfig(**SIZES, tie_word_embeddings=tie)
    expected = getattr(transformers, name)(stock_config).state_dict()
    ours = getattr(modules, name)(BertConfig.from_dict(stock_config.to_dict())).state_dict()
    assert list(ours) == list(expected)
    assert [t.shape for t in ours.values()] == [t.shape for t in expected.values()]


def test_the_projection_is_one_parameter(model: modules.BertModel) -> None:
    names = [name for name, _ in model.named_parameters()]
    assert FUSED in names
    assert QUERY not in names
    parts = [model.state_dict()[QUERY.replace("query", part)] for part in ("query", "key", "value")]
    assert torch.equal(torch.cat(parts), model.get_parameter(FUSED))


def test_a_round_trip_keeps_every_number(model: modules.BertModel) -> None:
    before = state(model)
    other = modules.BertModel(BertConfig(**SIZES))
    assert str(other.load_state_dict(before)) == "<All keys matched successfully>"
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_missing_and_unexpected_names(model: modules.BertModel) -> None:
    changed = state(model)
    del changed[QUERY]
    changed["encoder.layer.0.attention.self.quarry.weight"] = torch.zeros(1)
    changed[FUSED] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=QUERY):
        model.load_state_dict(changed)
    result = model.load_state_dict(changed, strict=False)
    assert result.missing_keys == [QUERY]
    assert sorted(result.unexpected_keys) == [
        FUSED.replace("qkv", name) for name in ("qkv", "quarry")
    ]


def test_a_partial_state_dict_changes_its_parameters_only(model: modules.BertModel) -> None:
    before = state(model)
    name = QUERY.replace("query", "key")
    model.load_state_dict({name: torch.full_like(before[name], 2.0)}, strict=False)
    after = model.state_dict()
    assert (after[name] == 2.0).all()
    for other in before.keys() - {name}:
        assert torch.equal(after[other], before[other]), other


def test_wrong_shapes_are_reported_by_name(model: modules.BertModel) -> None:
    changed = state(model)
    changed[QUERY] = torch.zeros(48, 47)
    with pytest.raises(RuntimeError, match=rf"{QUERY}.*\(48, 47\).*\(48, 48\)"):
        model.load_state_dict(changed)


@pytest.mark.parametrize("assign", [False, True])
def test_dtypes(model: modules.BertModel, assign: bool) -> None:
    half = {name: tensor.bfloat16() for name, tensor in state(model).items()}
    model.load_state_dict(half, assign=assign)
    expected = torch.bfloat16 if assign else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert torch.equal(model.state_dict()[QUERY].bfloat16(), half[QUERY])


def test_assignment_from_the_meta_device() -> None:
    source = modules.BertForPreTraining(BertConfig(**SIZES)).eval()
    with torch.device("meta"):
        model = modules.BertForPreTraining(source.config).eval()
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    assert torch.equal(model(**batch()).prediction_logits, source(**batch()).prediction_logits)


def test_gamma_and_beta_are_understood(model: modules.BertModel) -> None:
    before = state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    old = {}
    for name, tensor in before.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    assert old.keys() != before.keys()
    model.load_state_dict(old)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_the_decoder_is_the_word_table(name: str) -> None:
    model = getattr(modules, name)(BertConfig(**SIZES))
    for moved in (
        model,
        copy.deepcopy(model),
        model.to(torch.float64),
        model.to_empty(device="cpu"),
    ):
        head, words = moved.cls.predictions, moved.get_input_embeddings()
        assert moved.get_output_embeddings() is head.decoder
        assert head.decoder.weight is words.weight
        assert head.decoder.bias is head.bias
        names = [name for name, _ in moved.named_parameters()]
        assert "cls.predictions.decoder.weight" not in names


@pytest.mark.parametrize(("preset", "count"), [("base", 109_482_240), ("large", 335_141_888)])
def test_parameter_counts(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = modules.BertModel(BertConfig.preset(preset))
    assert model.num_parameters() == count


@pytest.mark.parametrize("name", ["BertModel", *HEADS])
def test_initial_weights(name: str) -> None:
    """Weights have the configured deviation within 5 standard errors; biases are 0, norms are 1."""
    model = getattr(modules, name)(BertConfig(**{**SIZES, "initializer_range": 0.05}))
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        if parameter.ndim == 2:
            rows = parameter[1:] if name.endswith("word_embeddings.weight") else parameter
            error = 0.05 / (2 * rows.numel()) ** 0.5
            assert abs(float(rows.std()) - 0.05) < 5 * error, name
            assert abs(float(rows.mean())) < 5 * 0.05 / rows.numel() ** 0.5, name
        else:
            assert (parameter == (1.0 if name.endswith("LayerNorm.weight") else 0.0)).all(), name
    assert not model.get_input_embeddings().weight[0].any()


def test_deep_copies_are_independent() -> None:
    model = pair("BertForMaskedLM").ours
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("bert." + FUSED).zero_()
    assert model.state_dict()["bert." + QUERY].any()
