"""Outputs, losses and gradients of the encoder–decoder agree with transformers in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from marian_pair import (
    PAD,
    WEIGHTS,
    assert_agree,
    batch,
    in_float64,
    joined,
    ours,
    results,
    stock,
    tokens,
)

from fastbert.modules.linear import Linear
from fastbert.testing.yardstick import Yardstick

DTYPES = [torch.float32, torch.bfloat16]


def draws(rows, padding):
    """Return several batches, because a single rounding error in a loss scales all gradients."""
    return [batch(rows, padding, seed) for seed in range(12 if rows == 1 else 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("rows", [1, 16])
def test_outputs_and_every_gradient(rows, padding, dtype, tmp_path):
    model, inputs = stock().to(dtype), draws(rows, padding)
    actual = results(ours(model, tmp_path), inputs)
    oracle = results(in_float64(model), inputs)
    assert_agree(actual, oracle, Yardstick(lambda: results(model, inputs)))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_settings_of_the_model(activation, smoothing, tmp_path):
    """Separate vocabularies, no factor of the embeddings, and label smoothing."""
    model = stock(
        activation_function=activation,
        scale_embedding=False,
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=131,
        tie_word_embeddings=smoothing == 0.0,
    )
    inputs = draws(5, "right")
    actual = results(ours(model, tmp_path, label_smoothing=smoothing), inputs)
    oracle = results(in_float64(model), inputs, smoothing)
    assert_agree(actual, oracle, Yardstick(lambda: results(model, inputs, smoothing)))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_is_where_marian_has_it(name, tmp_path):
    """With the probability 1, dropout is exact, and a missing one changes every output."""
    models = [stock(seed, **{name: 1.0}).train() for seed in range(5)]
    built = [_with_logits(ours(model, tmp_path).train()) for model in models]
    inputs = draws(3, "right")[:1]

    def run(sides):
        results_of = joined([results(side, inputs) for side in sides])
        # transformers returns the weights after dropout, and fastbert the weights before it.
        weights = WEIGHTS if name == "attention_dropout" else ()
        return {key: tensor for key, tensor in results_of.items() if key not in weights}

    oracle = run([in_float64(model) for model in models])
    assert_agree(run(built), oracle, Yardstick(lambda: run(models)))


def _with_logits(model):
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs, output_logits=True)
    return model


def test_dropout_in_training(tmp_path):
    model = ours(stock(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1), tmp_path)
    inputs, losses = batch(4, "right", 0), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model.train()(**inputs).loss)
    assert losses[0] == losses[1] != losses[2]
    assert model(**inputs).logits is None
    assert model.eval()(**inputs).loss == model(**inputs).loss


@pytest.mark.parametrize("pre_norm", [False, True])
def test_checkpointing_keeps_every_gradient(pre_norm, tmp_path):
    model = ours(stock(dropout=0.3, attention_dropout=0.2), tmp_path).train()
    if pre_norm:
        config = model.config.replace(normalize_before=True)
        model = type(model)(config).train()
    inputs, sides = batch(4, "right", 0), []
    for enable in (False, True):
        (model.gradient_checkpointing_enable if enable else model.gradient_checkpointing_disable)()
        assert model.decoder.gradient_checkpointing == enable
        model.zero_grad()
        torch.manual_seed(3)
        model(**inputs).loss.backward()
        sides.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(sides[0]) > 60
    assert all(torch.equal(one, other) for one, other in zip(*sides, strict=True))


def test_outputs_are_zero_at_padding(tmp_path):
    model, inputs = ours(stock(), tmp_path), batch(5, "right", 0)
    source, target = tokens(inputs)
    out = model(**inputs, output_hidden_states=True, output_attentions=True)
    for name in ("logits", "decoder_hidden_states", "encoder_hidden_states"):
        for state in out[name] if isinstance(out[name], tuple) else (out[name],):
            assert not state[~(source if "encoder" in name else target)].any()
    for weights in out.cross_attentions:
        assert not weights.transpose(1, 2)[~target].any()
        assert not weights.permute(0, 3, 1, 2)[~source].any()


def test_gradients_flow_through_the_returned_states_and_weights(tmp_path):
    model, inputs = ours(stock(), tmp_path), batch(3, "right", 0)
    expected = stock()
    slopes = []
    for side in (model, expected):
        out = side(**inputs, output_hidden_states=True, output_attentions=True)
        asked = [*out.decoder_hidden_states, *out.cross_attentions, *out.decoder_attentions]
        slopes.append(torch.autograd.grad(out.loss, asked))
    _, target = tokens(inputs)
    for one, other in zip(*slopes, strict=True):
        if one.dim() == 4:
            one, other = one.transpose(1, 2), other.transpose(1, 2)
        assert one[target].any()
        if one.dim() == 3:
            torch.testing.assert_close(one[target], other[target])


def test_a_source_is_encoded_once(tmp_path):
    model, inputs = ours(stock(), tmp_path), batch(3, "right", 0)
    whole = model(**inputs, output_hidden_states=True)
    source = model.encode(inputs["input_ids"], inputs["attention_mask"])
    again = model(labels=inputs["labels"], source=source)
    assert torch.equal(whole.logits, again.logits)
    assert torch.equal(whole.encoder_last_hidden_state, again.encoder_last_hidden_state)
    assert model(**inputs, return_dict=False)[0] == whole.loss


def test_a_replaced_projection_is_called(tmp_path):
    model, inputs = ours(stock(), tmp_path, label_smoothing=0.1), batch(3, "right", 0)
    expected = model(**inputs)

    class Doubled(Linear):
        def forward(self, x, return_residual=False):
            return 2.0 * super().forward(x)

    doubled = Doubled(48, 101, bias=False)
    doubled.weight.data = model.head.decoder.weight.data / 2.0
    model.head.decoder = doubled
    got = model(**inputs)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "decoder_input_ids, labels: got neither"),
        ({"labels": torch.tensor([[101]])}, r"labels: got 101, allowed: 0 <= labels < 101"),
        ({"labels": torch.tensor([[0.5]])}, "labels: got torch.float32"),
        ({"labels": torch.tensor([1, 2])}, r"labels: got shape \(2,\), allowed: \(B, L\)"),
        ({"labels": torch.ones(2, 3, dtype=torch.long)}, "got 2 targets, allowed: 1"),
        ({"labels": torch.ones(1, 41, dtype=torch.long)}, "decoder_input_ids: got a length of 41"),
        ({"decoder_input_ids": torch.tensor([[7, 7]])}, r"labels: got shape \(1, 3\)"),
        (
            {"decoder_input_ids": torch.tensor([[7, 7, 101]])},
            "decoder_input_ids: got 101, allowed: 0 <= input_ids < 101",
        ),
        ({"input_ids": None}, "input_ids, inputs_embeds: got neither"),
        ({"input_ids": torch.tensor([[-1]])}, "input_ids: got -1"),
        ({"attention_mask": torch.ones(1, 2, 2)}, r"attention_mask: got shape \(1, 2, 2\)"),
        ({"decoder_attention_mask": torch.ones(1, 3, 3)}, "decoder_attention_mask: got shape"),
    ],
)
def test_wrong_arguments(changes, message, tmp_path):
    model = ours(stock(), tmp_path)
    inputs = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6, PAD]])}
    with pytest.raises((ValueError, TypeError), match=message):
        model(**(inputs | changes))
