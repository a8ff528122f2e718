"""Triton training as one autograd function per layer has the bits of single operations.

The tests compare results and gradients of both ways, and count the layers that run as one function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor, nn

from fastbert import BertConfig, BertModel
from fastbert.modules import executors
from fastbert.modules.encoder import BertEncoder
from fastbert.modules.executors import GpuTraining
from fastbert.modules.plan import Mode, plan
from fastbert.ops import backend as backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    backends.unavailable("triton", DEVICE) is not None, reason="Triton cannot run here"
)
CONFIG = BertConfig.preset(
    "tiny",
    vocab_size=50,
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=48,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.1,
)


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> BertModel:
    torch.manual_seed(0)
    built = BertModel(CONFIG.replace(**changes), backend="triton", add_pooling_layer=False).train()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built.to(DEVICE, dtype)


def padded(*lengths: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 50, exists.shape, generator=generator) * exists
    return {"input_ids": ids.to(DEVICE), "attention_mask": exists.long().to(DEVICE)}


@contextlib.contextmanager
def counted(by_operation: bool = False):
    """Count the layers that run as one function; `by_operation` forces single operations."""
    calls: list[int] = []
    layer, plan_of = executors.gpu_layer, BertEncoder.plan
    executors.gpu_layer = lambda *a: calls.append(1) or layer(*a)
    if by_operation:
        BertEncoder.plan = lambda *given: plan_of(*given)._replace(run=None)
    try:
        yield calls
    finally:
        executors.gpu_layer, BertEncoder.plan = layer, plan_of


def trained(
    built: BertModel, inputs: dict[str, Tensor], layers: int, mixed: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Return the states and gradients of a step; check that `layers` layers run as one function."""
    results: dict[str, Tensor] = {}
    built.zero_grad()
    with counted(by_operation=layers == 0) as calls:
        torch.manual_seed(2)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
            output = built(**inputs, **options)
        assert len(calls) == layers
    states = output.hidden_states or (output.last_hidden_state,)
    weights = torch.linspace(0.5, 1.5, states[0].shape[-1], device=DEVICE)
    sum((state.float() * weights).square().sum() for state in states).backward()
    for i, state in enumerate(states):
        results[f"state {i}"] = state.detach()
    results |= {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}
    return results


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def forms() -> dict[str, dict[str, Tensor]]:
    full = padded(5, 5)
    causal = torch.ones(2, 5, 5, device=DEVICE).tril()
    return {
        "packed": padded(7, 3, 1),
        "full": full,
        "mask": {**full, "attention_mask": causal.bool()},
        "bias": {**full, "attention_mask": (1 - causal) * -3.0},
    }


@pytest.mark.parametrize(
    "form", [form if form == "packed" else long_case(form) for form in forms()]
)
@pytest.mark.parametrize(
    "mixed", [long_case(False, id="fp32"), pytest.param(True, id="bf16-autocast")]
)
def test_a_layer_as_one_function_has_the_bits_of_its_operations(form, mixed):
    built, inputs = model(), forms()[form]
    got = trained(built, inputs, 1, mixed)
    assert len(got) == 1 + len(list(built.parameters()))
    same(got, trained(built, inputs, 0, mixed))


@pytest.mark.every_case
def test_weights_in_low_precision_and_hidden_states():
    built, inputs = model(torch.float16, num_hidden_layers=2), padded(4, 2)
    same(
        trained(built, inputs, 2, output_hidden_states=True),
        trained(built, inputs, 0, output_hidden_states=True),
    )


@pytest.mark.every_case
def test_batches_without_tokens_and_eval_mode():
    built, inputs = model(), padded(3, 2)
    inputs["attention_mask"][1] = 0
    same(trained(built, inputs, 1), trained(built, inputs, 0))
    inputs["attention_mask"][0] = 0
    same(trained(built, inputs, 1), trained(built, inputs, 0))
    built.eval()
    same(trained(built, padded(3, 2), 1), trained(built, padded(3, 2), 0))


def test_autocast_around_the_backward_changes_nothing():
    built, inputs = model(), padded(3, 2)
    results = []
    for mixed in (False, True):
        torch.manual_seed(2)
        loss = built(**inputs).last_hidden_state.square().sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
            results.append(torch.autograd.grad(loss, list(built.encoder.parameters())))
    assert all(map(torch.equal, *results))


FROZEN: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda name: "embeddings" in name,
    "all but the last norm": lambda name: "layer.0.output.LayerNorm" not in name,
    "all but the feed-forward": lambda name: "intermediate" not in name,
    "all but the first norm": lambda name: "layer.0.attention.output.LayerNorm" not in name,
    "all but wo": lambda name: "attention.output.dense.weight" not in name,
    "all but qkv": lambda name: "attention.self.qkv.bias" not in name,
    "matrices": lambda name: name.endswith("dense.weight"),
}


@pytest.mark.parametrize(
    "frozen", [name if name == "all but the first norm" else long_case(name) for name in FROZEN]
)
def test_frozen_parameters_get_no_gradient(frozen):
    built, inputs = model(), padded(4, 3)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    got = trained(built, inputs, 1)
    assert {n for n in got if "state" not in n} == {
        n for n, p in built.named_parameters() if p.requires_grad
    }
    same(got, trained(built, inputs, 0))


def reason(built: BertModel, dtype: torch.dtype = torch.float32) -> str:
    planned = plan(built.encoder.running(), Mode.now(DEVICE, dtype, gradient=True))
    return "" if type(planned.run) is GpuTraining else planned.reason


class Scaled(nn.Linear):
    """A subclass of the linear layer, as a user may define it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


CHANGES: dict[str, tuple[Callable[[BertModel], Any], str]] = {
    "forward hook": (
        lambda m: m.encoder.layer[0].attention.self.register_forward_hook(lambda *a: None),
        "has forward hooks",
    ),
    "backward hook": (
        lambda m: m.encoder.layer[0].output.LayerNorm.register_full_backward_hook(lambda *a: None),
        "a module has backward hooks",
    ),
    "another class": (
        lambda m: setattr(m.encoder.layer[0].output, "dense", Scaled(48, 32).to(DEVICE)),
        "layer.0.output.dense is a ",
    ),
    "no bias": (
        lambda m: setattr(m.encoder.layer[0].output.dense, "bias", None),
        "a parameter is missing",
    ),
    "backend": (lambda m: m.set_backend("reference"), "linear is served by reference"),
    "inner dropout": (
        lambda m: setattr(m.encoder.layer[0].output, "dropout_p", 0.5), "inside the feed-forward"
    ),
    "dtype": (lambda m: m.encoder.layer[0].intermediate.half(), "parameters of another dtype"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_reasons_for_operations_one_by_one(change):
    built = model()
    assert reason(built) == ""
    CHANGES[change][0](built)
    assert CHANGES[change][1] in reason(built)


def test_what_watches_the_operators_sees_them():
    built, inputs = model(), padded(3, 2)
    with counted() as calls:
        with torch.profiler.profile() as profile:
            built(**inputs)
        assert not calls
        built(**inputs)
        assert len(calls) == 1
        built(**inputs, output_attentions=True)
        with torch.no_grad():
            built(**inputs)
        assert len(calls) == 1
    assert any("fastbert::attention_qkvpacked" in event.key for event in profile.key_averages())


def test_checkpointing_runs_the_layer_again_in_the_backward():
    built, inputs = model(), padded(3, 2)
    weights = list(built.encoder.parameters())

    def gradients(states: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(states.square().sum(), weights)

    torch.manual_seed(5)
    expected = gradients(built(**inputs).last_hidden_state)
    built.gradient_checkpointing_enable()
    with counted() as calls:
        torch.manual_seed(5)
        states = built(**inputs).last_hidden_state
        assert len(calls) == 1
        grads = gradients(states)
        assert len(calls) == 2
    assert all(map(torch.equal, grads, expected))


def test_a_second_derivative_is_an_error():
    built, inputs = model(), padded(3, 2)
    out = built(**inputs).last_hidden_state
    weight = built.encoder.layer[0].output.dense.weight
    (gradient,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        gradient.sum().backward()


def test_hooks_of_saved_tensors_see_them_and_a_changed_weight_is_an_error():
    built, inputs = model(), padded(3, 2)
    with torch.autograd.graph.save_on_cpu(), counted() as calls:
        out = built(**inputs).last_hidden_state
    assert len(calls) == 1
    out.sum().backward()
    out = built(**inputs).last_hidden_state
    with torch.no_grad():
        built.encoder.layer[0].output.dense.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
