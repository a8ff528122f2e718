"""T5 with an accelerated encoder agrees with the stock model in float64; its decoder is left alone.

``test_accelerated_families.py`` tests the encoder alone.
"""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import Any

import pytest
import torch
import transformers
from encoder_decoder_cases import assert_all_close, inputs, sides_of, step
from stock_families import PADDINGS, assert_gradients_close, build, in_dtype, run
from stock_families import inputs as sources
from transformers.models.t5.modeling_t5 import T5Stack

import fastbert
from fastbert.integrations.accelerate import _warn_once, bound_encoders
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import each, run_sides

pytestmark = [
    pytest.mark.filterwarnings("error:.*runs its own code"),
    pytest.mark.each_value,
]
# The feed-forward of T5 1.0 is not gated. The heads of t5-small are as wide as its rows.
KINDS: dict[str, dict[str, Any]] = {
    "gated": {},
    "relu": {"feed_forward_proj": "relu"},
    "square": {"feed_forward_proj": "relu", "d_kv": 48},
}


@pytest.fixture(autouse=True)
def every_warning():
    _warn_once.cache_clear()


def t5(head: str = "ForConditionalGeneration", **changes: Any) -> Any:
    return build("t5", head, decoder_start_token_id=0, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_loss_and_gradients(kind, padding, dtype) -> None:
    batch = inputs(padding, 5, "t5")
    sides = [side.train() for side in sides_of(in_dtype(t5(**KINDS[kind]), dtype))]
    runs = run_sides(lambda side: step(side, batch, True), *sides)
    assert_all_close(each(itemgetter(0), *runs), dtype)

    def gradients(run: Any) -> Any:
        # The decoder adds the gradients of its bias in bf16, pair after pair.
        left_out = "decoder" if dtype == torch.bfloat16 else "nothing"
        return {name: g for name, g in run[1].items() if not name.startswith(left_out)}

    assert_gradients_close(*each(gradients, *runs))


def test_only_the_encoder_is_accelerated() -> None:
    model = fastbert.accelerate(t5())
    assert list(bound_encoders(model)) == ["encoder"]
    assert type(model.decoder) is T5Stack
    assert type(model.encoder).__name__ == "T5Stack"
    fastbert.restore(model)
    assert type(model.encoder) is T5Stack
    with pytest.raises(ValueError, match="got T5Stack"):
        fastbert.accelerate(model.decoder)


def test_generation_finds_the_same_tokens() -> None:
    model, batch = t5(), sources("right", "t5")
    options = {"max_new_tokens": 12, "num_beams": 2, "do_sample": False}
    expected = model.generate(**batch, **options)
    assert torch.equal(fastbert.accelerate(model).generate(**batch, **options), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_model_runs_in_one_call_is_saved_and_restored(kind, tmp_path) -> None:
    """``T5EncoderModel`` keeps its class, which GLiNER reads."""
    stock, batch = t5("EncoderModel", **KINDS[kind]).eval(), sources("left", "t5")
    real = batch["attention_mask"].bool()
    model = fastbert.accelerate(copy.deepcopy(stock))
    assert type(model) is transformers.T5EncoderModel
    bound = bound_encoders(model)["encoder"]
    assert bound.model.backends()["encoder"] == ("cpu", "all layers in one call")
    with torch.no_grad():
        actual = model(**batch).last_hidden_state[real]
        model.save_pretrained(tmp_path)
        reopened = transformers.T5EncoderModel.from_pretrained(tmp_path)
        oracle = run(in_dtype(stock, torch.float64), batch).states[-1][real]
        for name, state in {
            "accelerated": actual,
            "reopened": reopened(**batch).last_hidden_state[real],
            "restored": fastbert.restore(model)(**batch).last_hidden_state[real],
        }.items():
            assert_close(name, state, oracle, stock(**batch).last_hidden_state[real])
