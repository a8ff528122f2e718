"""The four experiments on attention as an explanation give known results on a tiny model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from fastbert.analysis import (
    FitOptions,
    Starts,
    adversarial_attention,
    frozen_weights,
    make_uniform,
    seed_variance,
    uniform_weights,
)
from fastbert.analysis import fitting as f
from fastbert.analysis.attention_tests import Texts, _guided, adversarial_loss
from fastbert.analysis.token_classifier import TokenClassifier, inside, on_tokens
from fastbert.modules import BertForSequenceClassification

WORDS = ("the dog ran to the", "anna saw a bird in the", "tom went home with a", "she likes the")
OPTIONS = FitOptions(epochs=6, batch_size=8, learning_rate=3e-3)
LONGER = FitOptions(epochs=30, batch_size=8, learning_rate=3e-3)


@pytest.fixture(scope="module")
def texts(folder) -> Texts:
    """Return texts whose last word decides the label."""

    def part(count: int):
        rows = [(f"{WORDS[i // 2 % 4]} {('dog', 'bird')[i % 2]}", i % 2) for i in range(count)]
        return f.encode(folder, *zip(*rows, strict=True), max_length=24)

    return Texts(part(32), part(8))


@pytest.fixture(scope="module")
def start(folder) -> Starts:
    return Starts(folder, 2)


@pytest.fixture(scope="module")
def base(texts, start):
    model = start(0)
    losses = f.fit(model, texts.train, LONGER, seed=0, name="base")
    assert losses[-1] < 0.3 * losses[0]
    assert f.observe(model, texts.test).accuracy(texts.test.labels) == 1.0
    return model


def expected_uniform(mask: torch.Tensor) -> torch.Tensor:
    """Return ``(N, L)`` weights: 1 / (number of tokens) at each token, and 0 at padding."""
    return mask / mask.sum(1, keepdim=True)


@pytest.mark.parametrize("layers", [[-1], [0, 1]])
def test_uniform_weights_are_exactly_uniform_also_after_training(texts, start, layers):
    model = start(0)
    untouched = copy.deepcopy(model)
    make_uniform(model, layers)
    f.fit(model, texts.train, OPTIONS, seed=0, name="uniform")
    mask = texts.test.mask
    assert int(mask.min()) == 0  # Some texts have padding.
    with torch.no_grad():
        weights = model(texts.test.ids, mask, output_attentions=True).attentions
    wanted = expected_uniform(mask)[:, None, None, :] * mask[:, None, :, None]
    chosen = {layer % 2 for layer in layers}
    for layer, layer_weights in enumerate(weights):
        if layer in chosen:
            assert torch.equal(layer_weights, wanted.expand_as(layer_weights))
        else:
            assert not torch.allclose(layer_weights, wanted.expand_as(layer_weights), atol=0.01)
    # In the chosen layers, training changed the values and left the query projection at 0.
    for layer in chosen:
        now, before = (m.bert.encoder.layer[layer].attention.self.qkv for m in (model, untouched))
        assert now.weight[:32].abs().max() == 0
        assert now.bias[:32].abs().max() == 0
        assert not torch.equal(now.weight[64:], before.weight[64:])


def test_uniform_weights_refuse_a_layer_that_does_not_exist(start):
    with pytest.raises(ValueError, match="layers: got 2, allowed: numbers from -2 to 1"):
        make_uniform(start(0), [2])


def test_uniform_weights_compare_four_models(texts, base, start):
    before = copy.deepcopy(base.state_dict())
    result = uniform_weights(base, start, texts, FitOptions(epochs=1))
    assert [row.name for row in result] == [
        f"uniform {where}, {how}"
        for where in ("last layer", "all layers")
        for how in ("inference only", "trained")
    ]
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())
    last, everywhere = result[0], result[2]
    assert 0 < last.jsd_every < everywhere.jsd_every
    seen = f.observe(base, texts.test)
    uniform = expected_uniform(texts.test.mask)
    by_hand = f.divergence(seen.read, uniform, texts.test.mask).mean()
    assert math.isclose(last.jsd_read, float(by_hand), rel_tol=1e-4)


def test_other_seeds_give_other_models_and_the_same_seed_gives_the_same(texts, base, start):
    same, other = seed_variance(base, start, texts, LONGER, seeds=[0, 1])
    assert (same.tvd, same.jsd_read, same.jsd_every) == (0.0, 0.0, 0.0)
    assert other.jsd_read > 1e-4
    assert other.tvd > 0


def test_an_adversary_keeps_the_predictions_and_changes_the_weights(texts, base):
    """Training reduces the loss, and a larger strength changes the attention weights more."""
    seen = f.observe(base, texts.train)
    for scope in ("read", "every"):
        model = copy.deepcopy(base)
        loss = adversarial_loss(seen, scope, 1.0)
        losses = f.fit(model, texts.train, OPTIONS, seed=1, name="adversary", loss=loss)
        assert losses[-1] < losses[0] - 0.05
    adversaries, strongest = adversarial_attention(
        base, lambda _: copy.deepcopy(base), texts, OPTIONS, strengths=[1.0, 0.0], scopes=["read"]
    )
    assert [(a.scope, a.strength) for a in adversaries] == [("read", 0.0), ("read", 1.0)]
    plain, strong = (a.distance for a in adversaries)
    assert strong.jsd_read > plain.jsd_read + 0.05
    assert strong.tvd < 0.1
    assert strong.accuracy == 1.0
    now = f.observe(strongest["read"], texts.test)
    assert f.distance("again", now, f.observe(base, texts.test), texts.test).tvd == strong.tvd


def test_the_adversarial_loss_is_tvd_minus_lambda_jsd(texts, base, start):
    seen = f.observe(base, texts.train)
    other = start(5).eval()
    rows = torch.tensor([3, 9])
    batch = texts.train.at(rows)
    away = f.observe(other, batch)
    tvd = 0.5 * (away.probabilities - seen.probabilities[rows]).abs().sum(-1)
    for scope in ("read", "every"):
        jsd = f.divergence(getattr(away, scope), getattr(seen, scope)[rows], batch.mask)
        expected = (tvd - 0.7 * jsd).mean()
        with torch.no_grad():
            loss = adversarial_loss(seen, scope, 0.7)(other, batch, rows)
        assert_close(loss, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scopes": ["first"]}, "scopes: got 'first', allowed: read, every"),
        ({"strengths": [-1.0]}, "strengths: got -1.0, allowed: at least 0"),
    ],
)
def test_adversaries_refuse_bad_arguments(texts, base, start, options, message):
    with pytest.raises(ValueError, match=message):
        adversarial_attention(base, start, texts, OPTIONS, **{"strengths": [1.0], **options})


def test_the_divergence_of_all_layers_leaves_padding_out():
    torch.manual_seed(0)
    a, b = (torch.randn(1, 2, 3, 3).softmax(-1) for _ in range(2))
    mask = torch.ones(1, 3, dtype=torch.int64)
    short = f.divergence(a, b, mask)
    grow = (0, 2, 0, 2)
    padded = [torch.nn.functional.pad(x, grow) for x in (a, b)]
    assert_close(f.divergence(*padded, torch.nn.functional.pad(mask, (0, 2))), short)


def test_frozen_weights_tell_which_tokens_matter(texts, base):
    """A model with fixed attention on the deciding word beats a model with uniform attention."""

    class OnTheLabel(torch.nn.Module):
        """A model whose attention is on the last word of a text."""

        def __init__(self):
            super().__init__()
            self.model = base

        def forward(self, ids, mask, **options):
            output = self.model(ids, mask, **options)
            last = torch.nn.functional.one_hot(mask.sum(1) - 2, ids.shape[1]).float()
            weights = last[:, None, None].expand_as(output.attentions[0])
            output.attentions = (weights, weights)
            return output

    few = FitOptions(epochs=3, batch_size=8, learning_rate=2e-3)
    result = frozen_weights(base, texts, others={"label": OnTheLabel()}, seeds=[0, 1], options=few)
    by_name = {row.weights: row.accuracy for row in result}
    assert list(by_name) == [
        "uniform",
        "learned by the classifier",
        "attention of the model",
        "rollout of the model",
        "label",
    ]
    assert by_name["label"] == 1.0
    assert by_name["uniform"] < 1.0


def test_the_token_classifier_reads_by_the_weights(texts, base):
    table = base.get_input_embeddings().weight
    model = TokenClassifier(table, 2, width=8)
    part = texts.test
    weights = on_tokens(torch.rand(part.ids.shape), part)
    assert_close(weights.sum(1), torch.ones(len(weights)))
    assert bool((weights[inside(part) == 0] == 0).all())
    # If one token has all of the attention, its weight alone decides the output.
    alone = torch.zeros_like(weights)
    alone[:, 2] = 1.0
    assert_close(model(part.ids, alone), model(part.ids[:, 2:3], torch.ones(len(alone), 1)))
    learned = TokenClassifier(table, 2, width=8, learned=True)
    longer = torch.nn.functional.pad(part.ids, (0, 3))
    same = torch.nn.functional.pad(weights, (0, 3))
    assert_close(learned(longer, same), learned(part.ids, weights))


def test_a_guided_classifier_gets_the_weights_of_its_texts(texts, base):
    model = TokenClassifier(base.get_input_embeddings().weight, 2, width=8)
    weights, rows = torch.rand(texts.train.ids.shape), torch.tensor([7, 2])
    batch = texts.train.at(rows)
    expected = torch.nn.functional.cross_entropy(
        model(texts.train.ids[[7, 2]], weights[[7, 2]]), texts.train.labels[[7, 2]]
    )
    assert_close(_guided(weights)(model, batch, rows), expected)


def test_the_seed_of_a_training_decides_its_result(texts, start):
    first = start(0)
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        torch.rand(5)
        f.fit(model, texts.train, FitOptions(epochs=1), seed=seed, name="")
    a, b, c = (model.classifier.weight for model in models)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_start_has_a_new_head_by_its_seed_and_the_encoder_of_the_folder(folder):
    """The seed decides the new head; the folder's head is unused, though its size would fit."""
    stored = BertForSequenceClassification.from_pretrained(folder)
    a, b, c = (Starts(folder, 3)(seed) for seed in (0, 0, 1))
    assert torch.equal(a.classifier.weight, b.classifier.weight)
    assert not torch.equal(a.classifier.weight, c.classifier.weight)
    assert not torch.equal(a.classifier.weight, stored.classifier.weight)
    kept = stored.bert.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in a.bert.state_dict().items())


def test_bad_texts_and_options_are_refused(folder):
    with pytest.raises(ValueError, match="texts and labels: got 1 and 2, allowed"):
        f.encode(folder, ["dog"], [0, 1])
    with pytest.raises(ValueError, match="epochs: got 0, allowed: above 0"):
        FitOptions(epochs=0)
    empty = f.encode(folder, ["dog", ""], [0, 1])
    with pytest.raises(ValueError, match="got a text without tokens, allowed: at least one token"):
        inside(empty)
