"""ESM-2, whose embedding zeroes masked tokens and rescales the others of the sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from stock_families import (
    assert_gradients_close,
    assert_outputs_close,
    build,
    in_dtype,
    inputs,
    run,
    run_with_gradients,
)

import fastbert
from fastbert.testing.yardstick import each, run_sides

MASK = 0
LENGTHS = (9, 1, 7, 4)


def masked(ids: Tensor) -> Tensor:
    """Return ids of which some are the mask token, but none of the first two."""
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < 0.3
    hidden[..., :2] = False
    return ids.masked_fill(hidden, MASK)


def sides(**changes):
    stock = build("esm", **changes)
    return fastbert.accelerate(copy.deepcopy(stock)), in_dtype(stock, torch.float64), stock


@pytest.mark.parametrize("token_dropout", [True, False])
@pytest.mark.parametrize("padding", ["none", "right", "left", "middle"])
def test_masked_tokens(padding, token_dropout) -> None:
    given = inputs(padding, "esm")
    given["input_ids"] = masked(given["input_ids"])
    runs = run_sides(
        lambda side: run_with_gradients(side, given), *sides(token_dropout=token_dropout)
    )
    assert_outputs_close(*each(lambda pair: pair[0], *runs))
    assert_gradients_close(*each(lambda pair: pair[1], *runs))


def test_packed_sequences_have_their_own_share_of_masked_tokens() -> None:
    fast, *_ = sides()
    ids = masked(inputs("none", "esm", rows=1)["input_ids"])
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with torch.no_grad():
        packed = fast(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state[0]
        for part, alone in zip(packed.split(LENGTHS), ids[0].split(LENGTHS), strict=True):
            torch.testing.assert_close(part, fast(alone[None]).last_hidden_state[0])


def test_embeddings_are_the_input_of_the_layers() -> None:
    given = inputs("right", "esm")
    given["inputs_embeds"] = torch.randn(*given.pop("input_ids").shape, 144)
    mask = given["attention_mask"]

    def states(side):
        dtype = next(side.parameters()).dtype
        own = given | {"inputs_embeds": given["inputs_embeds"].to(dtype)}
        return run(side, own).existing(mask)

    with torch.no_grad():
        assert_outputs_close(*run_sides(states, *sides()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_frequencies_are_used(dtype) -> None:
    """``to`` rounds the frequencies in the state dict, as old checkpoints have them."""
    given = inputs("right", "esm")
    mask = given["attention_mask"]
    stock = build("esm")
    stock.rotary_embeddings.inv_freq.data = stock.rotary_embeddings.inv_freq.to(dtype).float()
    fast = fastbert.accelerate(copy.deepcopy(stock))
    double = in_dtype(stock, torch.float64)
    with torch.no_grad():
        assert_outputs_close(
            *run_sides(lambda side: run(side, given).existing(mask), fast, double, stock)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type: got 'absolute'"),
        ({"emb_layer_norm_before": True}, "emb_layer_norm_before: got True, allowed: False or"),
    ],
)
def test_other_architectures_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=f"accelerate: {message}"):
        fastbert.accelerate(build("esm", **changes))


def test_the_language_model_and_its_contacts() -> None:
    stock = build("esm", "ForMaskedLM")
    fast = fastbert.accelerate(copy.deepcopy(stock))
    given = inputs("right", "esm")
    given["input_ids"] = masked(given["input_ids"])
    real = given["attention_mask"].bool()
    with torch.no_grad():
        actual, expected = (side(**given).logits[real] for side in (fast, stock))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        full = inputs("none", "esm")
        contacts = [
            side.predict_contacts(full["input_ids"], full["attention_mask"])
            for side in (fast, stock)
        ]
        torch.testing.assert_close(*contacts, rtol=1e-3, atol=1e-4)
