"""Calls of an accelerated model in ways that public bug reports describe.

Each call gives the stock model's result, or a warning or an error names the difference.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from quick_cases import long_case
from stock_families import ACCELERATED, build, inputs
from tiny_models import agree, batch, config, model, rows_computed, sides, values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastbert
from fastbert.integrations.accelerate import BOUND, _warn_once, bound_encoders
from fastbert.integrations.packing import restarts


@pytest.fixture(autouse=True)
def forgotten_warnings():
    _warn_once.cache_clear()


# Tests of positions without a mask

POSITIONS: dict[str, list[int]] = {
    "a gap": [0, 1, 2, 7, 8, 9],
    "a repeat": [0, 0, 1, 1, 2, 2],
    "constant": [3, 3, 3, 3, 3, 3],
    "backwards": [5, 4, 3, 2, 1, 0],
    "a gap after a return": [0, 1, 2, 0, 1, 7],
    "a return to another position": [0, 1, 2, 1, 2, 3],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_do_not_restart_are_only_positions(name) -> None:
    pair = sides(model("BertForSequenceClassification"))
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 10], [15, 16, 17, 18, 19, 20]]),
        "position_ids": torch.tensor([POSITIONS[name], list(range(6))]),
    }
    with torch.no_grad():
        fast, oracle, stock = ({"logits": side(**given).logits} for side in pair)
    assert fast["logits"].shape == (2, 2)
    agree(fast, oracle, stock)


@pytest.mark.parametrize("first", [0, 2])
def test_a_return_to_the_first_position_is_a_restart(first) -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]) + first
    starts = restarts(packed, 2, 6)[1]
    assert starts is not None
    assert starts.tolist() == [0, 3, 5, 6, 12]


# Tests of shapes that broadcast


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_type_ids", (19,)),
        ("token_type_ids", (4, 1)),
        ("token_type_ids", (1, 19)),
        ("position_ids", (1, 19)),
    ],
)
def test_an_index_broadcasts_as_in_stock(name, shape) -> None:
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(0, 2, shape, generator=generator)
    pair = sides(model())
    with torch.no_grad():
        agree(*pair.run(lambda side: values(side, batch(), **{name: index})))


@pytest.mark.parametrize("shape", [(1, 19), (19,)])
def test_a_mask_for_all_sequences(shape) -> None:
    mask = (torch.arange(19) < 13).long().view(shape)
    pair = sides(model())
    ids = batch()["input_ids"]
    full = {"input_ids": ids, "attention_mask": mask.expand(4, 19)}
    with torch.no_grad():
        stock = pair.stock(**full).last_hidden_state[:, :13]
        fast = pair.fast(input_ids=ids, attention_mask=mask).last_hidden_state[:, :13]
    torch.testing.assert_close(fast, stock)


# Keywords


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_unknown_keyword_reaches_the_stock_code(family) -> None:
    stock = build(family)
    stock.set_attn_implementation("sdpa")
    fast = fastbert.accelerate(copy.deepcopy(stock))
    ids = inputs("none", family)["input_ids"]
    with torch.no_grad(), pytest.warns(UserWarning, match="is_causal: got a bool, allowed: None"):
        out = fast(input_ids=ids, is_causal=True).last_hidden_state
    with torch.no_grad():
        assert torch.equal(out, stock(input_ids=ids, is_causal=True).last_hidden_state)
    with warnings.catch_warnings(), rows_computed() as rows, torch.no_grad():
        warnings.simplefilter("error")
        fast(input_ids=ids, is_causal=None, num_items_in_batch=3)
    assert rows


# Tests of copies, threads and memory


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_after_compile_computes_with_its_own_weights(how) -> None:
    made = fastbert.accelerate(model())
    made.compile()
    again = copy.deepcopy(made) if how == "deepcopy" else pickle.loads(pickle.dumps(made))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(0.5)
        half = again(**batch()).last_hidden_state
        stock = copy.deepcopy(fastbert.restore(again))(**batch()).last_hidden_state
        whole = model()(**batch()).last_hidden_state
    mask = batch()["attention_mask"].bool()
    torch.testing.assert_close(half[mask], stock[mask])
    assert not torch.allclose(half[mask], whole[mask], atol=1e-2)


def test_two_threads_accelerate_one_model_once() -> None:
    for _ in range(3):
        made = model()
        kind = type(made)
        start = threading.Barrier(4)

        def run(made: Any = made, start: Any = start) -> None:
            start.wait()
            fastbert.accelerate(made)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fastbert.restore(made)
        assert type(made) is kind


# A hook of stock ESM refers to its model, so that only the garbage collector can free it.
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("bert", "modernbert") else long_case(name)
        for name in ACCELERATED
        if name != "esm"
    ],
)
def test_a_model_is_freed_with_its_last_reference(family) -> None:
    made = fastbert.accelerate(build(family))
    with torch.no_grad():
        made(**inputs("right", family))
    made.train()(**inputs("right", family))
    seen = weakref.ref(next(made.parameters())), weakref.ref(made)
    # The constructors of transformers leave reference cycles that contain the model.
    gc.collect()
    gc.disable()
    try:
        del made
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()


# Tests of an encoder with a ``forward`` of its own


def wrap(side: nn.Module) -> None:
    """Set ``forward`` on a module instance, as the library accelerate does for its hooks."""
    inner = side.forward
    side.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[method-assign]


def test_an_encoder_with_a_forward_of_its_own_is_refused() -> None:
    made = model("BertForMaskedLM")
    wrap(made.bert)
    with pytest.raises(ValueError, match=r"^accelerate: BertModel has a forward of its own"):
        fastbert.accelerate(made)
    assert BOUND not in made.bert.__dict__


def test_restore_reaches_the_code_inside_a_wrapper() -> None:
    made = fastbert.accelerate(model())
    wrap(made)
    with torch.no_grad(), rows_computed() as rows:
        made(**batch())
        assert rows
        rows.clear()
        fastbert.restore(made)
        out = made(**batch()).last_hidden_state
        assert rows == []
        assert torch.equal(out, model()(**batch()).last_hidden_state)
    assert bound_encoders(made) == {}


# Tests that a warning or an error names an unsupported call


def test_a_layer_norm_without_weight_runs_stock_code() -> None:
    stock = model()
    stock.encoder.layer[0].output.LayerNorm.weight = None
    fast = fastbert.accelerate(model())
    fast.encoder.layer[0].output.LayerNorm.weight = None
    with torch.no_grad(), pytest.warns(UserWarning, match=r"LayerNorm.weight: got None"):
        out = fast(**batch()).last_hidden_state
    assert torch.equal(out, stock(**batch()).last_hidden_state)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_penalty_names_the_way_out(frozen) -> None:
    made = model(attn_implementation="eager").train().requires_grad_(not frozen)
    fastbert.accelerate(made)
    embeds = torch.randn(2, 5, 48, requires_grad=True)

    def penalty(side: nn.Module) -> Tensor:
        out = side(inputs_embeds=embeds).last_hidden_state
        (slope,) = torch.autograd.grad(out.square().sum(), embeds, create_graph=True)
        return slope.square().sum()

    with pytest.raises(RuntimeError, match=r"has no derivative: .* call fastbert\.restore"):
        penalty(made).backward()
    penalty(fastbert.restore(made)).backward()
    assert embeds.grad is not None


def test_fake_tensors_with_a_mask() -> None:
    made = fastbert.accelerate(model())
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {name: torch.ones(2, 5, dtype=torch.int64) for name in batch()}
        assert made(**given).last_hidden_state.shape == (2, 5, 48)


def test_a_family_counts_positions_with_the_mask_of_stock() -> None:
    settings = config("Roberta", pad_token_id=1)
    pair = sides(model("RobertaModel", settings))
    ids = batch()["input_ids"].clamp(min=1)
    with torch.no_grad():
        fast, oracle, stock = (
            {"rows": side(input_ids=ids).last_hidden_state[ids != 1]} for side in pair
        )
    agree(fast, oracle, stock)
