"""CPU inference computes all layers of a quantized model in one C++ call.

The results have the bits of the modules' results. Hooks, replaced layers and a change of the
instruction-set level take effect.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cpu_inference import (
    CALLED,
    CONFIG,
    DENSE,
    DTYPES,
    FP32,
    Doubled,
    assert_same_bits_alone_in_any_batch_and_on_any_threads,
    batch,
    layer_by_layer,
    model,
    one_call,
    packed_rows,
)
from torch import Tensor, nn

import fastbert
from fastbert import modules, ops
from fastbert.modules.plan import plan
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops import backend as backends


def quantised(dtype: torch.dtype = torch.float32, **changes: Any) -> modules.BertModel:
    return fastbert.quantize(model(dtype, **changes), inplace=True)


def states(built: modules.BertModel, run: Any = None, **inputs: Any) -> Tensor:
    run = built if run is None else run
    return torch.stack(run(output_hidden_states=True, **inputs).hidden_states)


def same_bits(built: modules.BertModel, **inputs: Any) -> bool:
    assert one_call(built)
    layers = states(built, lambda **given: layer_by_layer(built, **given), **inputs)
    return torch.equal(states(built, **inputs), layers)


@pytest.mark.parametrize("form", ["full", "padded", "packed", "mask", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_its_modules(isa, dtype, form) -> None:
    built, inputs = quantised(dtype), batch()
    if form == "packed":
        inputs = packed_rows(inputs)
    elif form != "padded":
        inputs = {"input_ids": batch((40, 40))["input_ids"]}
        seen = torch.rand(2, 1, 40, 40) < 0.7
        if form == "mask":
            inputs["attention_mask"] = seen
        if form == "bias":
            bias = torch.randn(2, 2, 40, 40).masked_fill(~seen, -1e4)
            inputs["attention_mask"] = bias
    with torch.inference_mode():
        assert same_bits(built, **inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(isa, dtype) -> None:
    built, inputs = quantised(), batch()
    with torch.inference_mode():
        plain = built(**inputs).last_hidden_state
        with torch.autocast("cpu", dtype):
            assert same_bits(built, **inputs)
            cast = built(**inputs).last_hidden_state
            other = quantised(torch.bfloat16)
            assert one_call(other) == (dtype == torch.bfloat16)
            assert other(**inputs).last_hidden_state.isfinite().all()
    assert cast.dtype == torch.float32
    assert not torch.equal(cast, plain)


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_other_activations(activation) -> None:
    with torch.inference_mode():
        assert same_bits(quantised(hidden_act=activation), **batch())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_in_any_batch_and_on_any_threads(
    isa, threads, dtype
) -> None:
    assert_same_bits_alone_in_any_batch_and_on_any_threads(quantised(dtype), threads)


@pytest.mark.parametrize("name", CALLED)
def test_hooks_fire(name) -> None:
    built, inputs, fired = quantised(), batch(), []
    with torch.inference_mode():
        expected = built(**inputs).last_hidden_state
        part = built.encoder.layer[1].get_submodule(name)
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            handle = register(lambda *_: fired.append(name))
            reason = built.backends()["encoder"].reason
            assert f"layer.1{'.' if name else ''}{name} has forward hooks" in reason
            assert torch.equal(built(**inputs).last_hidden_state, expected)
            handle.remove()
    assert len(fired) == 2
    assert one_call(built)


@pytest.mark.parametrize("name", DENSE)
def test_a_replaced_layer_is_used(name) -> None:
    built, inputs = quantised(), batch()
    owner, _, child = name.rpartition(".")
    parent = built.encoder.layer[1].get_submodule(owner)
    inner = getattr(parent, child)
    with torch.inference_mode():
        plain = built(**inputs).last_hidden_state
        setattr(parent, child, Doubled(inner))
        assert name in built.backends()["encoder"].reason
        assert not torch.allclose(built(**inputs).last_hidden_state, plain)
        setattr(parent, child, inner)
        inner.forward = lambda *_, **__: None
        assert f"{name} has a forward of its own" in built.backends()["encoder"].reason


class Other(QuantizedLinear):
    """A subclass of QuantizedLinear, whose forward pass fastbert cannot know."""


def test_the_reasons() -> None:
    built, inputs = quantised(), batch()

    def reason() -> str:
        return built.backends()["encoder"].reason

    output = built.encoder.layer[1].output
    dense = output.dense
    with torch.inference_mode():
        output.dense = nn.Linear(CONFIG.intermediate_size, CONFIG.hidden_size)
        assert "some linear layers are int8, others are not" in reason()
        assert built(**inputs).last_hidden_state.isfinite().all()
        output.dense = Other.of(output.dense)
        assert "output.dense is a" in reason()
        output.dense = dense.train()
        assert "a quantised layer is in training mode" in reason()
        with pytest.raises(RuntimeError, match="a call in training mode"):
            built(**inputs)
        bias, dense.eval().bias = dense.bias, None
        assert "a parameter is missing" in reason()
        assert built(**inputs).last_hidden_state.isfinite().all()
        dense.bias = bias
        dense.set_backend("reference")
        assert "differ in heads, eps, activation or backend" in reason()
        built.set_backend("reference")
        assert "int8_linear is served by reference" in reason()
        built.set_backend(None)
        assert one_call(built)
        with pytest.raises(
            ValueError,
            match="none can serve int8_linear: cpu: the dtype is float64, allowed: float32",
        ):
            built.double()(**inputs)


def test_without_a_gradient_it_is_one_call_in_any_mode(monkeypatch) -> None:
    built, inputs, calls = quantised(), batch(), []
    encoder = ops.encoder
    monkeypatch.setattr(ops, "encoder", lambda *a, **k: calls.append(0) or encoder(*a, **k))
    built(**inputs)
    assert len(calls) == 1
    embeds = torch.randn(1, 4, CONFIG.hidden_size, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        built(inputs_embeds=embeds)
    assert len(calls) == 1


def test_a_level_chosen_later_packs_again() -> None:
    """A model gives the same bits at a level even if the model ran at another level before."""
    built, fresh, inputs = quantised(), quantised(), batch()
    with torch.inference_mode():
        expected = built(**inputs).last_hidden_state
        try:
            backends.EXTENSION.set_cpu_isa("baseline")
            assert one_call(built)
            lower = fresh(**inputs).last_hidden_state
            assert torch.equal(built(**inputs).last_hidden_state, lower)
            # A call of a single layer packs this layer's weight for another level.
            backends.EXTENSION.set_cpu_isa(None)
            dense = built.encoder.layer[1].output.dense
            dense(torch.randn(3, CONFIG.intermediate_size))
            backends.EXTENSION.set_cpu_isa("baseline")
            assert torch.equal(built(**inputs).last_hidden_state, lower)
        finally:
            backends.EXTENSION.set_cpu_isa(None)
        assert torch.equal(built(**inputs).last_hidden_state, expected)


def test_weights_that_change_are_seen() -> None:
    built, other, inputs = quantised(), quantised(initializer_range=0.05), batch()
    dense = built.encoder.layer[0].intermediate.dense
    changes = [
        lambda: built.load_state_dict(other.state_dict()),
        lambda: dense.bias.add_(0.5),
        lambda: dense.padded_scale.mul_(1.5),
    ]
    with torch.no_grad():
        before = built(**inputs).last_hidden_state
        for change in changes:
            change()
            assert same_bits(built, **inputs)
            actual = built(**inputs).last_hidden_state
            assert not torch.equal(actual, before)
            before = actual
        for dtype in (torch.bfloat16, torch.float16):
            assert same_bits(built.to(dtype), **inputs)


def test_operator() -> None:
    with torch.no_grad():
        run = plan(quantised().encoder.layer, FP32).run
    hidden, ends = torch.randn(12, 64), torch.tensor([0, 7, 12], dtype=torch.int32)
    lists = [[t.detach() for t in tensors] for tensors in (run.parameters, run.settings.scales)]
    rest = (1, False, False, 1e-12, "gelu", torch.float32)
    arguments = (*lists, ends, None, None, [], [], [], None, 2, 7, 2, 2, 1, *rest)
    for all_states in (False, True):
        torch.library.opcheck(
            torch.ops.fastbert.encoder.default,
            (hidden, *arguments, all_states, "triton", "triton", "triton", "cpu"),
        )


def test_bad_arguments_are_named() -> None:
    with torch.no_grad():
        run = plan(quantised().encoder.layer, FP32).run
        floating = plan(model().encoder.layer, FP32).run.parameters

    def call(
        parameters: Any = run.parameters,
        scales: Any = run.settings.scales,
        columns: int = 64,
        projections: int = 1,
    ):
        options = {"batch": 1, "heads": 2, "scales": scales, "projections": projections}
        with torch.inference_mode():
            ops.encoder(torch.randn(12, columns), parameters, None, 12, **options)

    call()
    allowed = r"allowed: none, or 8 for each of 2 layers"
    with pytest.raises(ValueError, match=rf"scales: got 15 tensors, {allowed}"):
        call(scales=run.settings.scales[1:])
    with pytest.raises(ValueError, match="projections: got 3, allowed: 1 to 3, and 1 with scales"):
        call(projections=3)
    with pytest.raises(TypeError, match="packed: got dtype Float, allowed: Char"):
        call(floating)
    with pytest.raises(TypeError, match="weights: got dtype Char, allowed: Float"):
        call(scales=())
    with pytest.raises(TypeError, match="scale: got dtype Int, allowed: Float"):
        call(scales=run.settings.scales[::-1])
    with pytest.raises(ValueError, match=r"packed: got shape .*allowed for x of 130"):
        call(columns=130)
    short = [p[:5] if i == 1 else p for i, p in enumerate(run.parameters)]
    with pytest.raises(ValueError, match=r"packed: got shape .*and 5 results"):
        call(short)
    square = [p[None] if i == 1 else p for i, p in enumerate(run.parameters)]
    with pytest.raises(ValueError, match=r"bias: got shape \[1, 192\]"):
        call(square)


def test_compiled_it_traces_the_modules() -> None:
    built, ids = quantised(num_hidden_layers=1), batch((12, 12))["input_ids"]
    with torch.no_grad():
        expected = built(ids).last_hidden_state
        compiled = torch.compile(built, backend="eager", fullgraph=True)
        assert torch.equal(compiled(ids).last_hidden_state, expected)
