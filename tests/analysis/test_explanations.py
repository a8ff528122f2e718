"""The five explanations of a prediction agree with closed forms and with explicit computations."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fastbert.analysis import Subject, explain, page, rollout, write_page
from fastbert.analysis.explain import METHODS
from fastbert.analysis.explain_page import html
from fastbert.analysis.subject import split

pytest.importorskip("captum")
TEXT = "The old dog ran to the garden, unbelievably."


class Sums(nn.Module):
    """A classifier whose logit is a function of ``s = Σ w · eᵢ``; tokens do not interact.

    The attention weights are uniform.
    """

    def __init__(self, function, size: int) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Embedding(size, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.config = SimpleNamespace(pad_token_id=0)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.table

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **options):
        rows = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        sums = (rows @ self.weight * attention_mask).sum(-1)
        weights = None
        if options.get("output_attentions"):
            count = rows.shape[1]
            weights = (torch.full((1, 2, count, count), 1 / count),)
        logits = torch.stack([self.function(sums), -sums], -1)
        return SimpleNamespace(logits=logits, attentions=weights)


def sums(tokenizer, function) -> tuple[Subject, torch.Tensor, torch.Tensor]:
    """Return the classifier, ``w · eᵢ`` of each token, and ``w · e`` of the padding token."""
    model = Sums(function, len(tokenizer))
    subject = Subject(model, tokenizer, ["first", "second"], 40)
    rows = subject.embed(split(tokenizer, TEXT).ids)[0] @ model.weight.detach()
    return subject, rows, model.table.weight[0].detach() @ model.weight.detach()


def test_a_linear_model_has_closed_forms(tokenizer):
    subject, rows, pad = sums(tokenizer, lambda s: s)
    explanation = explain(subject, TEXT, target="first", steps=3)
    inside = split(tokenizer, TEXT).inside
    values = {name: a.pieces for name, a in explanation.attributions.items()}
    assert_close(torch.tensor(values["gradient × input"]), rows)
    integrated = torch.tensor(values["integrated gradients"]).float()
    assert_close(integrated[inside], (rows - pad)[inside])
    outside = [i for i in range(len(rows)) if i not in inside]
    assert integrated[outside].tolist() == [0.0, 0.0]
    without = [values["leave-one-out"][i] for i in inside]
    assert max(abs(a - float(rows[i])) for a, i in zip(without, inside, strict=True)) < 1e-5
    assert [values["leave-one-out"][i] for i in outside] == [None, None]
    assert abs(explanation.completeness_error) < 1e-5
    assert explanation.label == "first"
    assert math.isclose(explanation.logit, float(rows.sum()), abs_tol=1e-5)


def test_integrated_gradients_of_a_square(tokenizer):
    """For the logit ``g(s)``, token i gets ``w · (eᵢ − pad) (g(s₁) − g(s₀)) / (s₁ − s₀)``."""
    subject, rows, pad = sums(tokenizer, lambda s: s.square())
    explanation = explain(subject, TEXT, target="first", steps=8)
    inside = split(tokenizer, TEXT).inside
    last = rows.sum()
    first = last - (rows - pad)[inside].sum()
    values = torch.tensor(explanation.attributions["integrated gradients"].pieces).float()
    assert_close(values[inside], (rows - pad)[inside] * (first + last))
    assert math.isclose(explanation.baseline, float(first**2), rel_tol=1e-5, abs_tol=1e-5)
    # The derivative at the text is 2 s₁ instead of s₀ + s₁, so the two methods give other results.
    assert_close(
        torch.tensor(explanation.attributions["gradient × input"].pieces),
        2 * last * rows,
    )


def test_the_completeness_error_falls_with_the_steps(folder):
    errors = [abs(explain(folder, TEXT, steps=steps).completeness_error) for steps in (1, 4, 64)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-2 * errors[0]


def test_rollout_is_the_product_by_hand():
    first = torch.tensor([[[[0.2, 0.8], [0.6, 0.4]], [[0.4, 0.6], [1.0, 0.0]]]]).double()
    second = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]]).double()
    # With each layer's mean over the heads averaged with the identity, the first layer has [[.65,
    # .35], [.4, .6]]. The second layer, which is the left factor, has [[.75, .25], [.25, .75]].
    expected = [[0.75 * 0.65 + 0.25 * 0.4, 0.75 * 0.35 + 0.25 * 0.6],
                [0.25 * 0.65 + 0.75 * 0.4, 0.25 * 0.35 + 0.75 * 0.6]]  # fmt: skip
    assert_close(rollout([first, second])[0], torch.tensor(expected).double())


def test_rollout_refuses_other_shapes():
    with pytest.raises(ValueError, match="attentions: got no layers"):
        rollout([])
    with pytest.raises(ValueError, match=r"attentions: got the shapes \[\(2, 2\)\]"):
        rollout([torch.eye(2)])


def test_leave_one_out_is_the_fall_of_the_logit(folder):
    subject = Subject.load(folder)
    explanation = explain(subject, TEXT)
    ids = subject.split(TEXT).ids
    index = explanation.label and subject.labels.index(explanation.label)
    assert index == int(subject.logits([ids])[0].argmax())

    def logit(kept: list[int]) -> float:
        with torch.no_grad():
            return float(subject.model(torch.tensor([kept])).logits[0, index])

    for word, fall in enumerate(explanation.attributions["leave-one-out"].words):
        kept = [token for token, of in zip(ids, explanation.word_of, strict=True) if of != word]
        assert math.isclose(fall, logit(ids) - logit(kept), abs_tol=1e-5)
    for place, of in enumerate(explanation.word_of):
        value = explanation.attributions["leave-one-out"].pieces[place]
        if of is None:
            assert value is None
        else:
            kept = ids[:place] + ids[place + 1 :]
            assert math.isclose(value, logit(ids) - logit(kept), abs_tol=1e-5)


def test_words_are_the_sums_of_their_tokens_and_attention_is_a_distribution(folder):
    explanation = explain(folder, TEXT)
    words = ["The", "old", "dog", "ran", "to", "the", "garden", ",", "unbelievably", "."]
    assert explanation.words == words
    assert explanation.word_of.count(explanation.words.index("unbelievably")) > 1
    for name in ("gradient × input", "integrated gradients", "attention", "rollout"):
        attribution = explanation.attributions[name]
        sums = [0.0] * len(explanation.words)
        for value, word in zip(attribution.pieces, explanation.word_of, strict=True):
            if word is not None:
                sums[word] += value
        assert sums == attribution.words
    for name in ("attention", "rollout"):
        attribution = explanation.attributions[name]
        assert math.isclose(sum(attribution.pieces), 1.0, abs_tol=1e-5)
        assert math.isclose(sum(attribution.words) + explanation.special[name], 1.0, abs_tol=1e-5)
    assert (
        list(explanation.attributions)
        == list(METHODS)
        == list(explanation.spearman)
        == list(explanation.kendall)
    )
    assert all(math.isclose(explanation.spearman[name][name], 1.0) for name in METHODS)


PAIR = ("The old dog ran.", "The dog ran home.")


def test_a_pair_is_explained_with_its_token_types(folder):
    """The explanations of a pair of texts agree with explicit calls with the pair's token types."""
    subject = Subject.load(folder)
    explanation = explain(subject, *PAIR)
    assert explanation.words == ["The", "old", "dog", "ran", ".", "The", "dog", "ran", "home", "."]
    assert (explanation.pair, explanation.second) == (PAIR[1], 5)
    ids, types = subject.tokenizer.encode_pair(*PAIR)
    special = zip(explanation.pieces, explanation.word_of, strict=True)
    assert [p for p, w in special if w is None] == [
        "[CLS]", "[SEP]", "[SEP]",
    ]  # fmt: skip

    def call(kept: list[int], **options):
        rows = {"input_ids": [ids[i] for i in kept], "token_type_ids": [types[i] for i in kept]}
        with torch.no_grad():
            rows = {name: torch.tensor([row]) for name, row in rows.items()}
            return subject.model(**rows, **options)

    every = list(range(len(ids)))
    whole = call(every, output_attentions=True)
    index = int(whole.logits[0].argmax())
    logit = float(whole.logits[0, index])
    assert explanation.label == subject.labels[index]
    assert math.isclose(explanation.logit, logit, abs_tol=1e-5)
    # The logit without token types is different, so the token types were used.
    alone = subject.logits([ids])[0, index]
    assert abs(float(alone) - logit) > 1e-3
    values = explanation.attributions
    assert_close(torch.tensor(values["attention"].pieces), whole.attentions[-1].mean(1)[0, 0])
    assert_close(torch.tensor(values["rollout"].pieces), rollout(whole.attentions)[0, 0])
    for word, fall in enumerate(values["leave-one-out"].words):
        kept = [i for i in every if explanation.word_of[i] != word]
        assert math.isclose(fall, logit - float(call(kept).logits[0, index]), abs_tol=1e-5)
    total = sum(values["integrated gradients"].pieces)
    difference = explanation.logit - explanation.baseline
    assert math.isclose(total, difference + explanation.completeness_error, abs_tol=1e-5)
    assert abs(explanation.completeness_error) < 0.05 * max(1.0, abs(difference))
    embeddings = subject.embed(ids).requires_grad_()
    out = subject.model(inputs_embeds=embeddings, token_type_ids=torch.tensor([types]))
    (gradient,) = torch.autograd.grad(out.logits[0, index], embeddings)
    product = (gradient * embeddings.detach())[0].sum(-1)
    assert_close(torch.tensor(values["gradient × input"].pieces), product, rtol=1e-4, atol=1e-5)
    assert html(explanation).count('<p class="heat">') == 2 * len(METHODS)


def test_a_text_with_a_special_token_and_of_two_words(folder):
    explanation = explain(folder, "dog [SEP]")
    assert explanation.words == ["dog", "[SEP]"]
    assert all(math.isnan(v) for row in explanation.spearman.values() for v in row.values())


def test_hostile_text_is_escaped(folder, tmp_path):
    text = '<script>alert(1)</script> "quoted" & more'
    explanation = explain(folder, text, target="<b>other</b>")
    content = html(explanation)
    assert "<script" not in content
    assert "<b>" not in content
    assert "&lt;b&gt;other&lt;/b&gt;" in content
    assert "http://" not in content
    assert "https://" not in content
    write_page(explanation, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == content.encode("utf-8")


def test_heat_maps_and_tables_escape_their_words_and_scale_their_colours():
    html = page.heat(["<i>", "b", "c"], [2.0, -1.0, 0.0])
    assert "<i>" not in html
    assert html.count("<span") == 3
    assert 'style="background: rgb(var(--plus) / 0.600)" title="2">&lt;i&gt;</span>' in html
    assert 'style="background: rgb(var(--minus) / 0.300)" title="-1">b</span>' in html
    assert "/ 0.000" in page.heat(["a"], [math.nan])
    rows = page.table("<u>", ("<p>", "<q>"), [("<r>", "<s>")])
    assert not any(mark in rows for mark in ("<u>", "<p>", "<q>", "<r>", "<s>"))
    assert "<title>&lt;u&gt;</title>" in page.document("<u>", [])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (" ", "--pair: got ' ', allowed: a text that is not blank"),
        ("\u200b", "--pair: got .*, which has no tokens"),
        ("the " * 36, r"TEXT: got \d+ tokens, allowed: at most 40, the positions of "),
    ],
)
def test_a_bad_pair_is_refused(folder, pair, message):
    with pytest.raises(ValueError, match=message):
        explain(folder, "old dog", pair)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "TEXT: got '', allowed: a text that is not blank"),
        (" \n", {}, "TEXT: got .*, allowed: a text that is not blank"),
        ("\u200b", {}, "TEXT: got .*, which has no tokens"),
        ("dog \ud800", {}, "TEXT: got .*, allowed: Unicode text"),
        ("the " * 39, {}, "TEXT: got 41 tokens, allowed: at most 40, the positions of "),
        ("dog", {"target": "great"}, "target: got 'great', allowed: bad, good, <b>other</b>"),
        ("dog", {"steps": 0}, "steps: got 0, allowed: at least 1"),
    ],
)
def test_bad_input_is_refused(folder, text, options, message):
    with pytest.raises(ValueError, match=message):
        explain(folder, text, **options)


def test_the_longest_text_fits(folder):
    assert len(explain(folder, "the " * 38, steps=1).pieces) == 40


def test_a_model_without_attention_is_refused(tokenizer):
    subject, _, _ = sums(tokenizer, lambda s: s)
    plain = subject.model.forward
    subject.model.forward = lambda **options: plain(**{**options, "output_attentions": False})
    with pytest.raises(ValueError, match="MODEL: Sums returns no attention weights, allowed"):
        explain(subject, TEXT)


def test_without_captum_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ImportError, match=r"pip install 'fastbert\[analysis\]'"):
        explain(folder, TEXT)


def test_models_of_transformers_give_the_same_explanation(folder, tokenizer):
    """Stock (eager attention) and accelerated models have the explanations of fastbert's model."""
    transformers = pytest.importorskip("transformers")
    import fastbert

    ours = explain(folder, TEXT)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    for model in (stock, fastbert.accelerate(stock)):
        expected = explain(Subject(model, tokenizer, list(ours.scores), 40), TEXT)
        assert expected.label == ours.label
        for name in METHODS:
            a, b = (torch.tensor(e.attributions[name].words) for e in (ours, expected))
            assert float((a - b).abs().max()) < 1e-4 * max(1.0, float(a.abs().max())), name


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_attention_is_that_of_the_tokens_which_the_head_reads(tokenizer, pooling):
    """Attention is taken at the tokens that ModernBERT's head reads: the first token, or all."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=tokenizer.pad_id, cls_token_id=tokenizer.cls_id,
        sep_token_id=tokenizer.sep_id, bos_token_id=tokenizer.cls_id, eos_token_id=tokenizer.sep_id,
        initializer_range=0.3, classifier_pooling=pooling,
    )  # fmt: skip
    model = transformers.ModernBertForSequenceClassification._from_config(
        config, attn_implementation="eager"
    ).eval()
    explanation = explain(Subject(model, tokenizer, ["no", "yes"], 40), TEXT)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    last, rolled = weights[-1].mean(1)[0], rollout(weights)[0]
    for name, rows in (("attention", last), ("rollout", rolled)):
        expected = rows[0] if pooling == "cls" else rows.mean(0)
        assert_close(torch.tensor(explanation.attributions[name].pieces), expected)
