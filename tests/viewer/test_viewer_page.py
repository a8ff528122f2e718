"""The file of a page has right measures, quantization and size, and escapes markup in texts."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from page_data import ROUNDING, block_of, data_of, error_bound, planes_of
from viewer_models import TEXTS

import fastbert
from fastbert.viewer import page, quantize
from fastbert.viewer.collect import Collected, Layer, collect
from fastbert.viewer.measures import measure, rollout
from fastbert.viewer.text import PADDING, SPECIAL, Tokens, tokenize

# Quantization


@pytest.mark.parametrize("levels", quantize.LEVELS)
def test_the_error_of_a_weight_is_within_its_bound(levels):
    weights = np.linspace(0, 1, 90_000, dtype=np.float32).reshape(1, 300, 300)
    codes = quantize.encode(weights, levels)
    error = np.abs(quantize.decode(codes, levels) - weights.astype(float))
    assert (error <= error_bound(weights, levels)).all()
    # The error is largest halfway between the last two codes. Some weight of this test is less than
    # one step away from that point.
    assert error.max() <= quantize.largest_error(levels) + ROUNDING
    assert error.max() > quantize.largest_error(levels) - 1 / 89_999


def test_a_block_holds_the_keys_before_the_queries():
    weights = np.array([[[0.25, 0.75], [1.0, 0.0]]], dtype=np.float32)
    codes = quantize.encode(weights, 255)
    assert codes[0].tolist() == [[128, 255], [221, 0]]
    assert quantize.decompress(quantize.compress(codes.tobytes())) == codes.tobytes()


def test_the_levels_get_coarser_until_the_weights_fit():
    generator = np.random.default_rng(0)
    layers = [generator.dirichlet(np.ones(64), (8, 64)).astype(np.float32) for _ in range(3)]
    sizes = {
        levels: sum(len(quantize.compress(quantize.encode(w, levels).tobytes())) for w in layers)
        for levels in quantize.LEVELS
    }
    budget = 60_000
    assert sizes[255] > budget
    levels = quantize.finest(layers, budget)
    assert levels < 255
    assert sizes[levels] <= budget
    with pytest.raises(ValueError, match=r"text: its 98,304 attention weights .* fewer layers"):
        quantize.finest(layers, 1000)


def test_vectors_are_within_half_a_step():
    vectors = torch.randn(3, 7, 5).numpy()
    vectors[1] = 0
    encoded = quantize.encode_vectors(vectors)
    scales = np.array(encoded.scales)[:, None, None]
    restored = (encoded.codes.astype(float) - 63) / 63 * scales
    assert (np.abs(restored - vectors) <= scales / 126 + 1e-6).all()
    assert (restored[1] == 0).all()


def test_a_cell_of_a_thumbnail_is_the_largest_weight_of_its_rectangle():
    weights = torch.rand(2, 7, 7).numpy()
    small = quantize.thumbnail(weights, 3)
    edges = [0, 2, 4, 7]
    for head in range(2):
        for i in range(3):
            for j in range(3):
                rows, columns = slice(edges[i], edges[i + 1]), slice(edges[j], edges[j + 1])
                most = weights[head, rows, columns].max()
                assert small[head, i, j] == round(255 * math.sqrt(most))


# Measures


def brute_force(weights: list, tokens: Tokens) -> dict[str, float]:
    """Return the measures of one head, computed from their definitions."""
    n = len(tokens.ids)
    real = [i for i in range(n) if tokens.sentences[i] != PADDING]
    ends = [i for i in real if tokens.ids[i] in tokens.separator_ids]
    sentences = tokens.sentences
    inside = [i for i in real if sentences[i] >= 0]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "entropy": mean([-sum(w * math.log(w) for w in weights[i] if w > 0) for i in real]),
        "distance": mean([sum(weights[i][j] * abs(i - j) for j in real) for i in real]),
        "first": mean([weights[i][0] for i in real]),
        "separator": mean([sum(weights[i][j] for j in ends) for i in real]),
        "self": mean([weights[i][i] for i in real]),
        "previous": mean([weights[i][i - 1] for i in real[1:]]),
        "next": mean([weights[i][i + 1] for i in real[:-1]]),
        "same": mean(
            [sum(weights[i][j] for j in real if sentences[j] == sentences[i]) for i in inside]
        ),
    }


@pytest.mark.parametrize("padded", [0, 5])
def test_measures_are_those_of_their_definitions(tokenizer, padded):
    tokens = tokenize(tokenizer, *TEXTS)
    real = len(tokens.ids)
    tokens.pad(real + padded, tokenizer.pad_id)
    weights = torch.zeros(2, real + padded, real + padded)
    weights[:, :real, :real] = torch.randn(2, real, real).softmax(-1)
    found = measure(weights, tokens)
    for head in range(2):
        right = brute_force(weights[head].tolist(), tokens)
        assert right.keys() == found.keys()
        for name, value in right.items():
            assert found[name][head] == pytest.approx(value, rel=1e-5), name


def test_a_head_that_looks_at_the_next_token_has_the_largest_share(tokenizer):
    tokens = tokenize(tokenizer, TEXTS[0])
    length = len(tokens.ids)
    following = torch.eye(length).roll(1, 1)
    found = measure(torch.stack([torch.eye(length), following]), tokens)
    assert found["next"] == [0, 1]
    assert found["self"] == [1, 0]
    assert found["entropy"] == [0, 0]


def test_rollout_is_the_product_of_the_layers():
    means = torch.randn(3, 4, 4).double().softmax(-1)
    steps = [(mean + torch.eye(4)) / 2 for mean in means]
    found = rollout(means)
    torch.testing.assert_close(found[2], steps[2] @ steps[1] @ steps[0])
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 4, dtype=torch.float64))


# Tokens


def test_words_sentences_and_special_tokens_of_a_pair(tokenizer):
    tokens = tokenize(tokenizer, "The lanternfish [MASK]", "old mill")
    assert (tokens.ids, tokens.types) == tokenizer.encode_pair("The lanternfish [MASK]", "old mill")
    assert tokens.surfaces == ["The", "lanternfish", "[MASK]", "old", "mill"]
    assert tokens.sentences[0] == tokens.sentences[-1] == SPECIAL
    assert [w for w, s in zip(tokens.words, tokens.sentences, strict=True) if s == SPECIAL] == [
        None
    ] * 3
    pieces = [p for p, w in zip(tokens.pieces, tokens.words, strict=True) if w == 1]
    assert len(pieces) > 1
    assert "".join(piece.removeprefix("##") for piece in pieces) == "lanternfish"


# The file


def test_the_weights_in_the_file_are_those_of_the_model(masked_lm, tokenizer):
    html = fastbert.view(masked_lm, tokenizer, *TEXTS).html
    data = data_of(html)
    ids, types = tokenizer.encode_pair(*TEXTS)
    inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        weights = masked_lm(**inputs, output_attentions=True).attentions
    assert len(data["layers"]) == len(weights) == 3
    for number, layer in enumerate(weights):
        codes = np.frombuffer(block_of(html, f"weights-{number}"), np.uint8)
        restored = quantize.decode(codes.reshape(layer[0].shape), data["levels"])
        exact = layer[0].double().numpy()
        assert (np.abs(restored - exact) <= error_bound(exact, data["levels"])).all()
        assert np.abs(restored - exact).max() <= data["largestError"] + ROUNDING


def test_text_that_looks_like_markup_stays_text(masked_lm, tokenizer):
    hostile = """</script><script>alert(1)</script><!-- "quotes" & 'quotes' <img src=x>"""
    built = fastbert.view(masked_lm, tokenizer, "a mill", hostile, title="</title><b>").html
    assert "alert(1)" not in built.replace("\\u003c", "<").split("<body>")[0]
    assert built.count("</script>") == page.template().count("</script>") + len(
        re.findall('<script type="(?:text/plain|application/json)"', built)
    )
    assert hostile[:8] not in data_raw(built)
    data = data_of(built)
    assert data["title"] == "</title><b>"
    words = [w for w, s in zip(data["words"], data["sentences"], strict=True) if s == 1]
    assert "".join(data["surfaces"][w] for w in sorted(set(words))) == "".join(hostile.split())


def data_raw(html: str) -> str:
    return html.split('id="data">')[1].split("</script>")[0]


def test_the_page_asks_for_nothing():
    template = page.template()
    assert "default-src 'none'" in template
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", template)
    for library in ("d3-selection", "d3-zoom", "d3-scale-chromatic"):
        assert library in template


def test_a_notebook_shows_the_page_in_a_frame(masked_lm, tokenizer):
    shown = fastbert.view(masked_lm, tokenizer, TEXTS[0])
    frame = shown._repr_html_()
    assert frame.startswith("<iframe ")
    inside = frame.split('srcdoc="')[1]
    assert inside.endswith('"></iframe>')
    assert '"' not in inside.removesuffix('"></iframe>')


def test_a_page_of_32_tokens_of_bert_base_is_below_one_megabyte(tokenizer):
    config = fastbert.BertConfig(vocab_size=len(tokenizer))
    tokens = tokenize(tokenizer, " ".join([TEXTS[0]] * 4))
    del tokens.ids[32:], tokens.types[32:], tokens.pieces[32:], tokens.sentences[32:]
    del tokens.words[32:]
    collected = collect(fastbert.BertForMaskedLM(config).eval(), tokens)
    assert collected.prediction is not None
    html = page.build(collected, tokens, "32 tokens")
    assert len(html.encode()) < 1e6
    assert all(layer["neurons"] for layer in data_of(html)["layers"])


@pytest.mark.every_case
def test_a_page_of_512_tokens_of_bert_base_is_below_fifteen_megabytes():
    """The page of a BERT-base is small enough even with random weights, which compress worst."""
    generator = torch.Generator().manual_seed(0)
    length, heads, size = 512, 12, 64
    layers = []
    for number in range(12):
        weights = (1.5 * torch.randn(heads, length, length, generator=generator)).softmax(-1)
        vectors = torch.randn(2, heads, length, size, generator=generator)
        norms = torch.rand(heads, length, generator=generator)
        gradient = torch.randn(length, length, generator=generator)
        relevance = (weights * gradient).clamp(min=0)
        layers.append(
            Layer(number, None, weights, *vectors, norms, relevance, relevance.new_ones(heads))
        )
    half = length // 2
    tokens = Tokens(
        list(range(length)), [0] * length, ["token"] * length,
        [SPECIAL, *[0] * half, *[1] * (half - 1)], [None, *range(length - 1)],
        ["token"] * (length - 1), None, frozenset(), str, [],
    )  # fmt: skip
    collected = Collected("Model", fastbert.BertConfig(), layers, None, "", False)
    html = page.build(collected, tokens, "512 tokens")
    data = data_of(html)
    assert len(html.encode()) < 15e6
    assert 0 < sum(layer["neurons"] for layer in data["layers"]) < 12
    assert data["relevanceByHead"] is False
    # The number of levels is the largest number whose estimated size fits into the rest of the
    # budget.
    kinds = ("weights", "relevance", "norms", "queries", "keys", "thumbnails")
    sizes = {kind: sum(map(len, re.findall(rf'id="block-{kind}[-0-9]*">([^<]*)<', html)))
             for kind in kinds}  # fmt: skip
    left = page.BUDGET - len(page.template()) - sum(sizes.values()) + sizes["weights"]
    planes = [layer.weights.numpy() for layer in layers]
    finer = quantize.LEVELS[quantize.LEVELS.index(data["levels"]) - 1]
    assert quantize.estimate(planes, data["levels"]) <= quantize.RESERVE * left
    assert quantize.estimate(planes, finer) > quantize.RESERVE * left
    assert data["largestError"] == 1 / data["levels"] - 1 / (4 * data["levels"] ** 2)
    number = 5
    found = planes_of(html, f"weights-{number}", data["levels"])
    error = np.abs(found - planes[number].astype(float))
    assert (error <= error_bound(planes[number], data["levels"])).all()
