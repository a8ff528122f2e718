"""If ``fastbert.accelerate`` refuses a model, it gives the reason and does not change the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SIZES, batch, config, model, rows_computed, sides
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfOutput

import fastbert
from fastbert.integrations.accelerate import BOUND, bound_encoders
from fastbert.modules.class_name import class_name

ENCODERS = (
    "an encoder of transformers: bert, roberta, xlm-roberta, camembert, data2vec-text, ernie, "
    "layoutlm, roberta-prelayernorm, xlm-roberta-xl, megatron-bert, gte, jina_embeddings_v3, "
    "roformer, electra, albert, distilbert, mpnet, nomic_bert, deberta-v2, deberta, eurobert, "
    "modernbert, esm, t5, marian, xlnet"
)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 20, "n_layer": 1, "n_embd": 12, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes, **ends))


def convbert() -> nn.Module:
    return transformers.ConvBertModel(transformers.ConvBertConfig(**SIZES))


def with_another_activation() -> nn.Module:
    made = model()
    made.encoder.layer[1].intermediate.intermediate_act_fn = nn.SiLU()
    return made


def with_another_layer() -> nn.Module:
    made = model()
    made.encoder.layer[1] = nn.Identity()
    return made


class Shifted(BertSelfOutput):
    def forward(self, hidden_states, input_tensor):
        return super().forward(hidden_states, input_tensor) + 1.0


def with_a_layer_of_ones_own() -> nn.Module:
    made = model()
    made.encoder.layer[1].attention.output.__class__ = Shifted
    return made


def with_another_norm() -> nn.Module:
    made = model()
    made.encoder.layer[1].output.LayerNorm = nn.RMSNorm(48)
    return made


def with_a_hook() -> nn.Module:
    made = model()
    made.encoder.layer[0].register_forward_hook(lambda *given: None)
    return made


def one_of_two() -> nn.Module:
    return nn.ModuleList([model(), model(is_decoder=True, use_cache=False)])


MODELS: dict[str, tuple[Any, str]] = {
    "gpt2": (gpt2, f"got GPT2Model of transformers, allowed: {ENCODERS}"),
    "linear": (lambda: nn.Linear(2, 2), f"got Linear of torch, allowed: {ENCODERS}"),
    "convbert": (convbert, f"got ConvBertModel of transformers, allowed: {ENCODERS}"),
    "decoder": (
        lambda: model(is_decoder=True),
        "is_decoder: got True, allowed: false for an encoder",
    ),
    "cross-attention": (
        lambda: model(is_decoder=True, add_cross_attention=True),
        "is_decoder: got True, allowed: false for an encoder",
    ),
    "relative positions": (
        lambda: model(position_embedding_type="relative_key"),
        "position_embedding_type: got 'relative_key', allowed: absolute",
    ),
    "activation": (
        with_another_activation,
        "encoder.layer.1.intermediate.intermediate_act_fn: got a torch.nn.modules.activation.SiLU, "
        "allowed: GELUActivation",
    ),
    "layer": (
        with_another_layer,
        "encoder.layer.1.attention.self: Identity has no attribute `attention`",
    ),
    "a layer of one's own": (
        with_a_layer_of_ones_own,
        f"encoder.layer.1.attention.output: got a {__name__}.Shifted with its own forward, "
        "allowed: BertSelfOutput",
    ),
    "norm": (
        with_another_norm,
        "encoder.layer.1.output.LayerNorm: got a torch.nn.modules.normalization.RMSNorm, "
        "allowed: LayerNorm",
    ),
    "hook": (
        with_a_hook,
        "encoder.layer.0.forward_hooks: got with_a_hook.<locals>.<lambda>, allowed: no hook",
    ),
    "one of two": (one_of_two, "is_decoder: got True, allowed: false for an encoder"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_served(name) -> None:
    build, problem = MODELS[name]
    made = build()
    kinds = [type(module) for module in made.modules()]
    with pytest.raises(ValueError) as raised:
        fastbert.accelerate(made)
    assert str(raised.value) == f"accelerate: {problem}"
    with pytest.warns(UserWarning, match="^accelerate: left") as warned:
        assert fastbert.accelerate(made, strict=False) is made
    expected = f"accelerate: left {type(made).__name__} as it is: {problem}"
    assert [str(w.message) for w in warned] == [expected]
    assert warned[0].filename == __file__
    assert [type(module) for module in made.modules()] == kinds
    assert bound_encoders(made) == {}
    assert not any(BOUND in module.__dict__ for module in made.modules())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("thing", [3, None, "bert-base-uncased", transformers.BertModel])
def test_what_is_no_model(thing, strict) -> None:
    expected = rf"^model: got {class_name(thing)} without a module .*, allowed: a torch\.nn\.Module"
    with pytest.raises(TypeError, match=expected):
        fastbert.accelerate(thing, strict=strict)
    with pytest.raises(TypeError, match=expected):
        fastbert.restore(thing)


def test_strict_false_is_silent_where_all_is_well() -> None:
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastbert.accelerate(made, strict=False)
    with rows_computed() as rows:
        made(**batch())
    assert rows


ARGUMENTS: dict[str, Any] = {
    "head_mask": torch.ones(2, 3),
    "use_cache": True,
    "past_key_values": ((torch.ones(1), torch.ones(1)),),
    "encoder_hidden_states": torch.zeros(4, 5, 48),
    "encoder_attention_mask": torch.ones(4, 5),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_cannot_be_served(name) -> None:
    made = fastbert.accelerate(model())
    with pytest.raises(ValueError, match=rf"^{name}: got a value, allowed: None in an acc"):
        made(**batch(), **{name: ARGUMENTS[name]})
    assert made(**batch(), **{name: None}).last_hidden_state.isfinite().all()


def test_use_cache_false_is_allowed() -> None:
    sides(model()).check(batch(), use_cache=False)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a dict of masks": (
        {"attention_mask": {"full_attention": None}},
        "attention_mask: got a dict, allowed: a tensor",
    ),
    "neither": (
        {"input_ids": None},
        "input_ids, inputs_embeds: got neither, allowed: exactly one of them",
    ),
    "both": (
        {"inputs_embeds": torch.zeros(4, 19, 48)},
        "input_ids, inputs_embeds: got both, allowed: exactly one of them",
    ),
    "ids without a batch": (
        {"input_ids": torch.ones(19, dtype=torch.int64), "attention_mask": None},
        r"input_ids: got shape \(19,\), allowed: \(B, L\)",
    ),
    "an id outside": (
        {"input_ids": torch.full((4, 19), 97)},
        "input_ids: got 97, allowed: 0 <= input_ids < 97",
    ),
    "too long": (
        {"input_ids": torch.ones(1, 41, dtype=torch.int64), "attention_mask": None},
        "input_ids: got a length of 41, allowed: at most max_position_embeddings = 40",
    ),
    "a layer that is not there": (
        {"output_attentions": [2]},
        "output_attentions: got layer 2, allowed: True, False or numbers from -2 to 1",
    ),
    "ends of another size": (
        {
            "attention_mask": None,
            "cu_seq_lens_q": torch.tensor([0, 76]),
            "cu_seq_lens_k": torch.tensor([0, 6, 76]),
        },
        r"cu_seq_lens_k: got \(3,\), allowed: cu_seq_lens_q's shape",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_served(name) -> None:
    changes, problem = CALLS[name]
    made = fastbert.accelerate(model())
    with pytest.raises(ValueError, match=f"^{problem}"):
        made(**batch() | changes)


def test_a_family_without_token_types_refuses_them_as_stock_does() -> None:
    settings = config("DistilBert", n_layers=2, hidden_dim=80, dropout=0.0, attention_dropout=0.0)
    made = model("DistilBertModel", settings)
    types = {"token_type_ids": torch.zeros(4, 19, dtype=torch.int64)}
    outcomes = []
    for side in sides(made)[::2]:
        try:
            side(**batch(), **types)
            outcomes.append(None)
        except (TypeError, ValueError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
