"""After every change, the prepared C++ call of a model gives the bits of the model's modules."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastbert
from fastbert import BertConfig, BertModel
from fastbert.config import Architecture
from fastbert.io import families
from fastbert.modules.embeddings import BertEmbeddings
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.snapshot import Snapshot
from fastbert.ops import backend as backends

pytestmark = pytest.mark.skipif(backends.EXTENSION is None, reason="the extension is not built")

CONFIG = BertConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=80, max_position_embeddings=24,
)  # fmt: skip


def make(dtype: torch.dtype = torch.float32, **options: Any) -> BertModel:
    torch.manual_seed(3)
    model = BertModel(CONFIG, **options).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(lengths: tuple[int, ...] = (9, 5, 12), first: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and mask of shape (B, L); each sequence begins at the position `first`."""
    longest = max(lengths) + first
    ids = torch.randint(1, 97, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    places = torch.arange(longest)
    ends = torch.tensor(lengths)[:, None] + first
    return ids, ((places >= first) & (places < ends)).long()


def outputs(model: BertModel, ids: Any, mask: Any = None, **more: Any) -> list[Tensor]:
    with torch.no_grad():
        result = model(ids, mask, **more)
    return [t for t in (result.last_hidden_state, result.pooler_output) if t is not None]


def through_modules(model: BertModel, ids: Tensor, *given: Any, **more: Any) -> list[Tensor]:
    """Return results of the modules; explicit positions keep the model from the prepared call."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return outputs(model, ids, *given, position_ids=positions, **more)


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def is_prepared(model: BertModel) -> bool:
    """Return whether the model's next call can use the prepared call."""
    state = model._prepared._prepared
    return state is not None and state.arguments is not None and state.facts.holds(model)


@pytest.mark.parametrize(
    ("choices", "prepared"),
    [
        ({"head_dim": 20}, True),
        ({"key_value_heads": 2}, False),
        ({"attention_scale": 1.0}, False),
    ],
    ids=str,
)
def test_heads_of_another_kind(choices, prepared) -> None:
    """The prepared call has no scale and no shared heads, so that such models run otherwise."""
    torch.manual_seed(3)
    model = BertModel(CONFIG.replace(architecture=Architecture(**choices))).eval()
    ids, mask = batch()
    for _ in range(2):  # The first call prepares the second.
        assert same(outputs(model, ids, mask), through_modules(model, ids, mask))
    assert is_prepared(model) == prepared


MASKS: dict[str, Any] = {
    "none": lambda: (batch()[0], None),
    "full": lambda: (batch()[0], torch.ones(3, 12, dtype=torch.int64)),
    "padding on the right": lambda: batch(),
    "padding on the left": lambda: batch((7, 4, 10), first=2),
    "bool": lambda: (batch()[0], batch()[1].bool()),
    "int32": lambda: (batch()[0].int(), batch()[1].int()),
    "not contiguous": lambda: (batch()[0].repeat(1, 2)[:, ::2], batch()[1].t().contiguous().t()),
    "an empty sequence": lambda: batch((6, 0, 3)),
    "holes": lambda: (batch()[0], (batch()[0] % 3 > 0).long()),
    "one token": lambda: (torch.tensor([[5]]), torch.tensor([[1]])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", MASKS)
def test_the_call_has_the_bits_of_the_modules(case, dtype):
    model, (ids, mask) = make(dtype), MASKS[case]()
    types = torch.arange(ids.numel()).view_as(ids) % 2
    for more in ({}, {"token_type_ids": types}):
        result = outputs(model, ids, mask, **more)
        assert is_prepared(model)
        assert same(result, through_modules(model, ids, mask, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MASKS)
def test_roberta_counts_its_positions(case, dtype):
    roberta = families.read_config(CONFIG.to_dict() | {"model_type": "roberta", "pad_token_id": 1})
    assert roberta.architecture.first_position == 2
    torch.manual_seed(3)
    model, (ids, mask) = BertModel(roberta).eval().to(dtype), MASKS[case]()
    padding = ids.long() if mask is None else torch.where(mask.bool(), ids.long(), 1)
    result = outputs(model, padding, mask)
    assert is_prepared(model)
    exists = (padding != 1).long()
    positions = exists.cumsum(1) * exists + 1
    assert same(result, outputs(model, padding, mask, position_ids=positions))


# The cumulative lengths of packed sequences, and the number of tokens after the last sequence.
PACKED = {
    "several": ([0, 9, 14, 26], 0),
    "one": ([0, 17], 0),
    "an empty sequence": ([0, 6, 6, 9], 0),
    "all empty but one": ([0, 0, 3, 3], 0),
    "tokens after the last sequence": ([0, 6, 9], 30),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_have_the_bits_of_the_modules(case, model_type, dtype):
    torch.manual_seed(3)
    config = families.read_config(CONFIG.to_dict() | {"model_type": model_type, "pad_token_id": 1})
    model, (ends, after) = BertModel(config).eval().to(dtype), PACKED[case]
    count = ends[-1] + after
    # The id of padding counts as a token, because packed sequences have no padding.
    ids = torch.randint(0, 9, (count,))
    lengths = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    first = config.architecture.first_position or 0
    places = [torch.arange(b - a) for a, b in itertools.pairwise(ends)]
    positions = first + torch.cat([*places, torch.zeros(after, dtype=torch.int64)])
    types = torch.arange(count) % config.type_vocab_size
    for more in ({}, {"token_type_ids": types}, {"max_seqlen": 20}):
        result = outputs(model, ids, **lengths, **more)
        assert is_prepared(model)
        assert same(result, outputs(model, ids, **lengths, **more, position_ids=positions))


def test_the_last_state_alone_comes_from_the_call(monkeypatch):
    model, (ids, mask) = make(), batch()
    with torch.no_grad():
        every = model(ids, mask, output_hidden_states=True).hidden_states
    calls = []
    encode_rows = model.encode_rows
    monkeypatch.setattr(
        model,
        "encode_rows",
        lambda *given, **named: calls.append(1) or encode_rows(*given, **named),
    )
    for chosen, through in (((-1,), 0), ((2,), 0), ((2, -1), 0), ((1,), 1), ((0, 2), 1)):
        calls.clear()
        with torch.no_grad():
            states = model(ids, mask, output_hidden_states=chosen).hidden_states
        assert len(calls) == through
        wanted = {number % 3 for number in chosen}
        assert [state is not None for state in states] == [n in wanted for n in range(3)]
        assert all(torch.equal(states[n], every[n]) for n in wanted)
    with torch.no_grad():
        assert model(ids, mask, output_hidden_states=()).hidden_states is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MASKS)
def test_int8_models_have_the_bits_of_the_modules(case, dtype):
    model, (ids, mask) = fastbert.quantize(make(dtype)), MASKS[case]()
    result = outputs(model, ids, mask)
    assert is_prepared(model)
    assert same(result, through_modules(model, ids, mask))


def test_a_model_without_pooler():
    model, (ids, mask) = make(add_pooling_layer=False), batch()
    assert same(outputs(model, ids, mask), through_modules(model, ids, mask))
    assert is_prepared(model)


def test_heads_use_the_call():
    model = fastbert.BertForSequenceClassification(CONFIG).eval()
    ids, mask = batch()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        result = model(ids, mask).logits
        assert is_prepared(model.bert)
        assert torch.equal(result, model(ids, mask, position_ids=positions).logits)


# Each of these functions changes `model`, and may return a function that undoes the change.

Undo = Callable[[], Any]
CHANGES: dict[str, Callable[[BertModel], Undo | None]] = {}


def change(function: Callable[[BertModel], Undo | None]) -> Callable[[BertModel], Undo | None]:
    CHANGES[function.__name__] = function
    return function


def _layer(model: BertModel) -> Any:
    return model.encoder.layer[1]


def _doubled(module: nn.Module, *given: Any) -> Any:
    result = given[-1]
    return (
        tuple(2 * r if isinstance(r, Tensor) else r for r in result)
        if isinstance(result, tuple)
        else 2 * result
    )


@change
def write_to_data(model):
    model.encoder.layer[0].output.dense.weight.data[3] *= 2


@change
def write_one_element(model):
    model.embeddings.word_embeddings.weight.data[:, 7] += 1


@change
def swap_data(model):
    weight = _layer(model).intermediate.dense.weight
    weight.data = weight.data.clone() * 2


@change
def swap_memory(model):
    weight = _layer(model).attention.output.dense.weight
    with torch.no_grad():
        weight.set_(torch.randn_like(weight))


@change
def step_of_a_fused_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


@change
def replace_a_parameter(model):
    norm = _layer(model).output.LayerNorm
    norm.weight = nn.Parameter(3 * norm.weight.detach())


@change
def replace_a_module(model):
    old = _layer(model).intermediate.dense
    new = nn.Linear(old.in_features, old.out_features)
    _layer(model).intermediate.dense = new


@change
def replace_a_norm_of_the_embeddings(model):
    model.embeddings.LayerNorm = LayerNorm(48, 0.5)


@change
def parametrize(model):
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    nn.utils.parametrize.register_parametrization(
        _layer(model).output.dense, "weight", Halved(), unsafe=True
    )


@change
def set_eps(model):
    for layer in model.encoder.layer:
        for norm in (layer.output.LayerNorm, layer.attention.output.LayerNorm):
            norm.eps = 0.25


@change
def set_eps_of_the_embeddings(model):
    model.embeddings.LayerNorm.eps = 0.25


@change
def hook_on_a_layer(model):
    return _layer(model).register_forward_hook(_doubled).remove


@change
def hook_on_the_embeddings(model):
    return model.embeddings.register_forward_hook(_doubled).remove


@change
def hook_before_the_encoder(model):
    def double(module: nn.Module, given: tuple[Any, ...]) -> Any:
        return (2 * given[0], *given[1:])

    return model.encoder.register_forward_pre_hook(double).remove


@change
def hook_on_a_norm(model):
    return _layer(model).attention.output.LayerNorm.register_forward_hook(_doubled).remove


@change
def hook_on_the_pooler(model):
    return model.pooler.register_forward_hook(_doubled).remove


@change
def hook_on_the_dense_layer_of_the_pooler(model):
    return model.pooler.dense.register_forward_hook(_doubled).remove


@change
def hook_on_all_modules(model):
    def double(module: nn.Module, given: Any, result: Any) -> Any:
        return 2 * result if isinstance(module, BertEmbeddings) else None

    return nn.modules.module.register_module_forward_hook(double).remove


@change
def forward_of_its_own(model):
    pooler = model.pooler
    pooler.forward = lambda first: 3 * first
    return lambda: vars(pooler).pop("forward")


@change
def patch_a_class(model):
    forward = BertEmbeddings.forward
    BertEmbeddings.forward = lambda self, *given: 2 * forward(self, *given)

    def undo() -> None:
        BertEmbeddings.forward = forward

    return undo


@change
def other_class(model):
    class Doubled(BertEmbeddings):
        def forward(self, *given: Any) -> Tensor:
            return 2 * super().forward(*given)

    model.embeddings.__class__ = Doubled


@change
def fewer_layers(model):
    del model.encoder.layer[1]
    model.encoder.order = (0,)


@change
def no_pooler(model):
    model.pooler = None


@change
def other_order(model):
    model.encoder.order = (1, 0)


@change
def add_a_layer(model):
    model.encoder.layer.append(copy.deepcopy(model.encoder.layer[0]))
    model.encoder.order = (0, 1, 2)


@change
def to_bfloat16(model):
    model.bfloat16()


@change
def to_float64(model):
    model.double()


@change
def one_weight_in_bfloat16(model):
    weight = _layer(model).output.dense.weight
    weight.data = weight.data.bfloat16().float()


@change
def reference_backend(model):
    for module in model.modules():
        if hasattr(module, "set_backend"):
            module.set_backend("reference")


@change
def patch_an_operation(model):
    linear = fastbert.ops.linear
    fastbert.ops.linear = lambda x, *given, **options: linear(2 * x, *given, **options)

    def undo() -> None:
        fastbert.ops.linear = linear

    return undo


@change
def default_backend(model):
    backends.DEFAULT_REQUEST = "reference"

    def undo() -> None:
        backends.DEFAULT_REQUEST = None

    return undo


@change
def other_implementation(model):
    table, row = backends.TABLES["embedding"], backends.TABLES["embedding"]["cpu"]
    del table["cpu"]
    return lambda: table.update(cpu=row)


@change
def quantize(model):
    fastbert.quantize(model, inplace=True)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_at_the_next_call(name):
    """The next call gives the modules' result after each change, and after the change is undone."""
    model, (ids, mask) = make(), batch()
    before = outputs(model, ids, mask)
    assert is_prepared(model)
    undo = CHANGES[name](model)
    try:
        actual, expected = outputs(model, ids, mask), through_modules(model, ids, mask)
        assert same(actual, expected)
        # Another backend may give the same bits. Every other change must alter the result.
        assert "backend" in name or "implementation" in name or not same(actual, before)
    finally:
        if undo is not None:
            undo()
    assert same(outputs(model, ids, mask), through_modules(model, ids, mask))
    if undo is not None:
        assert same(outputs(model, ids, mask), before)


def test_a_call_that_is_prepared_for_ever_is_caught(monkeypatch):
    """If the snapshot of a model is never compared, the test above fails for most changes."""
    monkeypatch.setattr(Snapshot, "holds", lambda self, root: True)
    missed = []
    for name, function in CHANGES.items():
        model, (ids, mask) = make(), batch()
        outputs(model, ids, mask)
        undo = function(model)
        try:
            if not same(outputs(model, ids, mask), through_modules(model, ids, mask)):
                missed.append(name)
        except TypeError:  # only one result has a pooler output
            missed.append(name)
        finally:
            if undo is not None:
                undo()
    # These changes are seen without a check, because every call reads the tensors' values,
    # addresses and dtypes.
    read = {"write_to_data", "write_one_element", "swap_data", "swap_memory", "to_bfloat16"}
    read.add("to_float64")
    read |= {"step_of_a_fused_optimizer", "one_weight_in_bfloat16"}
    # Quantization itself removes the prepared call, so that the memory of the old weights is freed.
    read.add("quantize")
    same_bits = {"default_backend", "reference_backend", "other_implementation", "no_pooler"}
    assert set(CHANGES) - read - same_bits <= set(missed)


ONES = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("ids", "given"),
    [
        (torch.tensor([[1, 97]]), {}),
        (torch.tensor([[-1, 3]]), {}),
        (torch.ones(2, 25, dtype=torch.int64), {}),
        (torch.ones(2, 3), {}),
        (torch.ones(2, 3, dtype=torch.int64), {"token_type_ids": torch.full((2, 3), 2)}),
        (torch.ones(2, 3, dtype=torch.int64), {"token_type_ids": torch.zeros(3, 2).long()}),
        (torch.ones(2, 3, dtype=torch.int64), {"attention_mask": torch.full((2, 3), 2)}),
        (torch.ones(2, 3, dtype=torch.int64), {"attention_mask": torch.ones(2, 4).long()}),
        (ONES, {"cu_seqlens": torch.tensor([0, 5]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([1, 4]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([0, 3, 2, 4]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([0, 9, 2, 4]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([0, -1, 4]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([0, 4])}),
        (torch.ones(1, 4, dtype=torch.int64), {"cu_seqlens": torch.tensor([0, 4]).int()}),
        (torch.ones(25, dtype=torch.int64), {"cu_seqlens": torch.tensor([0, 25]).int()}),
        (ONES, {"cu_seqlens": torch.tensor([0, 4]).int(), "attention_mask": ONES}),
        (ONES, {"cu_seqlens": torch.tensor([0, 4]).int(), "max_seqlen": 3}),
        (ONES, {"cu_seqlens": torch.tensor([0, 4]).int(), "max_seqlen": 25}),
        (torch.ones(2, 3, dtype=torch.int64), {"max_seqlen": 3}),
        (torch.ones(2, 3, dtype=torch.int64), {"output_hidden_states": (3,)}),
    ],
)
def test_errors_are_those_of_the_modules(ids, given):
    fresh, used = make(), make()
    outputs(used, *batch())
    # With gradients enabled, the model runs its modules instead of the prepared call.
    with pytest.raises((ValueError, TypeError, IndexError)) as expected:
        fresh(ids, **given)
    with pytest.raises(type(expected.value)) as error, torch.no_grad():
        used(ids, **given)
    assert str(error.value) == str(expected.value)
    assert same(outputs(used, *batch()), through_modules(used, *batch()))


def test_copies_and_pickles_have_a_call_of_their_own():
    model, (ids, mask) = make(), batch()
    expected = outputs(model, ids, mask)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ):
        assert other._prepared is not model._prepared
        assert other._prepared._prepared is None
        other.encoder.layer[0].output.dense.weight.data.zero_()
        assert not same(outputs(other, ids, mask), expected)
        assert same(outputs(other, ids, mask), through_modules(other, ids, mask))
    assert same(outputs(model, ids, mask), expected)


def test_the_model_is_freed_with_its_last_reference():
    model = make()
    outputs(model, *batch())
    assert is_prepared(model)
    gone = weakref.ref(model.encoder.layer[0].output.dense.weight)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_embeddings_in_training_mode_drop():
    model, (ids, mask) = make(), batch()
    before = outputs(model, ids, mask)
    model.embeddings.train()
    assert not same(outputs(model, ids, mask), before)
    assert same(outputs(model.eval(), ids, mask), before)


def test_accelerated_models_use_the_call():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**CONFIG.to_dict() | {"vocab_size": 97})
    torch.manual_seed(0)
    stock = fastbert.accelerate(transformers.BertModel(config).eval())
    inner = fastbert.integrations.accelerate._bound(stock).model
    ids, mask = batch()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    for change in (None, "hook", "parameter", "module", None):
        if change == "hook":
            layer = stock.encoder.layer[0].output.dense
            handle = layer.register_forward_hook(lambda module, given, result: 2 * result)
        elif change == "parameter":
            handle.remove()
            stock.embeddings.LayerNorm.weight = nn.Parameter(torch.rand(48))
        elif change == "module":
            stock.encoder.layer[1].intermediate.dense = nn.Linear(48, 80)
        with torch.no_grad():
            actual = stock(ids, mask)
            assert is_prepared(inner) == (change != "hook")
            expected = stock(ids, mask, position_ids=positions)
        assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(actual.pooler_output, expected.pooler_output)


def test_quantization_in_place_frees_the_weights_of_a_prepared_model():
    model = fastbert.BertForSequenceClassification(CONFIG).eval()
    with torch.no_grad():
        model(*batch())
    assert is_prepared(model.bert)
    gone = [weakref.ref(layer.output.dense.weight) for layer in model.bert.encoder.layer]
    fastbert.quantize(model, inplace=True)
    assert [weight() for weight in gone] == [None, None]


@pytest.mark.parametrize("mode", ["gradient", "autocast", "training", "functional", "profiler"])
def test_what_watches_or_changes_the_operators_sees_them(mode):
    model, (ids, mask) = make(), batch()
    outputs(model, ids, mask)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    if mode == "gradient":
        assert model(ids, mask).last_hidden_state.requires_grad
    elif mode == "training":
        torch.manual_seed(1)
        actual = outputs(model.train(), ids, mask)
        torch.manual_seed(1)
        assert same(actual, through_modules(model, ids, mask))
        assert not same(actual, outputs(model.eval(), ids, mask))
    elif mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(outputs(model, ids, mask), through_modules(model, ids, mask))
            assert not same(outputs(model, ids, mask), outputs(make(), ids))
    elif mode == "functional":
        doubled = {name: 2 * value.detach() for name, value in model.named_parameters()}
        with torch.no_grad():
            actual = torch.func.functional_call(model, doubled, (ids, mask))
            expected = torch.func.functional_call(model, doubled, (ids, mask, None, positions))
        assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
    else:
        with torch.autograd.profiler.profile() as profile:
            outputs(model, ids, mask)
        assert any(event.name.startswith("fastbert::") for event in profile.function_events)
