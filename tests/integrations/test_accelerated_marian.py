"""A Marian model with an accelerated encoder agrees with the stock model in float64.

The decoder runs stock code. ``test_accelerated_families.py`` tests the encoder alone.
"""

from __future__ import annotations

import copy
import warnings
from operator import itemgetter
from typing import Any

import pytest
import torch
import transformers
from encoder_decoder_cases import assert_all_close, inputs, parts_of, sides_of, step
from stock_families import PADDINGS, assert_gradients_close, build, gradients, in_dtype
from stock_families import inputs as sources
from tiny_models import rows_computed
from torch import nn
from torch.nn.utils import prune
from transformers.models.marian import modeling_marian

import fastbert
from fastbert.integrations.accelerate import _warn_once, bound_encoders, obstacles
from fastbert.testing.yardstick import each, run_sides

pytestmark = pytest.mark.each_value

ENCODER = "model.encoder"


@pytest.fixture(autouse=True)
def every_warning():
    _warn_once.cache_clear()


def marian(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = build("marian", "MTModel", **changes)
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(4))
    return in_dtype(model, dtype)


# Outputs, losses and gradients


@pytest.mark.filterwarnings("error:.*runs its own code")
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("padding", PADDINGS)
def test_outputs_loss_and_gradients(padding, rows, dtype, everything) -> None:
    batch = inputs(padding, rows)
    sides = [side.train() for side in sides_of(marian(dtype))]
    runs = run_sides(lambda side: step(side, batch, everything), *sides)
    assert_all_close(each(itemgetter(0), *runs), dtype)
    assert_gradients_close(*each(itemgetter(1), *runs))


@pytest.mark.filterwarnings("error:.*runs its own code")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", PADDINGS)
def test_inference_computes_no_padding(padding, dtype) -> None:
    batch, sides = inputs(padding), sides_of(marian(dtype))
    with torch.no_grad():
        with rows_computed() as rows:
            sides[0](**batch)
        assert set(rows) == {int(batch["attention_mask"].sum())}
        assert_all_close(run_sides(lambda side: parts_of(side, batch), *sides))


@pytest.mark.filterwarnings("error:.*runs its own code")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("beams", [1, 4, 8])
def test_generated_tokens_are_equal(beams, padding, attention) -> None:
    model = marian()
    model.set_attn_implementation(attention)
    fast = fastbert.accelerate(copy.deepcopy(model))
    batch = sources(padding, "marian", 8)
    options = {"num_beams": beams, "max_length": 30, "early_stopping": beams == 4}
    tokens = [side.generate(**batch, **options) for side in (fast, model)]
    assert torch.equal(*tokens)
    assert len({tuple(row) for row in tokens[0].tolist()}) > 1


def test_training_with_dropout_and_checkpointing() -> None:
    model = marian(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1).train()
    fast, batch = fastbert.accelerate(model), inputs("right")
    assert not torch.equal(fast(**batch).loss, fast(**batch).loss)
    losses, slopes = [], []
    for checkpointing in (False, True):
        if checkpointing:
            fast.gradient_checkpointing_enable()
            fast.enable_input_require_grads()
        fast.zero_grad()
        torch.manual_seed(3)
        loss = fast(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        slopes.append(gradients(fast))
    assert torch.equal(*losses)
    assert obstacles(fast) == {ENCODER: None}
    assert slopes[0].keys() == slopes[1].keys()
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slopes[1][name], slope, atol=1e-5, rtol=1e-4)


def test_positions_get_no_gradient() -> None:
    fast = fastbert.accelerate(marian().requires_grad_(True))
    fast(**inputs("right")).loss.backward()
    assert fast.model.encoder.embed_positions.weight.grad is None


# Files, and the way back


def test_restore_and_reopen(tmp_path) -> None:
    model, batch = marian(), inputs("middle")
    kinds, before = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    with torch.no_grad():
        stock = model(**batch).logits
        assert fastbert.accelerate(model) is model
        assert list(bound_encoders(model)) == [ENCODER]
        fast = model(**batch).logits
        model.save_pretrained(tmp_path)
        again = transformers.MarianMTModel.from_pretrained(tmp_path, attn_implementation="eager")
        reopened = fastbert.accelerate(copy.deepcopy(again))
        copied = copy.deepcopy(model)
        assert torch.equal(reopened(**batch).logits, fast)
        assert torch.equal(copied(**batch).logits, fast)
        assert list(model.state_dict()) == list(before)
        assert fastbert.restore(model) is model
        for side in (model, again):
            assert torch.equal(side(**batch).logits, stock)
            assert all(torch.equal(side.state_dict()[name], t) for name, t in before.items())
    assert [type(m) for m in model.modules()] == kinds
    assert not bound_encoders(model)


def test_other_models_around_the_encoder() -> None:
    whole = build("marian")
    batch = sources("right", "marian")
    encoder = fastbert.accelerate(copy.deepcopy(whole))
    assert list(bound_encoders(encoder)) == [""]
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        pair = [side(**batch).last_hidden_state[real] for side in (encoder, whole)]
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
        first, *others = encoder(**batch, return_dict=False)
        assert torch.equal(first[real], pair[0])
        assert not others
    both = fastbert.accelerate(transformers.MarianModel(whole.config))
    assert list(bound_encoders(both)) == ["encoder"]


def test_a_resized_vocabulary_is_followed() -> None:
    sides = sides_of(marian())
    for side in sides:
        torch.manual_seed(1)
        side.resize_token_embeddings(110)
    batch = inputs("right")
    batch["input_ids"][0, :3] = torch.tensor([109, 100, 97])
    with torch.no_grad():
        assert_all_close(run_sides(lambda side: parts_of(side, batch), *sides))
    assert obstacles(sides[0]) == {ENCODER: None}


# Deviations


def layer(model: Any) -> Any:
    return model.model.encoder.layers[1]


def hook(*given: Any) -> None:
    pass


DEVIATIONS: dict[str, tuple[Any, str]] = {
    "activation": (
        lambda m: setattr(layer(m), "activation_fn", nn.ReLU()),
        r"layers\.1\.activation_fn: got a torch.nn.modules.activation.ReLU",
    ),
    "scaling": (
        lambda m: setattr(layer(m).self_attn, "scaling", 1.0),
        r"layers\.1\.self_attn\.scaling: got 1.0",
    ),
    "factor": (
        lambda m: setattr(m.model.encoder, "embed_scale", 2.0),
        r"embed_scale: got 2.0, allowed: 12.0",
    ),
    "layer skipping": (
        lambda m: setattr(m.model.encoder, "layerdrop", 0.5),
        r"layerdrop: got 0.5, allowed: 0.0",
    ),
    "norm": (
        lambda m: setattr(layer(m), "final_layer_norm", nn.RMSNorm(144)),
        r"layers\.1\.final_layer_norm: got a torch.nn.modules.normalization.RMSNorm",
    ),
    "hook of a layer": (
        lambda m: layer(m).register_forward_hook(hook),
        r"layers\.1\.forward_hooks: got hook",
    ),
    "causal": (
        lambda m: setattr(layer(m).self_attn, "is_causal", True),
        r"layers\.1\.self_attn\.is_causal: got True",
    ),
}


def runs_stock_code(model: Any, words: str) -> None:
    """Check that one warning has `words`, and that the model then computes as the stock model."""
    batch = inputs("right")
    with rows_computed() as rows, torch.no_grad():
        with pytest.warns(UserWarning, match=words) as warned:
            out = model(**batch)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**batch)
        assert rows == []
        expected = fastbert.restore(model)(**batch)
    assert torch.equal(out.logits, expected.logits)


@pytest.mark.parametrize("case", DEVIATIONS)
def test_a_changed_encoder_runs_stock_code(case) -> None:
    change, words = DEVIATIONS[case]
    model = fastbert.accelerate(marian())
    change(model)
    runs_stock_code(model, words)


@pytest.mark.parametrize("name", ["eager_attention_forward", "create_bidirectional_mask"])
def test_a_patched_function_runs_stock_code(name, monkeypatch) -> None:
    model, real = fastbert.accelerate(marian()), getattr(modeling_marian, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    monkeypatch.setattr(modeling_marian, name, patched)
    runs_stock_code(model, name)


def test_a_changed_decoder_does_not_matter_to_the_encoder() -> None:
    model = fastbert.accelerate(marian())
    model.model.decoder.layers[0].register_forward_hook(hook)
    model.model.decoder.layers[1].activation_fn = nn.ReLU()
    assert obstacles(model) == {ENCODER: None}


CALLED: dict[str, Any] = {
    "pruned": lambda m: prune.random_unstructured(layer(m).fc1, "weight", amount=0.4),
    "hook of a linear layer": lambda m: layer(m).self_attn.q_proj.register_forward_hook(
        lambda module, given, out: 0.5 * out if out.dim() == 3 else None
    ),
    "hook of the words": lambda m: m.model.encoder.embed_tokens.register_forward_hook(
        lambda module, given, out: 0.5 * out if out.dim() == 3 else None
    ),
    "hook of the positions": lambda m: m.model.encoder.embed_positions.register_forward_hook(
        lambda module, given, out: -out
    ),
}


@pytest.mark.filterwarnings("error:.*runs its own code")
@pytest.mark.parametrize("case", CALLED)
def test_a_changed_leaf_is_called(case) -> None:
    batch, sides = inputs("right"), sides_of(marian())
    plain = sides[2](**batch).logits
    for side in sides:
        torch.manual_seed(5)
        CALLED[case](side)
    (bound,) = bound_encoders(sides[0]).values()
    with torch.no_grad():
        assert not torch.equal(sides[2](**batch).logits, plain)
        assert_all_close(run_sides(lambda side: parts_of(side, batch), *sides))
    assert bound.called


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'fastbert[test]'")
    made = fastbert.accelerate(marian())
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "fc1"], task_type="SEQ_2_SEQ_LM", lora_dropout=0.0
    )
    fast = peft.get_peft_model(made, settings).train()
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    stock = fastbert.restore(copy.deepcopy(fast))
    oracle, batch = in_dtype(stock, torch.float64), inputs("right", 8)
    assert list(obstacles(fast).values()) == [None]
    runs = run_sides(lambda side: step(side, batch, False), fast, oracle, stock)
    assert_all_close(each(itemgetter(0), *runs))
    assert_gradients_close(*each(itemgetter(1), *runs))


# Refusals


def test_refusals_have_names(tmp_path) -> None:
    model = marian()
    with pytest.raises(ValueError, match=r"encoder_layerdrop: got 0\.1, allowed: 0\.0"):
        fastbert.accelerate(marian(encoder_layerdrop=0.1))
    alone = build("marian", "ForCausalLM")
    with pytest.raises(ValueError, match=r"got MarianForCausalLM .*, allowed: an encoder"):
        fastbert.accelerate(alone)
    fast, batch = fastbert.accelerate(model), inputs("none")
    ends = torch.tensor([0, 63], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got a value, allowed: None, because"):
        fast(**batch, cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match=r"quantize: encoder 'model\.encoder': got 'marian'"):
        fastbert.quantize(fast)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type: got 'marian', allowed: bert, roberta"):
        fastbert.BertModel.from_pretrained(tmp_path)


def test_verify_compares_the_whole_model() -> None:
    small = marian(encoder_layers=1, decoder_layers=1, max_position_embeddings=20)
    report = fastbert.verify(small, dtypes=["float32"])
    assert report.passed, str(report)
    names = {row.field for row in report.rows}
    assert {"logits", "loss", "cross_attentions", "decoder_hidden_states"} <= names
