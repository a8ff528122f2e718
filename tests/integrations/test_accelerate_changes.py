"""An accelerated model can be copied, saved, moved, resized and hooked like any module.

Every change is also made to the stock model, and the two models must still agree.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import LENGTHS, Sides, agree, batch, model, rows_computed, sides, values
from torch import nn
from torch.nn.utils import parametrize

import fastbert
from fastbert.integrations import bound_encoder
from fastbert.integrations.accelerate import _warn_once, bound_encoders, obstacles


@pytest.fixture
def pair() -> Sides:
    """Return a stock and an accelerated model; the latter has run, so its cached state exists."""
    made = sides(model("BertForSequenceClassification"))
    with torch.no_grad():
        made.fast(**batch())
    return made


@pytest.fixture(autouse=True)
def forgotten_warnings():
    _warn_once.cache_clear()


def plain(side: Any, pattern: str, given: dict[str, Any] | None = None) -> Any:
    """Return the output of ``side``, and check that stock code ran with only one warning."""
    given = batch() if given is None else given
    with rows_computed() as rows, torch.no_grad():
        with pytest.warns(UserWarning, match=pattern) as warned:
            out = side(**given)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            side(**given)
    assert rows == []
    return out


# Tests of copies and files


def through_torch_save(made: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(made: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(made))


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_accelerated_and_on_its_own(pair, how) -> None:
    again = COPIES[how](pair.fast)
    pair._replace(fast=again).check(batch())
    assert bound_encoders(again)["bert"].hf_model is again.bert
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    pair.check(batch())
    fastbert.restore(again)
    assert type(again.bert) is transformers.BertModel


def test_a_shallow_copy_has_an_encoder_of_its_own(pair) -> None:
    again = copy.copy(pair.fast.bert)
    with torch.no_grad():
        expected = pair.fast.bert(**batch()).last_hidden_state
        assert torch.equal(again(**batch()).last_hidden_state, expected)
    assert bound_encoders(again)[""] is not bound_encoders(pair.fast.bert)[""]


def test_a_checkpoint_is_the_stock_one(pair, tmp_path) -> None:
    for side, name in ((pair.fast, "fast"), (pair.stock, "stock")):
        side.save_pretrained(tmp_path / name)
    fast, stock = (load_file(tmp_path / n / "model.safetensors") for n in ("fast", "stock"))
    assert fast.keys() == stock.keys()
    assert all(torch.equal(fast[name], stock[name]) for name in stock)
    texts = [(tmp_path / n / "config.json").read_text(encoding="utf-8") for n in ("fast", "stock")]
    assert texts[0] == texts[1]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "fast")
    assert type(loaded.bert) is transformers.BertModel
    fastbert.accelerate(loaded)
    pair._replace(fast=loaded.eval()).check(batch())


def test_the_state_dict_keeps_its_names_order_and_tensors() -> None:
    made = model("BertForMaskedLM")
    before = made.state_dict()
    fastbert.accelerate(made)
    made(**batch())
    after = made.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert [name for name, _ in made.named_parameters()] == [
        name for name, _ in fastbert.restore(made).named_parameters()
    ]


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_are_loaded(pair, assign) -> None:
    state = {n: t + 0.1 * torch.randn_like(t) for n, t in pair.stock.state_dict().items()}
    pair.fast.load_state_dict(copy.deepcopy(state), assign=assign)
    pair.stock.load_state_dict(state)
    pair.oracle.load_state_dict(state)
    pair.check(batch())


def test_from_pretrained_of_an_accelerated_class(pair, tmp_path) -> None:
    """The class of an accelerated model loads checkpoints, as a trainer does after training."""
    pair.stock.bert.save_pretrained(tmp_path)
    loaded = type(pair.fast.bert).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = pair.stock.bert(**batch()).pooler_output
        torch.testing.assert_close(loaded(**batch()).pooler_output, expected)


# Tests of weights that change


def updated_in_place(side: nn.Module) -> None:
    with torch.no_grad():
        for parameter in side.parameters():
            parameter.mul_(1.1)


def updated_by_data(side: nn.Module) -> None:
    for parameter in side.parameters():
        parameter.data.mul_(1.1)


def replaced_data(side: nn.Module) -> None:
    for parameter in side.parameters():
        parameter.data = parameter.data * 1.1


def replaced_parameters(side: nn.Module) -> None:
    for module in list(side.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 1.1))


def one_element_of_a_key(side: nn.Module) -> None:
    with torch.no_grad():
        side.bert.encoder.layer[1].attention.self.key.weight[3, 5] += 5.0


def resized(side: nn.Module) -> None:
    side.resize_token_embeddings(120)
    with torch.no_grad():
        table = side.get_input_embeddings().weight
        table[97:] = torch.arange(23 * 48).view(23, 48) % 7


def replaced_embeddings(side: nn.Module) -> None:
    table = nn.Embedding(130, 48)
    nn.init.normal_(table.weight)
    side.set_input_embeddings(table.to(side.dtype))


def replaced_norm(side: nn.Module) -> None:
    norm = nn.LayerNorm(48, eps=1e-3)
    nn.init.normal_(norm.weight)
    side.bert.encoder.layer[0].output.LayerNorm = norm.to(side.dtype)


def another_epsilon(side: nn.Module) -> None:
    side.bert.embeddings.LayerNorm.eps = 0.1
    side.bert.encoder.layer[1].output.LayerNorm.eps = 0.3


def replaced_linear(side: nn.Module) -> None:
    linear = nn.Linear(80, 48)
    nn.init.normal_(linear.weight, std=0.1)
    side.bert.encoder.layer[0].output.dense = linear.to(side.dtype)


def truncated(side: nn.Module) -> None:
    side.bert.encoder.layer = side.bert.encoder.layer[:1]


def shortened_in_place(side: nn.Module) -> None:
    del side.bert.encoder.layer[1]


def lengthened(side: nn.Module) -> None:
    side.bert.encoder.layer.append(copy.deepcopy(side.bert.encoder.layer[0]))


def swapped(side: nn.Module) -> None:
    layers = side.bert.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


def without_a_bias(side: nn.Module) -> None:
    side.bert.encoder.layer[0].attention.self.query.bias = None


CHANGES = [
    updated_in_place,
    updated_by_data,
    replaced_data,
    replaced_parameters,
    one_element_of_a_key,
    resized,
    replaced_embeddings,
    replaced_norm,
    another_epsilon,
    replaced_linear,
    truncated,
    shortened_in_place,
    lengthened,
    swapped,
    without_a_bias,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(pair, change) -> None:
    before = pair.stock(**batch()).logits
    pair.each(change)
    given = batch()
    if change is resized:
        given["input_ids"] += 23 * (given["input_ids"] > 90)
    pair.check(given)
    assert not torch.equal(before, pair.stock(**given).logits)
    state = {name: t.clone() for name, t in pair.fast.state_dict().items()}
    fastbert.restore(pair.fast)
    assert all(torch.equal(t, state[name]) for name, t in pair.fast.state_dict().items())


def test_there_and_back_between_dtypes(pair) -> None:
    given = batch()
    with torch.no_grad():
        pair.fast.to(torch.float64)
        torch.testing.assert_close(pair.fast(**given).logits, pair.oracle(**given).logits)
        for dtype in (torch.bfloat16, torch.float16):
            made = model("BertForSequenceClassification").to(dtype)
            low = sides(made)
            low.fast(**given)
            low.check(given)
    pair.fast.half()
    pair.fast.float()
    pair.each(lambda side: side.load_state_dict(pair.stock.half().float().state_dict()))
    pair.check(given)


def test_one_part_in_another_dtype_is_refused(pair) -> None:
    pair.each(lambda side: side.bert.encoder.layer[1].intermediate.to(torch.bfloat16))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            pair.stock(**batch())
        with pytest.raises(ValueError, match=r"^w1: got torch\.bfloat16, allowed: torch\.float32"):
            pair.fast(**batch())


def test_weights_passed_in_for_one_call(pair) -> None:
    def call(side: Any) -> dict[str, torch.Tensor]:
        weights = {name: 1.1 * p for name, p in side.named_parameters()}
        out = torch.func.functional_call(side, weights, kwargs=batch())
        return {"logits": out.logits.detach()}

    agree(*pair.run(call))
    pair.check(batch())


def test_tied_weights_stay_tied() -> None:
    pair = sides(model("BertForMaskedLM"))
    for side in (pair.fast, copy.deepcopy(pair.fast), through_pickle(pair.fast)):
        table = side.bert.embeddings.word_embeddings
        assert side.cls.predictions.decoder.weight is table.weight
        side.resize_token_embeddings(110)
        assert side.cls.predictions.decoder.weight is side.get_input_embeddings().weight
        assert side(**batch()).logits.shape == (4, 19, 110)


# Dropout


def test_dropout_is_what_the_modules_say_now(pair) -> None:
    made, given = pair.fast.train(), batch()

    def repeats() -> bool:
        return torch.equal(made(**given).logits, made(**given).logits)

    assert repeats()
    for drop in (
        made.bert.embeddings.dropout,
        made.bert.encoder.layer[1].attention.self.dropout,
        made.bert.encoder.layer[0].attention.output.dropout,
        made.bert.encoder.layer[1].output.dropout,
    ):
        drop.p = 0.5
        assert not repeats()
        drop.eval()
        assert repeats()
        drop.train()
        drop.p = 0.0
    assert repeats()


def test_one_layer_in_eval_mode_does_not_drop() -> None:
    made = fastbert.accelerate(model(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5))
    made.train()
    made.embeddings.eval()
    made.encoder.layer[0].eval()
    with torch.no_grad():
        first, second = (made(**batch(), output_hidden_states=True).hidden_states for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])
    made.eval()
    state = torch.get_rng_state()
    made(**batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_draws_from_the_seed() -> None:
    made = fastbert.accelerate(model(hidden_dropout_prob=0.5)).train()
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(made(**batch()).last_hidden_state)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# Tests of hooks and other observers of module calls


# The model and its encoder get no full backward hook here, because such a hook needs outputs that
# are tensors.
HOOKED = [
    ("forward", ""),
    ("forward_pre", ""),
    ("forward", "encoder"),
    ("forward_pre", "encoder"),
] + [
    (kind, where)
    for kind in ("forward", "forward_pre", "full_backward")
    for where in ("encoder.layer.1", "encoder.layer.0.attention.self")
]


@pytest.mark.parametrize(("kind", "where"), HOOKED)
def test_a_hook_inside_is_served_by_the_plain_path(pair, kind, where) -> None:
    called = []
    part = pair.fast.bert.get_submodule(where)
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: called.append(1))
    if where == "":
        # The module that calls the encoder also calls the encoder's hooks.
        pair.check(batch())
    else:
        plain(
            pair.fast,
            f"BertModel runs its own code, padded: {where}.*_hooks: got .*, allowed: no hook",
        )
    if kind == "full_backward":
        pair.fast(**batch()).logits.sum().backward()
    assert called
    handle.remove()
    pair.check(batch())


@pytest.mark.parametrize(
    "where",
    [
        "encoder.layer.0.attention.self.query",
        "encoder.layer.1.attention.output.dense",
        "encoder.layer.0.intermediate.dense",
        "encoder.layer.1.output.dense",
    ],
)
def test_a_hook_on_a_linear_sees_the_batch_as_in_stock(pair, where) -> None:
    shapes: list[Any] = []

    def double(module, given, out):
        shapes.append(out.shape)
        return out * 2.0

    handles = [s.bert.get_submodule(where).register_forward_hook(double) for s in pair]
    with torch.no_grad():
        agree(*pair.run(lambda side: values(side, batch())))
    assert len(shapes) >= 3
    assert set(shapes) == {(len(LENGTHS), max(LENGTHS), shapes[0][-1])}
    for handle in handles:
        handle.remove()
    pair.check(batch())
    with torch.no_grad(), rows_computed() as rows:
        pair.fast(**batch())
    assert rows == [sum(LENGTHS)], "all layers are one call again"


def test_a_hook_on_a_norm_is_served_by_the_plain_path(pair) -> None:
    called = []
    norm = pair.fast.bert.encoder.layer[0].output.LayerNorm
    norm.register_forward_hook(lambda *given: called.append(1))
    out = plain(
        pair.fast, "encoder.layer.0.output.LayerNorm.forward_hooks: got .*, allowed: no hook"
    )
    assert called
    assert torch.equal(out.logits, pair.stock(**batch()).logits)


def test_a_hook_on_the_norm_of_the_embedding_is_called(pair) -> None:
    for side in pair:
        side.bert.embeddings.LayerNorm.register_forward_hook(lambda m, i, out: out * 2.0)
    pair.check(batch())


def test_a_hook_on_the_word_embeddings_is_called(pair) -> None:
    for side in pair:
        side.bert.embeddings.word_embeddings.register_forward_hook(lambda m, i, out: out * 2.0)
    pair.check(batch())


def test_input_gradients_are_required_where_asked(pair) -> None:
    """The embeddings require gradients on request, as PEFT needs for checkpointed frozen models."""
    seen = []
    for side in pair[::2]:
        side.requires_grad_(False)
        side.enable_input_require_grads()
        out = side.bert(**batch()).last_hidden_state
        seen.append(out.requires_grad)
        side.disable_input_require_grads()
        assert not side.bert(**batch()).last_hidden_state.requires_grad
    assert seen == [True, True]


def test_hooks_on_all_modules_are_served_by_the_plain_path(pair) -> None:
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(type(m)))
    try:
        plain(pair.fast, "there are hooks on all modules")
    finally:
        handle.remove()
    assert any("GELU" in kind.__name__ for kind in called)
    pair.check(batch())


def test_a_forward_of_its_own_is_served_by_the_plain_path(pair) -> None:
    layer = pair.fast.bert.encoder.layer[0]
    real, called = layer.forward, []
    layer.forward = lambda *a, **k: (called.append(1), real(*a, **k))[1]
    plain(pair.fast, "encoder.layer.0.forward: got .*, allowed: nothing")
    assert called
    del layer.forward
    pair.check(batch())


def test_another_activation_is_served_by_the_plain_path(pair) -> None:
    def change(side: nn.Module) -> None:
        side.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.SiLU()

    pair.each(change)
    out = plain(pair.fast, "intermediate_act_fn: got .*SiLU, allowed: GELUActivation")
    assert torch.equal(out.logits, pair.stock(**batch()).logits)


def test_a_layer_of_ones_own_is_served_by_the_plain_path(pair) -> None:
    class Skipped(nn.Module):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    pair.each(lambda side: side.bert.encoder.layer.__setitem__(0, Skipped()))
    out = plain(pair.fast, r"encoder\.layer\.0")
    assert torch.equal(out.logits, pair.stock(**batch()).logits)


class Tripled(nn.Module):
    def forward(self, weight):
        return 3.0 * weight


@pytest.mark.parametrize("where", ["attention.self.key", "intermediate.dense", "output.dense"])
def test_a_parametrized_linear_is_called(pair, where) -> None:
    def change(side: nn.Module) -> None:
        linear = side.bert.encoder.layer[1].get_submodule(where)
        parametrize.register_parametrization(linear, "weight", Tripled())

    pair.each(change)
    pair.check(batch())
    pair.fast(**batch()).logits.sum().backward()
    key = "parametrizations.weight.original"
    linear = pair.fast.bert.encoder.layer[1].get_submodule(where)
    assert linear.get_parameter(key).grad is not None


def test_a_written_buffer_is_compared_once_while_stock_code_runs(monkeypatch):
    """If stock code runs because of a hook, a write costs one comparison, not one for each call."""
    made, given = fastbert.accelerate(model()), batch()
    compared = []
    compare = bound_encoder.compare

    def counted(*arguments):
        compared.append(arguments)
        return compare(*arguments)

    monkeypatch.setattr(bound_encoder, "compare", counted)
    positions = made.embeddings.position_ids
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = made(**given).last_hidden_state
        hook = made.encoder.layer[0].register_forward_hook(lambda *_: None)
        made(**given)
        for value in (1, 0):
            compared.clear()
            positions[0, 0] = value
            for _ in range(3):
                made(**given)
            assert len(compared) == 1
            assert "hook" in str(obstacles(made)[""])
        hook.remove()
        assert torch.equal(made(**given).last_hidden_state, expected)
        assert obstacles(made) == {"": None}
