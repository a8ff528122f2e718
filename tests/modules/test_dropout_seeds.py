"""Each dropout of a model uses its own seed, and seeds are drawn only if a model has dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastbert import modules
from fastbert.config import Architecture, BertConfig
from fastbert.io import families
from fastbert.modules.dropout import LayerSeeds, draw_seeds
from fastbert.modules.inputs import enter

LAYERS = 2
CPU = torch.device("cpu")
# With these settings, the encoder applies no dropout.
NONE: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PRE_NORM = {"pre_norm": True, "output_dropout": 0.0}
IDS = torch.tensor([[1, 7, 8, 3, 9], [2, 9, 3, 0, 0]])


def config(architecture: dict[str, Any], **changes: Any) -> BertConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 16}
    return BertConfig(
        vocab_size=50, architecture=Architecture(**architecture), **{**sizes, **NONE, **changes}
    )


def encode(model: modules.BertModel, seeds: list[Tensor]) -> list[Tensor]:
    """Return the encoder's output rows for `seeds`, and the gradients of all parameters."""
    model.zero_grad()
    first, *others = seeds
    layers = [LayerSeeds(*others[4 * i :][:4]) for i in range(LAYERS)]
    tokens = enter(model.config, IDS, IDS != 0)
    embedded = model.embeddings(tokens, first)
    rows, _, _ = model.encoder(embedded, tokens.layout, seeds=layers)
    rows.square().sum().backward()
    return [rows.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


DROPPING = {
    "embeddings": ({"embedding_dropout": 0.5}, {}),
    "attention": ({}, {"attention_probs_dropout_prob": 0.5}),
    "attention output": ({"attention_output_dropout": 0.5}, {}),
    "inner": ({"inner_dropout": 0.5}, {}),
    "output": ({"output_dropout": 0.5}, {}),
    "attention output before a norm": ({**PRE_NORM, "attention_output_dropout": 0.5}, {}),
    "inner before a norm": ({**PRE_NORM, "inner_dropout": 0.5}, {}),
    "output before a norm": ({**PRE_NORM, "output_dropout": 0.5}, {}),
}
each_dropout = pytest.mark.parametrize("dropout", DROPPING)


def dropping(dropout: str) -> modules.BertModel:
    architecture, changes = DROPPING[dropout]
    torch.manual_seed(0)
    return modules.BertModel(config(architecture, **changes), add_pooling_layer=False).train()


@each_dropout
def test_every_mask_depends_on_its_seed_alone(dropout):
    model = dropping(dropout)
    seeds = [torch.tensor([number]) for number in range(1 + 4 * LAYERS)]
    torch.manual_seed(1)
    first = encode(model, seeds)
    torch.manual_seed(2)
    again = encode(model, seeds)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = encode(model, [seed + 100 for seed in seeds])
    assert not torch.equal(first[0], other[0])


@each_dropout
def test_one_draw_serves_every_dropout(dropout, monkeypatch):
    model, drawn = dropping(dropout), []
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: drawn.append(a) or randint(*a, **k))
    model(IDS, IDS != 0)
    assert len(drawn) == 1


@each_dropout
def test_checkpointing_keeps_the_masks(dropout):
    model, slopes = dropping(dropout), []
    for checkpointed in (False, True):
        model.encoder.gradient_checkpointing = checkpointed
        model.zero_grad()
        torch.manual_seed(4)
        model(IDS, IDS != 0).last_hidden_state.square().sum().backward()
        slopes.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*slopes, strict=True))


@each_dropout
def test_given_embeddings_get_the_masks_of_ids(dropout):
    model, states = dropping(dropout), []
    words = model.embeddings.word_embeddings(IDS).detach()
    for given in ({"input_ids": IDS}, {"inputs_embeds": words}):
        torch.manual_seed(5)
        states.append(model(**given, attention_mask=IDS != 0).last_hidden_state)
    assert torch.equal(*states)


def test_gradients_of_given_embeddings_are_those_of_the_table():
    model = dropping("embeddings")
    words = model.embeddings.word_embeddings(IDS)
    words.retain_grad()
    torch.manual_seed(5)
    model(inputs_embeds=words, attention_mask=IDS != 0).last_hidden_state.square().sum().backward()
    assert not words.grad[IDS == 0].any()
    assert words.grad[IDS != 0].any(-1).all()


def test_a_dropped_output_before_a_norm_is_gone():
    """In a pre-norm layer, dropout with probability 1 leaves only the residual stream."""
    whole = {**PRE_NORM, "attention_output_dropout": 1.0, "output_dropout": 1.0}
    model = modules.BertModel(config(whole), add_pooling_layer=False).train()
    output = model(IDS, IDS != 0, output_hidden_states=True)
    assert torch.equal(output.hidden_states[1], output.hidden_states[0])


# Draws


def drawn(settings: BertConfig, training: bool = True) -> int:
    seeds = draw_seeds(settings, training, CPU)
    flat = [seeds.embeddings, *(seed for layer in seeds.layers for seed in layer)]
    return sum(seed is not None for seed in flat)


@pytest.mark.parametrize(
    ("architecture", "changes", "number"),
    [
        ({}, {}, 0),
        ({}, {"classifier_dropout": 0.5}, 0),
        ({}, {"hidden_dropout_prob": 0.1}, 7),
        ({}, {"attention_probs_dropout_prob": 0.1}, 7),
        ({"embedding_dropout": 0.1}, {}, 7),
        ({"attention_output_dropout": 0.1}, {}, 7),
        ({"output_dropout": 0.1}, {}, 7),
        ({"inner_dropout": 0.1}, {}, 9),
        # An explicit hidden dropout of the architecture replaces hidden_dropout_prob.
        (
            {"embedding_dropout": 0.0, "attention_output_dropout": 0.0, "output_dropout": 0.0},
            {"hidden_dropout_prob": 0.1},
            0,
        ),
    ],
)
def test_seeds_are_drawn_if_the_encoder_drops(architecture, changes, number):
    settings = config(architecture, **changes)
    assert drawn(settings) == number
    assert drawn(settings, training=False) == 0


def modernbert(**changes: float) -> BertConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    content = {"model_type": "modernbert", "num_hidden_layers": LAYERS, **sizes, **changes}
    return families.read_config(content)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 0),
        ({"embedding_dropout": 0.1}, 7),
        ({"attention_dropout": 0.1}, 7),
        ({"mlp_dropout": 0.1}, 9),
    ],
)
def test_modernbert_draws_seeds_for_its_own_dropouts(changes, number):
    assert drawn(modernbert(**changes)) == number


@pytest.mark.parametrize(
    "kind",
    [
        modules.BertForSequenceClassification,
        modules.BertForTokenClassification,
        modules.BertForMultipleChoice,
    ],
)
def test_a_classifier_has_a_dropout_of_its_own(kind):
    ids = IDS.unsqueeze(1) if kind is modules.BertForMultipleChoice else IDS
    model = kind(config({}, classifier_dropout=1.0)).train()
    with torch.no_grad():
        model.classifier.bias.fill_(3.0)
        assert (model(ids).logits == 3.0).all()
        assert not (model.eval()(ids).logits == 3.0).any()
        model = kind(config({}, classifier_dropout=0.5)).train()
        torch.manual_seed(6)
        first, second = model(ids).logits, model(ids).logits
        torch.manual_seed(6)
        assert torch.equal(model(ids).logits, first)
        assert not torch.equal(first, second)
