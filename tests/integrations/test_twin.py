"""An HF model that equals its twin, a new model of its class, runs without calls of its modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import stock_families as families
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fastbert
from fastbert.integrations.twin import ComparisonResult, compare, facts

SERVED = ComparisonResult(None, {})


def loaded(family: str, folder: Any) -> Any:
    made = families.build(family)
    made.save_pretrained(folder)
    return type(made).from_pretrained(folder)


def sdpa(family: str, folder: Any) -> Any:
    made = families.build(family)
    made.set_attn_implementation("sdpa")
    return made


def resized(family: str, folder: Any) -> Any:
    made = families.build(family, head="ForMaskedLM")
    made.resize_token_embeddings(110)
    return made.base_model


def container(family: str, folder: Any) -> Any:
    holder = nn.Sequential(nn.Identity())
    holder[0].model = families.build(family)
    return holder.to(torch.bfloat16)[0].model


def checkpointed(family: str, folder: Any) -> Any:
    made = families.build(family).train()
    made.gradient_checkpointing_enable()
    return made


def no_longer_checkpointed(family: str, folder: Any) -> Any:
    made = checkpointed(family, folder)
    made.enable_input_require_grads()
    made.gradient_checkpointing_disable()
    return made


def compiled(family: str, folder: Any) -> Any:
    made = families.build(family)
    made.compile()
    return made


def empty_subclass(family: str, folder: Any) -> Any:
    made = families.build(family)
    for module in made.modules():
        kind = type(module)
        if kind.__module__.startswith("transformers.models."):
            module.__class__ = type(kind.__name__, (kind,), {"note": "mine"})
    return made


def pruned_and_restored(family: str, folder: Any) -> Any:
    made = families.build(family)
    linear = next(m for m in made.modules() if type(m) is nn.Linear)
    prune.random_unstructured(linear, "weight", amount=0.3)
    prune.remove(linear, "weight")
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    return made


def called_for_hidden_states(family: str, folder: Any) -> Any:
    made = families.build(family)
    made(**families.inputs("right", family), output_hidden_states=True, output_attentions=True)
    return made


def accelerated(family: str, folder: Any) -> Any:
    made = fastbert.accelerate(families.build(family))
    made(**families.inputs("right", family))
    return made


def pooler_removed(family: str, folder: Any) -> Any:
    made = families.build(family)
    made.pooler = None
    return made


SITUATIONS: dict[str, Any] = {
    "eager": lambda family, folder: families.build(family),
    "loaded": loaded,
    "sdpa": sdpa,
    "bf16": lambda family, folder: families.build(family).to(torch.bfloat16),
    "bf16 and back": lambda family, folder: families.build(family).bfloat16().float(),
    "bf16 parameters": lambda f, folder: families.in_dtype(families.build(f), torch.bfloat16),
    "float64": lambda family, folder: families.build(family).double(),
    "training": lambda family, folder: families.build(family).train(),
    "frozen": lambda family, folder: families.build(family).requires_grad_(False),
    "resized": resized,
    "tied": lambda family, folder: families.build(family, head="ForMaskedLM").base_model,
    "deep copy": lambda family, folder: copy.deepcopy(families.build(family)),
    "pickle": lambda family, folder: pickle.loads(pickle.dumps(families.build(family))),
    "container": container,
    "checkpointed": checkpointed,
    "no longer checkpointed": no_longer_checkpointed,
    "compiled": compiled,
    "empty subclass": empty_subclass,
    "pruned and restored": pruned_and_restored,
    "called for hidden states": called_for_hidden_states,
    "accelerated": accelerated,
    "pooler removed": pooler_removed,
    "unread attribute": lambda f, folder: setattr(m := families.build(f), "colour", "red") or m,
    "unread child": lambda f, folder: setattr(m := families.build(f), "mine", nn.ReLU()) or m,
}


# In transformers, ALBERT and MPNet have no gradient checkpointing. Marian and T5 have no masked-LM
# head.
CASES = [
    (family, situation)
    for family in families.ACCELERATED
    for situation in SITUATIONS
    if ("checkpointed" not in situation or family not in ("albert", "mpnet"))
    and (situation not in ("resized", "tied") or family not in ("marian", "t5"))
]


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "situation"), CASES)
def test_a_host_as_people_have_it_is_served(family, situation, tmp_path) -> None:
    hf_model = SITUATIONS[situation](family, tmp_path)
    assert compare(hf_model) == SERVED


@pytest.mark.parametrize("family", families.ACCELERATED)
def test_comparing_leaves_the_host_and_the_random_numbers_alone(family) -> None:
    hf_model = families.build(family)
    before, names = torch.get_rng_state(), [dict(vars(module)) for module in hf_model.modules()]
    compare(hf_model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [dict(vars(module)) for module in hf_model.modules()] == names


def test_a_host_with_fewer_layers_than_its_config_is_served() -> None:
    hf_model = families.build("bert", num_hidden_layers=4)
    hf_model.encoder.layer = nn.ModuleList(hf_model.encoder.layer[::2])
    assert compare(hf_model) == SERVED


def test_the_facts_hold_the_classes_functions_and_tables_that_the_code_reaches() -> None:
    hf_model = families.build("bert")
    guarded = facts(hf_model)
    kinds = {kind.__name__ for kind in guarded.classes}
    assert {"BertModel", "BertSelfAttention", "Module", "Linear", "GELUActivation"} <= kinds
    names = {function.__name__ for function in guarded.functions}
    assert {"eager_attention_forward", "sdpa_mask", "feed_forward_chunk", "softmax"} <= names
    spaces = {space.get("__name__") for space in guarded.dicts}
    assert {"transformers.models.bert.modeling_bert", "torch.nn.functional", "torch"} <= spaces
    assert any("sdpa" in space and "flex_attention" in space for space in guarded.dicts)
