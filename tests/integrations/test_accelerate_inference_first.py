"""A call in ``torch.inference_mode`` does not change the result of a later training step."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from stock_families import FAMILIES, build, inputs, of_each_kind

import fastbert
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops import backend as backends
from fastbert.ops.int8_linear import layout

peft = pytest.importorskip("peft", reason="needs peft: pip install 'fastbert[test]'")

# With this filter, a test fails if the accelerated model runs stock code.
pytestmark = pytest.mark.filterwarnings("error:.*runs its own code")

LABELS = torch.tensor([0, 1, 1, 0])
# The expression matches the layer number in the name of an encoder's parameter.
LAYERS = re.compile(r"(layer|layers|albert_layer_groups)\.(?P<number>\d+)\.")
HEADS = ("classifier", "pre_classifier", "head", "dense")


def everything(model: nn.Module) -> nn.Module:
    return model


def the_head(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(HEADS))
    return model


def the_embeddings(model: nn.Module) -> nn.Module:
    """Freeze all parameters but the token embeddings, whose gradient passes through all layers."""
    for name, parameter in model.named_parameters():
        tables = ("word_embeddings", "tok_embeddings", "embed_tokens")
        parameter.requires_grad_(any(table in name for table in tables))
    return model


def the_last_layer(model: nn.Module) -> nn.Module:
    numbered = {name: LAYERS.search(name) for name, _ in model.named_parameters()}
    last = max(int(match["number"]) for match in numbered.values() if match)
    for name, parameter in model.named_parameters():
        match = numbered[name]
        parameter.requires_grad_(match is not None and int(match["number"]) == last)
    return model


def lora(*targets: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        settings = peft.LoraConfig(
            r=4, target_modules=list(targets), lora_dropout=0.0, task_type="SEQ_CLS"
        )
        torch.manual_seed(9)
        return peft.get_peft_model(model, settings)

    return wrap


def trained(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train `model` for two steps; return both steps' gradients and the final parameters."""
    seen: dict[str, Tensor] = {}
    chosen = [p for p in model.train().parameters() if p.requires_grad]
    assert chosen
    optimizer = torch.optim.AdamW(chosen, lr=1e-2)
    for step in range(2):
        model(**batch, labels=LABELS).loss.backward()
        named = model.named_parameters()
        seen |= {f"{name}, step {step}": p.grad.clone() for name, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: p.detach() for name, p in model.named_parameters()}


def check(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Check that training has the same bits with and without an earlier inference-mode call."""
    model = fastbert.accelerate(model.to(dtype))
    expected = trained(copy.deepcopy(model), batch)
    with torch.inference_mode():
        for options in ({}, {"output_attentions": True}):
            model.eval()(**batch, **options)
    actual = trained(model, batch)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [everything, the_head, the_embeddings, the_last_layer])
@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_training_after_a_call_in_inference_mode(family, part, dtype) -> None:
    model = part(build(family, "ForSequenceClassification", num_labels=2))
    check(model, inputs("right", family, rows=4), dtype)


@pytest.mark.parametrize(
    "targets", [("query", "value"), ("intermediate.dense",), ("key", "output.dense")], ids=str
)
@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_training_adapters_after_a_call_in_inference_mode(family, targets) -> None:
    model = lora(*targets)(build(family, "ForSequenceClassification", num_labels=2))
    check(model, inputs("right", family, rows=4), torch.float32)


def test_adapters_that_come_after_a_call_in_inference_mode() -> None:
    model, batch = build("bert", "ForSequenceClassification", num_labels=2), inputs("right", rows=4)
    results = []
    for first in (False, True):
        made = fastbert.accelerate(copy.deepcopy(model))
        if first:
            with torch.inference_mode():
                made(**batch)
        results.append(trained(lora("intermediate.dense")(made), batch))
    assert all(torch.equal(results[1][name], tensor) for name, tensor in results[0].items())


def test_a_model_that_is_accelerated_in_inference_mode_trains() -> None:
    model, batch = build("bert", "ForSequenceClassification", num_labels=2), inputs("right", rows=4)
    expected = trained(fastbert.accelerate(copy.deepcopy(model)), batch)
    with torch.inference_mode():
        fastbert.accelerate(model)(**batch)
    actual = trained(model, batch)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.skipif(backends.EXTENSION is None, reason=str(backends.EXTENSION_STATE))
def test_int8_weights_that_are_packed_again_in_inference_mode_stay_ordinary_tensors() -> None:
    linear = QuantizedLinear.of(nn.Linear(48, 32)).eval()
    before = linear.weight
    linear._layout = (0, 0)
    with torch.inference_mode():
        linear.weight_now(layout())
    assert linear._layout == layout()
    assert torch.equal(linear.weight, before)
    assert not any(buffer.is_inference() for buffer in linear.buffers())
