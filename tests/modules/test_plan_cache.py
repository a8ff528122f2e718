"""After every change of a model, the encoder's cached plan gives the results of a new plan."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from test_prepared_call import CHANGES, CONFIG, batch, make
from torch import Tensor, nn

import fastbert
from fastbert import BertModel
from fastbert.modules import plan_cache
from fastbert.modules.executors import CpuInference, CpuTraining
from fastbert.modules.plan import Mode, plan
from fastbert.modules.plan_cache import PlanCache
from fastbert.modules.snapshot import Snapshot
from fastbert.ops import backend as backends

pytestmark = pytest.mark.skipif(backends.EXTENSION is None, reason="the extension is not built")

MODES = ("inference", "autocast", "training", "frozen")


def enter(model: BertModel, mode: str) -> contextlib.AbstractContextManager[Any]:
    """Put `model` into a mode, and return the context manager in which it must be called."""
    model.train(mode == "training")
    if mode == "frozen":
        model.requires_grad_(False)
    if mode == "autocast":
        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return stack
    return torch.no_grad() if mode == "inference" else contextlib.nullcontext()


def step(model: BertModel) -> list[Tensor]:
    """Return all hidden states, and all gradients that are not None."""
    ids, mask = batch()
    model.zero_grad()
    torch.manual_seed(5)
    # With output_hidden_states, the encoder runs. Otherwise, the model's prepared call would run.
    states = model(ids, mask, output_hidden_states=True).hidden_states
    # A stale plan for another number of layers returns None for some of the states.
    states = [state for state in states if state is not None]
    if states[-1].requires_grad:
        sum(state.float().square().sum() for state in states).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [state.detach() for state in states] + gradients


def run(model: BertModel, mode: str) -> list[Tensor] | str:
    with enter(model, mode):
        try:
            return step(model)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"


def same(actual: list[Tensor] | str, expected: list[Tensor] | str) -> bool:
    if isinstance(actual, str) or isinstance(expected, str):
        return actual == expected
    return len(actual) == len(expected) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(actual, expected, strict=True)
    )


def fresh(model: BertModel, mode: str) -> list[Tensor] | str:
    """Return the results of the model with a new plan, or the message of the error."""
    model.encoder._plans.clear()
    return run(model, mode)


def of_layers(name: str) -> bool:
    return not any(word in name for word in ("embeddings", "pooler", "before_the_encoder"))


def freeze_one(model: BertModel) -> None:
    model.encoder.layer[1].output.dense.bias.requires_grad_(False)


def freeze_the_layers(model: BertModel) -> None:
    model.requires_grad_(False)


def train_one(model: BertModel) -> None:
    model.encoder.layer[0].attention.output.dense.weight.requires_grad_(True)


def dtype_in_place(model: BertModel) -> None:
    weight = model.encoder.layer[1].output.dense.weight
    weight.data = weight.data.bfloat16()


def dtype_of_a_norm_in_place(model: BertModel) -> None:
    weight = model.encoder.layer[0].output.LayerNorm.weight
    weight.data = weight.data.double()


def other_dropout(model: BertModel) -> None:
    model.encoder.layer[0].attention.self.dropout_p = 0.5


def other_activation(model: BertModel) -> None:
    for layer in model.encoder.layer:
        layer.output.activation = "relu"


def other_heads(model: BertModel) -> None:
    for layer in model.encoder.layer:
        layer.attention.self.heads, layer.attention.self.head_dim = 2, 24


def class_in_place(model: BertModel) -> None:
    class Own(nn.Parameter):
        pass

    weight = model.encoder.layer[0].output.dense.weight
    torch.utils.swap_tensors(weight, Own(weight.detach().clone() * 2))


def backward_hook(model: BertModel) -> Any:
    layer = model.encoder.layer[0].attention
    return layer.register_full_backward_hook(lambda _, g, __: tuple(2 * x for x in g)).remove


def gone_bias(model: BertModel) -> None:
    model.encoder.layer[1].attention.output.dense.bias = None


MORE = (
    *(freeze_one, freeze_the_layers, train_one, dtype_in_place, dtype_of_a_norm_in_place),
    *(other_dropout, other_activation, other_heads, class_in_place),
    *(backward_hook, gone_bias),
)
ALL = {name: change for name, change in CHANGES.items() if of_layers(name)}
ALL |= {function.__name__: function for function in MORE}


def change(name: str, model: BertModel) -> Any:
    """Make the change `name`, and return a function that undoes the change, or None."""
    if name == "quantize":
        model.eval()
    return ALL[name](model)


def plan_now(model: BertModel, mode: str, hidden: Tensor) -> tuple[Any, Any]:
    """Return the plan that the encoder uses for the mode, and a new plan for comparison."""
    with enter(model, mode):
        used = model.encoder.plan(hidden)
        model.encoder._plans.clear()
        return used, model.encoder.plan(hidden)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_a_plan_is_as_good_as_new_after_a_change(name, mode):
    model = make()
    before = run(model, mode)
    kept = model.encoder._plans._guarded
    assert [guarded.plan.run is not None for guarded in kept.values()] == [True]
    undo = change(name, model)
    try:
        result = run(model, mode)
        assert same(result, fresh(model, mode))
        result = run(model, mode)
        assert same(result, fresh(model, mode))
        used, new = plan_now(model, mode, torch.randn(3, 48))
        assert (used.reason, type(used.run), used.settings) == (
            new.reason,
            type(new.run),
            new.settings,
        )
    finally:
        if undo is not None:
            undo()
    assert same(run(model, mode), fresh(model, mode))
    if undo is not None:
        assert same(run(model, mode), before)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_plan_that_is_kept_for_ever_is_caught(mode, monkeypatch):
    """If a cached plan is never checked for validity, the test above fails for most changes."""
    monkeypatch.setattr(plan_cache._Guarded, "holds", lambda self, encoder: True)
    missed = set()
    for name in ALL:
        model = make()
        run(model, mode)
        undo = change(name, model)
        try:
            if not same(run(model, mode), fresh(model, mode)):
                missed.add(name)
        finally:
            if undo is not None:
                undo()
    # The changes that are not listed here need no new plan: every call reads the values, and
    # autograd drops the gradient of a frozen parameter.
    expected = {
        "replace_a_parameter", "replace_a_module", "parametrize", "set_eps", "hook_on_a_layer",
        "hook_on_a_norm", "other_order", "other_activation", "other_heads", "gone_bias",
    }  # fmt: skip
    expected |= {"other_dropout", "backward_hook"} if mode == "training" else set()
    assert expected <= missed


def test_a_plan_is_made_once_for_each_mode(monkeypatch):
    made: list[Mode] = []

    def counted(layers: Any, mode: Mode) -> Any:
        made.append(mode)
        return plan(layers, mode)

    monkeypatch.setattr(plan_cache, "plan", counted)
    model = make()
    for mode in ("inference", "training", "autocast") * 3:
        run(model, mode)
    # A plan is built twice: before and after the facts that the plan depends on are recorded.
    assert len(made) == 6
    kinds = [type(guarded.plan.run) for guarded in model.encoder._plans._guarded.values()]
    assert kinds == [CpuInference, CpuTraining, CpuInference]


def test_int8_weights_follow_the_instruction_set():
    model, (ids, mask) = fastbert.quantize(make()), batch()
    model.eval()
    with torch.no_grad():
        expected = model(ids, mask, output_hidden_states=True).last_hidden_state
        assert len(model.encoder._plans._guarded) == 1
        try:
            for isa in ("baseline", None):
                backends.EXTENSION.set_cpu_isa(isa)
                actual = model(ids, mask, output_hidden_states=True).last_hidden_state
                model.encoder._plans.clear()
                again = model(ids, mask, output_hidden_states=True).last_hidden_state
                assert torch.equal(actual, again)
        finally:
            backends.EXTENSION.set_cpu_isa(None)
        assert torch.equal(actual, expected)


def test_copies_and_pickles_have_plans_of_their_own():
    model = make()
    before = run(model, "inference")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.encoder._plans, PlanCache)
        assert other.encoder._plans is not model.encoder._plans
        assert other.encoder._plans._guarded == {}
        other.encoder.layer[0].output.dense.weight.data.zero_()
        assert same(run(other, "inference"), fresh(other, "inference"))
        assert not same(run(other, "inference"), before)
    assert same(run(model, "inference"), before)


def test_the_model_is_freed_with_its_last_reference():
    model = make()
    run(model, "inference")
    run(model, "training")
    gone = weakref.ref(model.encoder.layer[0].output.dense.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_quantization_in_place_frees_the_weights_of_a_plan():
    model = BertModel(CONFIG).eval()
    run(model, "inference")
    gone = [weakref.ref(layer.output.dense.weight) for layer in model.encoder.layer]
    fastbert.quantize(model, inplace=True)
    assert [weight() for weight in gone] == [None, None]


def test_a_changed_fact_forgets_the_plans_of_all_modes():
    """A change removes the plans of all modes, so that replaced parameters are freed."""
    model = make()
    run(model, "training")
    run(model, "inference")
    gone = weakref.ref(model.encoder.layer[0].output.dense.weight)
    old = model.encoder.layer[0].output.dense
    model.encoder.layer[0].output.dense = nn.Linear(old.in_features, old.out_features)
    del old
    run(model, "inference")
    gc.collect()
    assert gone() is None


def test_the_snapshot_is_of_the_encoder_and_the_table_of_times(monkeypatch):
    model = make()
    run(model, "inference")
    (guarded,) = model.encoder._plans._guarded.values()
    assert isinstance(guarded.facts.snapshot, Snapshot)
    assert guarded.holds(model.encoder.eval())
    monkeypatch.setattr("fastbert.ops.gpu_times.POINTS", ())
    assert not guarded.holds(model.encoder)
