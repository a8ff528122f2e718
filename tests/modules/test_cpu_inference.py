"""CPU inference computes all layers of a model in one C++ call, with the right results.

The results are right in every dtype and do not depend on other sequences of the batch. Hooks are
called, and replaced layers take effect.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastbert import modules, ops, reference
from fastbert.config import BertConfig
from fastbert.modules.plan import Mode, plan
from fastbert.ops import backend as backends
from fastbert.testing import reference_model
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=80,
    initializer_range=0.1,
)
LENGTHS = (70, 23, 9, 1)
FP32 = Mode.now("cpu", torch.float32, gradient=False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE_CALL = ("cpu", "all layers in one call")


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> modules.BertModel:
    torch.manual_seed(0)
    built = modules.BertModel(CONFIG.replace(**changes)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built.to(dtype)


def batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, CONFIG.vocab_size, exists.shape, generator=generator)
    return {"input_ids": ids * exists, "attention_mask": exists.long()}


def one_call(built: modules.BertPreTrainedModel) -> bool:
    return built.backends()["encoder"] == ONE_CALL


def layer_by_layer(built: modules.BertModel, **inputs: Any) -> Any:
    """Return the result with modules called one by one, which an empty hook on a layer causes."""
    handle = built.encoder.layer[0].register_forward_hook(lambda *_: None)
    try:
        assert not one_call(built)
        return built(**inputs)
    finally:
        handle.remove()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_float64(isa, dtype, padded) -> None:
    built = model(dtype)
    assert one_call(built)
    inputs = batch() if padded else batch((40, 40))
    mask = inputs["attention_mask"].bool()
    state = built.state_dict()
    with torch.inference_mode():
        actual = built(**inputs, output_hidden_states=True)
        double = {name: t.double() for name, t in state.items()}
        oracle = reference_model.encode(double, built.config, **inputs)
        yardstick = Yardstick(lambda: reference_model.encode(state, built.config, **inputs))
    assert len(actual.hidden_states) == 3
    runs = (actual, oracle, yardstick)
    with torch.inference_mode():
        assert_close("states", *each(lambda run: torch.stack(run.hidden_states)[:, mask], *runs))
        assert_close("pooled", *each(lambda run: run.pooler_output, *runs))
    assert torch.equal(actual.hidden_states[-1], actual.last_hidden_state)
    assert not actual.last_hidden_state[~mask].any()


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_other_activations(activation) -> None:
    built = model(hidden_act=activation)
    assert one_call(built)
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    state = built.state_dict()
    with torch.inference_mode():
        double = {name: t.double() for name, t in state.items()}
        runs = (
            built(**inputs),
            reference_model.encode(double, built.config, **inputs),
            Yardstick(lambda: reference_model.encode(state, built.config, **inputs)),
        )
        assert_close(activation, *each(lambda run: run.last_hidden_state[mask], *runs))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_pairs(kind) -> None:
    built = model()
    ids = batch((20, 20))["input_ids"]
    seen = torch.rand(2, 1, 20, 20) < 0.7
    mask = seen if kind == "bool" else torch.randn(2, 2, 20, 20).masked_fill(~seen, -1e4)
    with torch.inference_mode():
        actual = built(ids, mask).last_hidden_state
        built.set_backend("reference")
        yardstick = Yardstick(lambda: built(ids, mask).last_hidden_state)
        oracle = copy.deepcopy(built).double()(ids, mask).last_hidden_state
        assert_close(kind, actual, oracle, yardstick)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype) -> None:
    """Under autocast, products of fp32 weights run in 16 bits, and the residual stream is fp32."""
    built = model()
    inputs = batch()
    mask = inputs["attention_mask"].bool()

    def run(model: modules.BertModel, autocast: bool) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=autocast):
            states = model(**inputs, output_hidden_states=True).hidden_states
        return torch.stack(states)[:, mask]

    with torch.inference_mode(), torch.autocast("cpu", dtype):
        assert one_call(built)
    actual = run(built, True)
    built.set_backend("reference")
    with torch.inference_mode(), torch.autocast("cpu", dtype):
        assert not one_call(built)
    yardstick = Yardstick(lambda: run(built, True))
    oracle = run(model().double(), False)
    assert actual.dtype == torch.float32
    assert_close("states", actual, oracle, yardstick)
    assert not torch.equal(actual, run(built, False))


def packed_rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = torch.cat([inputs["input_ids"][i, :n] for i, n in enumerate(LENGTHS)])
    return {"input_ids": ids, "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int()}


def assert_same_bits_alone_in_any_batch_and_on_any_threads(
    built: modules.BertModel, threads: Callable[[int], None]
) -> None:
    inputs = batch()
    with torch.inference_mode():
        threads(1)
        together = built(**inputs).last_hidden_state
        threads(2)
        assert torch.equal(built(**inputs).last_hidden_state, together)
        for row, length in enumerate(LENGTHS):
            alone = built(inputs["input_ids"][row : row + 1, :length]).last_hidden_state
            assert torch.equal(alone[0], together[row, :length]), length
        packed = built(**packed_rows(inputs)).last_hidden_state
    assert torch.equal(packed, together[inputs["attention_mask"].bool()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_alone_in_any_batch_and_on_any_threads(
    isa, threads, dtype
) -> None:
    assert_same_bits_alone_in_any_batch_and_on_any_threads(model(dtype), threads)


CALLED = ["", "attention", "attention.self", "attention.self.qkv", "attention.output",
          "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense",
          "output", "output.dense", "output.LayerNorm"]  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_hooks_fire(name) -> None:
    built, inputs, fired = model(), batch(), []
    with torch.inference_mode():
        expected = built(**inputs).last_hidden_state
        part = built.encoder.layer[1].get_submodule(name)
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            handle = register(lambda *_: fired.append(name))
            assert "layer.1" in built.backends()["encoder"].reason
            actual = built(**inputs).last_hidden_state
            handle.remove()
            torch.testing.assert_close(actual, expected)
    assert len(fired) == 2
    assert one_call(built)


class Doubled(nn.Module):
    """A module that, like an adapter, wraps a linear layer and exposes that layer's weights."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x: Tensor, **options: Any) -> Any:
        y = self.inner(x, **options)
        return (2.0 * y[0], y[1]) if isinstance(y, tuple) else 2.0 * y


DENSE = ["attention.self.qkv", "attention.output.dense", "intermediate.dense", "output.dense"]


@pytest.mark.parametrize("name", DENSE)
def test_a_replaced_layer_is_used(name) -> None:
    built, inputs = model(), batch()
    owner, _, child = name.rpartition(".")
    layer = built.encoder.layer[1]
    inner = layer.get_submodule(name)
    with torch.inference_mode():
        setattr(layer.get_submodule(owner), child, Doubled(inner))
        assert name in built.backends()["encoder"].reason
        actual = built(**inputs).last_hidden_state
        setattr(layer.get_submodule(owner), child, inner)
        assert one_call(built)
        inner.weight.mul_(2.0)
        inner.bias.mul_(2.0)
        torch.testing.assert_close(actual, built(**inputs).last_hidden_state)


def test_parametrized_weights_and_forwards_of_their_own_are_used() -> None:
    built, inputs = model(), batch()
    with torch.inference_mode():
        plain = built(**inputs).last_hidden_state
    dense = built.encoder.layer[0].output.dense
    nn.utils.parametrizations.weight_norm(dense)
    with torch.inference_mode():
        assert "output.dense" in built.backends()["encoder"].reason
        torch.testing.assert_close(built(**inputs).last_hidden_state, plain)
        dense.parametrizations.weight.original0.mul_(3.0)
        assert not torch.allclose(built(**inputs).last_hidden_state, plain)
    built = model()
    built.encoder.layer[0].attention.forward = lambda hidden, *_: (hidden, None)
    assert "layer.0.attention has a forward of its own" in built.backends()["encoder"].reason


def test_the_reasons(monkeypatch) -> None:
    built, inputs = model(), batch()

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("one call")

    monkeypatch.setattr(ops, "encoder", refused)
    built(**inputs).last_hidden_state.sum().backward()  # This call needs gradients.
    with torch.no_grad():
        with pytest.raises(AssertionError, match="one call"):
            built(**inputs)
        built(**inputs, output_attentions=True)
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        built(**inputs)
        assert "hooks on all modules" in built.backends()["encoder"].reason
        handle.remove()
        built.train()(**inputs)
        assert "dropout" in built.backends()["encoder"].reason
        built.eval().set_backend("reference")
        built(**inputs)
        assert built.backends()["encoder"].backend == "reference"
        assert "served by reference" in built.backends()["encoder"].reason
    assert "float64" in model(torch.float64).backends()["encoder"].reason


def test_dropout_inside_the_feed_forward_alone_is_seen() -> None:
    inner = dataclasses.replace(CONFIG.architecture, inner_dropout=0.5)
    built = model(architecture=inner, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert one_call(built)
    assert "dropout" in built.train().backends()["encoder"].reason


def test_weights_that_change_are_seen() -> None:
    """After any kind of change to the weights, the next call uses the new weights."""
    built, other, inputs = model(), model(initializer_range=0.05), batch()
    weight = built.encoder.layer[0].intermediate.dense.weight
    changes = [
        lambda: built.load_state_dict(other.state_dict()),
        lambda: weight.mul_(1.5),
        lambda: weight.data.mul_(1.5),
        lambda: weight.data.copy_(torch.randn_like(weight)),
        lambda: setattr(weight, "data", torch.randn_like(weight)),
        lambda: built.encoder.layer[0].intermediate.dense.register_parameter(
            "weight", nn.Parameter(torch.randn_like(weight))
        ),
    ]
    with torch.no_grad():
        before = built(**inputs).last_hidden_state
        for change in changes:
            change()
            assert one_call(built)
            actual = built(**inputs).last_hidden_state
            assert not torch.equal(actual, before)
            assert torch.equal(actual, copy.deepcopy(built)(**inputs).last_hidden_state)
            torch.testing.assert_close(actual, layer_by_layer(built, **inputs).last_hidden_state)
            before = actual


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_ten_thousand_calls_leave_nothing_behind() -> None:
    built = model(num_hidden_layers=1, hidden_size=16, num_attention_heads=1, intermediate_size=16)
    inputs = batch((5, 3))
    with torch.inference_mode():
        for _ in range(1000):
            built(**inputs)
        before = resident_bytes()
        for _ in range(10_000):
            built(**inputs)
        assert resident_bytes() - before < 1 << 20


def test_two_python_threads_run_two_models() -> None:
    pairs = [(model(), batch()), (model(torch.bfloat16, initializer_range=0.2), batch((33, 5)))]
    results: list[list[Tensor]] = [[], []]
    with torch.inference_mode():
        expected = [built(**inputs).last_hidden_state for built, inputs in pairs]

    def work(index: int) -> None:
        built, inputs = pairs[index]
        with torch.inference_mode():
            for _ in range(30):
                results[index].append(built(**inputs).last_hidden_state)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for got, right in zip(results, expected, strict=True):
        assert len(got) == 30
        assert all(torch.equal(one, right) for one in got)


def test_operator() -> None:
    built = model()
    with torch.no_grad():
        run = plan(built.encoder.layer, FP32).run
    hidden = torch.randn(12, 64)
    cu_seqlens = torch.tensor([0, 7, 12], dtype=torch.int32)
    parameters = [p.detach() for p in run.parameters]
    rest = (1, False, False, 1e-12, "gelu", torch.float32)
    arguments = (parameters, [], cu_seqlens, None, None, [], [], [], None, 2, 7, 2, 2, 1, *rest)
    for all_states in (False, True):
        torch.library.opcheck(
            torch.ops.fastbert.encoder.default,
            (hidden, *arguments, all_states, "triton", "triton", "triton", "cpu"),
        )
    leaf = hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="has no derivative"):
        ops.encoder(leaf, parameters, cu_seqlens, 7, batch=2, heads=2)[0].sum().backward()
    with pytest.raises(ValueError, match="parameters: got 23 tensors, allowed: 12 for each layer"):
        ops.encoder(hidden, parameters[1:], cu_seqlens, 7, batch=2, heads=2)
    with pytest.raises(ValueError, match="parameters: got 24 tensors, allowed: 16 for each layer"):
        ops.encoder(hidden, parameters, cu_seqlens, 7, batch=2, heads=2, projections=3)
    for projections in (0, 4):
        with pytest.raises(ValueError, match=f"projections: got {projections}, allowed: 1 to 3"):
            ops.encoder(hidden, parameters, None, 6, batch=2, heads=2, projections=projections)
    with pytest.raises(ValueError, match="heads: got 3 and 3 of keys, allowed: a divisor of 192"):
        ops.encoder(hidden, parameters, cu_seqlens, 7, batch=2, heads=3)
    with pytest.raises(ValueError, match="max_seqlen: got 2 and 7, allowed: a product of 12"):
        ops.encoder(hidden, parameters, None, 7, batch=2, heads=2)


@pytest.mark.parametrize("projections", [2, 3])
def test_several_projections_have_the_bits_of_one(projections) -> None:
    with torch.no_grad():
        run = plan(model().encoder.layer, FP32).run
    whole, parted = [p.detach() for p in run.parameters], []
    sizes = (64,) * 3 if projections == 3 else (128, 64)
    for first in range(0, len(whole), 12):
        parted += [part for t in whole[first : first + 2] for part in t.split(sizes)]
        parted += whole[first + 2 : first + 12]
    ends = torch.tensor([0, 7, 12], dtype=torch.int32)
    arguments = (ends, None, None, [], [], [], None, 2, 7, 2, 2)
    numbers = (1, False, False, 1e-12, "gelu", torch.float32)
    rest = (*numbers, True, "triton", "triton", "triton", "cpu")
    hidden = torch.randn(12, 64)
    torch.library.opcheck(
        torch.ops.fastbert.encoder.default,
        (hidden, parted, [], *arguments, projections, *rest),
    )
    expected = ops.encoder(hidden, whole, ends, 7, batch=2, heads=2, all_states=True)
    actual = ops.encoder(
        hidden, parted, ends, 7, batch=2, heads=2, all_states=True, projections=projections
    )
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("form", ["packed", "full", "mask", "bias", "autocast"])
def test_the_public_function_agrees_with_its_reference(form) -> None:
    with torch.no_grad():
        parameters = [p.detach() for p in plan(model().encoder.layer, FP32).run.parameters]
    options: dict[str, Any] = {"batch": 2, "heads": 2, "eps": 1e-6, "all_states": True}
    if form == "packed":
        ends = torch.tensor([0, 50, 80], dtype=torch.int32)
        options |= {"cu_seqlens": ends, "max_seqlen": 50, "activation": "gelu_tanh"}
    else:
        options |= {"max_seqlen": 40}
    if form == "mask":
        options["mask"] = torch.rand(2, 1, 40, 40) < 0.7
    if form == "bias":
        options["bias"] = torch.randn(1, 2, 40, 40)
    if form == "autocast":
        options["dtype"] = torch.bfloat16
    hidden = torch.randn(80, 64)
    double = {
        name: t.double() if name == "bias" else t for name, t in options.items() if name != "dtype"
    }
    runs = (
        ops.encoder(hidden, parameters, **options),
        reference.encoder(hidden.double(), [p.double() for p in parameters], **double),
        Yardstick(lambda: reference.encoder(hidden, parameters, **options)),
    )
    assert len(runs[0]) == 2
    assert_close(form, *each(torch.stack, *runs))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 3, 0)])
def test_sequences_without_tokens(lengths) -> None:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.ones(int(ends[-1]), dtype=torch.int64)
    built = model()
    with torch.inference_mode():
        out = built(ids, cu_seqlens=ends).last_hidden_state
        expected = layer_by_layer(built, input_ids=ids, cu_seqlens=ends).last_hidden_state
    assert out.shape == (len(ids), 64)
    torch.testing.assert_close(out, expected)


def test_compiled_it_traces_the_modules() -> None:
    built, inputs = model(num_hidden_layers=1), batch((12, 12))
    with torch.no_grad():
        expected = built(**inputs).last_hidden_state
        compiled = torch.compile(built, backend="eager", fullgraph=True)
        actual = compiled(inputs["input_ids"]).last_hidden_state
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_by_distance_is_in_the_one_call(isa, dtype, monkeypatch) -> None:
    """With a distance bias, the one call gives a sequence the same bits in a batch as alone."""
    built = model(dtype, architecture=dataclasses.replace(CONFIG.architecture, distance_buckets=32))
    with torch.no_grad():
        built.encoder.relative_attention_bias.weight.normal_()
    inputs, calls = batch(), []
    one = ops.encoder

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options["bias"])
        return one(*arguments, **options)

    monkeypatch.setattr(ops, "encoder", counted)
    with torch.no_grad():
        states = built(**inputs).last_hidden_state
        assert [bias is not None for bias in calls] == [True]
        if dtype == torch.float32:  # The parity tests of the families compare the other dtypes.
            expected = layer_by_layer(built, **inputs).last_hidden_state
            assert (states - expected).abs().max() < 1e-5
        mask = inputs["attention_mask"].bool()
        for row, kept in enumerate(mask):
            alone = built(inputs["input_ids"][row : row + 1, kept]).last_hidden_state[0]
            if kept.any() and bool((kept.nonzero().diff(dim=0) == 1).all()):
                assert torch.equal(alone, states[row, kept])
        built.encoder.relative_attention_bias.weight.zero_()
        assert (built(**inputs).last_hidden_state - states).abs().max() > 0.1
