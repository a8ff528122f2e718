"""Each view shows the values of the model, within the rounding of codes and printed digits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page_data import (
    data_of,
    error_bound,
    half_digit,
    norms_of,
    relevance_of,
    vectors_of,
    weights_of,
)

import fastbert
from fastbert.viewer import page as pages
from fastbert.viewer.collect import collect
from fastbert.viewer.measures import rollout
from fastbert.viewer.text import PADDING, Tokens, tokenize

LENGTH = 34
MARGIN = 84


@pytest.fixture(scope="module")
def html(page_file) -> str:
    return page_file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def weights(html) -> np.ndarray:
    """Return the weights of the page, of shape ``(layers, heads, L, L)``."""
    return weights_of(html)


def places(cells: list[str]) -> list[int]:
    """Return the token numbers in the texts `cells` of a table's cells."""
    return [int(re.findall(r"\((\d+)\)$", cell)[0]) for cell in cells]


def largest(page: Any) -> list[list[str]]:
    rows = page.locator("#largest tbody tr").all()
    return [row.locator("td").all_text_contents() for row in rows]


def pixels(page: Any, selector: str, points: list[tuple[float, float]] | None = None) -> np.ndarray:
    """Return the RGBA values of a canvas, at all pixels or at `points`, of shape ``(…, 4)``."""
    script = """([selector, points]) => {
      const canvas = document.querySelector(selector);
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      if (!points) return [...data];
      return points.flatMap(([x, y]) => {
        const at = 4 * (Math.floor(y) * canvas.width + Math.floor(x));
        return [...data.subarray(at, at + 4)];
      });
    }"""
    found = np.array(page.evaluate(script, [selector, points]))
    return found.reshape(-1, 4)


def luminance(colours: np.ndarray) -> np.ndarray:
    return colours[:, :3] @ np.array([0.2126, 0.7152, 0.0722])


def follows(values: np.ndarray, colours: np.ndarray, sign: int = 1) -> bool:
    """Return whether the luminance rises (or falls) with the values, within the rounding of RGB."""
    ordered = sign * luminance(colours)[np.argsort(values, kind="stable")]
    return bool((np.diff(ordered) >= -1).all() and np.ptp(ordered) > 60)


# Numbers


def test_the_file_differs_from_the_model_by_at_most_its_bounds(html, weights, collected):
    data = data_of(html)
    assert data["largestError"] == pytest.approx(1 / data["levels"] - 1 / (4 * data["levels"] ** 2))
    for number, layer in enumerate(collected.layers):
        exact = layer.weights.double().numpy()
        assert (np.abs(weights[number] - exact) <= error_bound(exact, data["levels"])).all()
        norms = layer.norms.double().numpy()
        # A code is computed in fp32, whose rounding error is at most 1/128 of a code.
        half_code = norms.max() / 65535 * (0.5 + 65535 * 2.0**-23)
        assert (np.abs(norms_of(html, number) - norms) <= half_code).all()
        relevance = layer.relevance.double().numpy()
        most = relevance.max()
        bound = most * error_bound(relevance / most, data["relevanceLevels"])
        assert (np.abs(relevance_of(html, number) - relevance) <= bound).all()
        for name, exact in (("queries", layer.queries), ("keys", layer.keys)):
            scales = np.array(data["layers"][number][f"{name}Scales"])[:, None, None]
            half_step = scales / data["vectorLevels"] / 2
            error = np.abs(vectors_of(html, name, number) - exact.double().numpy())
            assert (error <= half_step * 1.001).all()


def expected(html: str, weights: np.ndarray, quantity: str, layer: int, head: int) -> np.ndarray:
    """Return the values of `quantity` by query and key, computed from the numbers in the file."""
    if quantity == "attention":
        return weights[layer, head]
    if quantity == "norm":
        return weights[layer, head] * norms_of(html, layer)[head]
    if quantity == "gradient":
        return relevance_of(html, layer)[head]
    return rollout(torch.from_numpy(weights.mean(1)))[layer].numpy()


@pytest.mark.parametrize("quantity", ["attention", "norm", "rollout", "gradient"])
def test_the_matrix_tells_the_largest_values(open_page, page_file, html, weights, quantity):
    """The ten largest values equal those of the file, up to half a unit of the last digit."""
    opened = open_page(page_file)
    for layer, head in ((0, 0), (2, 1), (1, 2)):
        plane = expected(html, weights, quantity, layer, head)
        page = opened.go(view="matrix", quantity=quantity, layer=layer, heads=head)
        rows = largest(page)
        assert len(rows) == 10
        top = np.sort(plane.ravel())[::-1]
        for (query, key, value), most in zip(rows, top, strict=False):
            here = plane[tuple(places([query, key]))]
            assert here == pytest.approx(most, rel=1e-5)
            assert abs(float(value) - here) <= half_digit(here)


def test_several_heads_are_their_mean(open_page, page_file, weights):
    page = open_page(page_file).go(view="matrix", layer=1, heads="0.2")
    plane = weights[1, [0, 2]].mean(0)
    for query, key, value in largest(page):
        here = plane[tuple(places([query, key]))]
        assert abs(float(value) - here) <= half_digit(here)


def test_the_cells_of_the_matrix_tell_the_weights(open_page, page_file, weights):
    """Arrow keys move along a row and then down a column; each cell shows its weight."""
    page = open_page(page_file).go(view="matrix", layer=1, heads=2)
    canvas = page.locator("#view canvas")
    walk = [("ArrowRight", (0, key)) for key in range(1, 12)]
    walk += [("ArrowDown", (query, 11)) for query in range(1, 12)]
    for key, cell in walk:
        canvas.press(key)
        note = page.locator("#view .note").inner_text()
        assert [int(each) for each in re.findall(r"\((\d+)\)", note)] == list(cell)
        value = weights[1, 2][cell]
        assert abs(float(note.rsplit(": ", 1)[1]) - value) <= half_digit(value)


def test_lines_are_the_largest_weights(open_page, page_file, weights):
    """The table has the largest weights over all chosen heads, and names the head of each."""
    page = open_page(page_file).go(view="head", layer=1, heads="0.2")
    values = []
    for head, query, key, value in largest(page):
        here = weights[1, int(head)][tuple(places([query, key]))]
        assert abs(float(value) - here) <= half_digit(here)
        values.append(here)
    top = np.sort(weights[1, [0, 2]].ravel())[::-1][:10]
    assert values == pytest.approx(list(top))


def test_words_receive_the_sums_of_their_pieces(open_page, page_file, html, weights):
    data = data_of(html)
    words = np.array([-1 if word is None else word for word in data["words"]])
    sender = int(np.flatnonzero(np.bincount(words[words >= 0]) > 1)[0])
    pieces = np.flatnonzero(words == sender)
    page = open_page(page_file).go(view="text", layer=2, heads=1, token=pieces[0])
    row = weights[2, 1][pieces].mean(0)
    shares = [float(row[words == word].sum()) for word in range(len(data["surfaces"]))]
    found = {data["surfaces"][word]: share for word, share in enumerate(shares)}
    seen = 0
    for word, tokens, value in largest(page):
        if data["surfaces"].count(word) == 1:
            first = int(np.flatnonzero(words == data["surfaces"].index(word))[0])
            assert tokens.startswith(f"{data['tokens'][first]} ({first})")
            assert abs(float(value) - found[word]) <= half_digit(found[word])
            seen += 1
    assert seen >= 5
    assert f"From “{data['surfaces'][sender]}”" in page.locator("#summary").inner_text()


def test_a_filter_of_sentences_keeps_the_words_of_one_sentence(open_page, page_file, html, weights):
    data = data_of(html)
    sentences = np.array(data["sentences"])
    page = open_page(page_file).go(view="text", layer=2, heads=1, pairs="ab")
    row = weights[2, 1][sentences == 0].sum(0) / (sentences != PADDING).sum()
    words = np.array([-1 if word is None else word for word in data["words"]])
    for word, tokens, value in largest(page)[:5]:
        first = int(re.search(r"\((\d+)\)", tokens)[1])
        assert sentences[first] == 1
        share = float(row[words == words[first]].sum())
        assert abs(float(value) - share) <= half_digit(share), word


def test_the_neuron_view_tells_products_and_softmax(open_page, page_file, html, weights):
    page = open_page(page_file).go(view="neuron", layer=1, heads=2, token=4)
    queries, keys = (vectors_of(html, name, 1)[2] for name in ("queries", "keys"))
    sums = keys @ queries[4] / np.sqrt(keys.shape[1])
    rows = largest(page)
    assert len(rows) == 10
    for key, product, softmax in rows:
        (place,) = places([key])
        assert abs(float(product) - sums[place]) <= 0.005 + 1e-4
        value = weights[1, 2, 4, place]
        assert abs(float(softmax) - value) <= half_digit(value)
    assert (
        f"Head 2, query {data_of(html)['tokens'][4]} (4)" in page.locator("#summary").inner_text()
    )


def test_the_measures_of_the_table_are_those_of_the_file(open_page, page_file, html):
    data = data_of(html)
    page = open_page(page_file).go()
    names = [each["name"] for each in data["measures"]]
    units = {each["name"]: each["unit"] for each in data["measures"]}
    for row in page.locator(".measures tbody tr").all():
        layer, head = map(int, row.locator("th").inner_text().split("·"))
        entry = data["layers"][layer]
        for name, cell in zip(names, row.locator("td").all_text_contents(), strict=False):
            value = entry["measures"][name][head]
            if units[name] == "share":
                assert abs(float(cell.removesuffix(" %")) - 100 * value) <= 0.05 + 1e-9
            else:
                assert abs(float(cell) - value) <= half_digit(value)
        score = entry["scores"][head]
        assert abs(float(row.locator("td").last.inner_text()) - score) <= half_digit(score)


# Pictures


def test_thumbnails_are_lighter_where_weights_are_larger(open_page, page_file, weights):
    page = open_page(page_file).go()
    real = LENGTH - 2
    for number in range(9):
        layer, head = divmod(number, 3)
        found = pixels(page, f".thumbnail:nth-child({number + 1}) canvas").reshape(
            LENGTH, LENGTH, 4
        )
        inside = weights[layer, head, :real, :real].ravel()
        assert follows(inside, found[:real, :real].reshape(-1, 4))
        assert (found[real:, :, :3] == 128).all()
        assert (found[:, real:, :3] == 128).all()
    # In the colour map cividis, the darkest colour is blue, and the lightest colour is yellow.
    first, last = (found.reshape(-1, 4)[luminance(found[:real, :real].reshape(-1, 4)).argmin()],
                   found[:real, :real].reshape(-1, 4)[inside.argmax()])  # fmt: skip
    assert last[0] > last[2]
    assert first[3] == last[3] == 255


def test_thumbnails_of_a_long_text_have_the_largest_weights(
    open_page, masked_lm, tokenizer, tmp_path
):
    text = "The old mill stood [MASK] the river. A boy found a lantern. The dog ran."
    while len(tokenize(tokenizer, text).ids) < 52:
        text += " a"
    file = fastbert.view(masked_lm, tokenizer, text).save(tmp_path / "page.html")
    html = file.read_text(encoding="utf-8")
    assert "block-thumbnails" in html
    weights, length = weights_of(html), len(data_of(html)["tokens"])
    edges = np.arange(48) * length // 48
    page = open_page(file).go()
    for number in (0, 5):
        layer, head = divmod(number, 3)
        rows = np.maximum.reduceat(weights[layer, head], edges, 0)
        small = np.maximum.reduceat(rows, edges, 1)
        assert follows(small.ravel(), pixels(page, f".thumbnail:nth-child({number + 1}) canvas"))


def cell_centres(page: Any, length: int) -> list[tuple[float, float]]:
    side = page.locator("#view canvas").bounding_box()["width"] - MARGIN
    at = [MARGIN + (i + 0.5) * side / length for i in range(length)]
    return [(x, y) for y in at for x in at]


def test_the_matrix_is_lighter_where_weights_are_larger(open_page, page_file, weights, tokens):
    opened = open_page(page_file)
    page = opened.go(view="matrix", layer=2, heads=1)
    found = pixels(page, "#view canvas", cell_centres(page, LENGTH)).reshape(LENGTH, LENGTH, 4)
    real = LENGTH - 2
    assert follows(weights[2, 1, :real, :real].ravel(), found[:real, :real].reshape(-1, 4))
    assert (found[real:, :, :3] == 128).all()
    assert (found[:, real:, :3] == 128).all()
    page = opened.go(view="matrix", layer=2, heads=1, pairs="ab")
    found = pixels(page, "#view canvas", cell_centres(page, LENGTH)).reshape(LENGTH, LENGTH, 4)
    sentences = np.array(tokens.sentences)
    passes = (sentences == 0)[:, None] & (sentences == 1)[None]
    assert ((found[..., 3] == 255) == passes).all()


def test_lines_end_at_the_keys_of_large_weights(open_page, page_file, weights):
    """There is ink to the left of a key's label if its weight is over 2 % of the largest weight."""
    opened = open_page(page_file)
    page = opened.go(view="head", layer=1, heads=1, token=4)
    opened.picture()
    width = page.locator("#view canvas").bounding_box()["width"]
    rows = range(LENGTH - 2)
    points = [(width - 170 - 1, 4 + 18 * key + 9 + d) for key in rows for d in (-1, 0, 1)]
    ink = pixels(page, "#view canvas", points)[:, 3].reshape(-1, 3).max(1)
    row = weights[1, 1, 4, : LENGTH - 2]
    share = row / row.max()
    clear = np.abs(share - 0.02) > 0.004
    assert ((ink > 0) == (share > 0.02))[clear].all()
    assert 5 < (ink > 0).sum() < LENGTH - 2
    # The opacity rises with the weight.
    strong = share > 0.05
    assert np.corrcoef(share[strong], ink[strong])[0, 1] > 0.9


def test_the_saved_lines_are_paths_of_the_weights(open_page, page_file, weights, tmp_path):
    opened = open_page(page_file, accept_downloads=True)
    page = opened.go(view="head", layer=1, heads="0.2", token=4)
    with page.expect_download() as waiting:
        page.locator("#svg").click()
    waiting.value.save_as(tmp_path / "lines.svg")
    svg = (tmp_path / "lines.svg").read_text(encoding="utf-8")
    assert "<image" not in svg
    found = {}
    for attributes in re.findall(r"<path ([^>]*)>", svg):
        named = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        for start, end in re.findall(r"M[\d.]+,([\d.]+)L[\d.]+,([\d.]+)", named["d"]):
            query, key = (round((float(y) - 13) / 18) for y in (start, end))
            assert query == 4
            found[named["stroke"], key] = float(named["stroke-opacity"])
    planes = weights[1, [0, 2], 4]
    most = planes.max()
    colours = ("#0072b2", "#009e73")
    for colour, row in zip(colours, planes, strict=True):
        for key, weight in enumerate(row):
            step = np.floor(weight / most * 25 + 0.5)
            if abs(weight / most * 25 - step) < 0.499:
                assert found.get((colour, key), 0) == pytest.approx(step / 25, abs=1e-4)
    assert svg.count("<text") == 2 * LENGTH


def test_vectors_are_purple_or_orange_by_their_sign(open_page, page_file, html):
    page = open_page(page_file).go(view="neuron", layer=1, heads=2, token=4)
    keys, queries = (vectors_of(html, name, 1)[2] for name in ("keys", "queries"))
    width, size = page.locator("#view canvas").bounding_box()["width"], keys.shape[1]
    wide = (width - 120 - 64 - 110 - 24) / 2
    for start, values in ((120, keys), (120 + wide + 8, keys * queries[4])):
        shown = [(k, i) for k in range(20) for i in range(size)]
        at = [(start + (i + 0.5) * wide / size, 46 + 20 * k + 10) for k, i in shown]
        found = pixels(page, "#view canvas", at).astype(int)
        both = (keys, queries) if values is keys else (values,)
        scale = max(np.abs(each).max() for each in both)
        share = np.array([values[k, i] / scale for k, i in shown])
        strong = np.abs(share) > 0.15
        assert strong.sum() > 20
        assert ((found[:, 2] > found[:, 0]) == (share > 0))[strong].all()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_have_a_stronger_colour_the_more_they_receive(open_page, page_file, scheme):
    page = open_page(page_file, color_scheme=scheme).go(view="text", layer=1, token=3)
    found = page.locator("#view button.word").evaluate_all(
        "each => each.map((word) => [word.title, getComputedStyle(word).backgroundColor])"
    )
    values = np.array([float(value) for value, _ in found])
    colours = np.array([[int(n) for n in re.findall(r"\d+", colour)[:3]] for _, colour in found])
    assert follows(values, colours, -1 if scheme == "light" else 1)


# Tests of windows, padding, answers and gradients


@pytest.fixture(scope="module")
def window_file(tmp_path_factory) -> Path:
    """Return a page of ModernBERT with padding; its second layer has a window of 4 tokens."""
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parents[1] / "integrations"))
    from stock_families import build

    length, real = 21, 18
    ids = [*range(6, 6 + real), *[0] * (length - real)]
    sentences = [*[0] * real, *[PADDING] * (length - real)]
    words = [*range(real), *[None] * (length - real)]
    names = [f"word{number}" for number in ids]
    tokens = Tokens(ids, [0] * length, names, sentences, words, names, 5, frozenset([3]), str, [])
    html = pages.build(collect(build("modernbert"), tokens), tokens, "Windows")
    return fastbert.viewer.Page(html).save(tmp_path_factory.mktemp("windows") / "page.html")


def grey(page: Any) -> np.ndarray:
    found = pixels(page, "#view canvas", cell_centres(page, 21)).reshape(21, 21, 4)
    return (found[..., :3] == 128).all(-1)


def test_a_window_and_padding_are_grey_and_named(open_page, window_file):
    opened = open_page(window_file)
    real = np.arange(21) < 18
    exists = real[:, None] & real[None]
    near = np.abs(np.arange(21)[:, None] - np.arange(21)[None]) <= 4
    for quantity, layer, hidden in (
        ("attention", 0, ~exists),
        ("attention", 1, ~(exists & near)),
        ("norm", 1, ~(exists & near)),
        # Rollout combines both layers, and the first layer has no window.
        ("rollout", 1, ~exists),
    ):
        page = opened.go(view="matrix", layer=layer, quantity=quantity)
        assert (grey(page) == hidden).all(), (quantity, layer)
        limited = "attends at most 4 tokens away" in page.locator("#summary").inner_text()
        assert limited == (hidden != ~exists).any()
    page = opened.go(view="matrix", layer=1)
    canvas, note = page.locator("#view canvas"), page.locator("#view .note")
    for _ in range(4):
        canvas.press("ArrowRight")
    assert float(note.inner_text().rsplit(": ", 1)[1]) > 0
    canvas.press("ArrowRight")
    assert note.inner_text().endswith("hidden: layer 1 attends at most 4 tokens away")
    for _ in range(2):
        canvas.press("Shift+ArrowRight")
    assert note.inner_text().endswith("hidden: padding")
    opened.check()


def test_a_window_is_shown_in_every_view(open_page, window_file):
    opened = open_page(window_file)
    for view in ("head", "neuron", "text", "matrix"):
        for layer in (0, 1):
            page = opened.go(view=view, layer=layer, token=9)
            limited = "attends at most 4 tokens away" in page.locator("#summary").inner_text()
            assert limited == (layer == 1), view
    page = opened.go(view="neuron", layer=1, token=9)
    rows = [(200, 46 + 20 * key + 10) for key in range(18)]
    opaque = pixels(page, "#view canvas", rows)[:, 3] == 255
    assert opaque.tolist() == [abs(key - 9) <= 4 for key in range(18)]
    page = opened.go(view="model")
    for number, limit in ((1, 99), (4, 4)):
        found = pixels(page, f".thumbnail:nth-child({number}) canvas").reshape(21, 21, 4)
        apart = np.abs(np.arange(21)[:, None] - np.arange(21)[None])
        assert ((found[:18, :18, :3] == 128).all(-1) == (apart > limit)[:18, :18]).all()
        label = page.locator(".thumbnail").nth(number - 1).get_attribute("aria-label")
        assert ("at most 4 tokens away" in label) == (limit == 4)


def test_padding_is_one_box_in_the_text(open_page, page_file):
    page = open_page(page_file).go(view="text")
    assert page.locator("#view span.word.padding").inner_text() == "padding × 2"


def test_an_answer_is_shown_with_its_first_and_last_word(open_page, tokenizer, masked_lm, tmp_path):
    torch.manual_seed(1)
    model = fastbert.BertForQuestionAnswering(masked_lm.config).eval()
    texts = ("Where is the mill?", "The old mill stood by the river.")
    file = fastbert.view(model, tokenizer, *texts).save(tmp_path / "page.html")
    prediction = collect(model, tokenize(tokenizer, *texts)).prediction
    opened = open_page(file)
    page = opened.go(view="text", quantity="gradient")
    aside = page.locator("aside")
    assert f"Answer: {prediction.chosen['name']}" in aside.inner_text()
    tables = aside.locator("section").first.locator("xpath=preceding-sibling::table").all()
    titles = ("The answer starts at", "The answer ends at")
    for table, title, row in zip(tables, titles, prediction.rows, strict=True):
        assert table.locator("caption").inner_text() == title
        names = table.locator("tbody th").all_inner_texts()
        assert names == [each["name"] for each in row["candidates"]]
    start, end = prediction.chosen["label"], prediction.chosen["place"]
    note = aside.locator("p.note").first.inner_text()
    assert re.search(rf"starts at \S+ \({start}\) and ends at \S+ \({end}\)\.$", note)
    opened.check()


def test_heads_have_gradients_of_their_own_unless_the_file_would_be_too_large(
    open_page, page_file, sparse_file
):
    for file, apart in ((page_file, True), (sparse_file, False)):
        page = open_page(file).go(view="matrix", quantity="gradient")
        label = page.locator("#quantity option:checked").inner_text()
        assert label == "Gradient × attention" + ("" if apart else ", mean of heads")
        assert page.locator(".head input").first.is_enabled() == apart
        reason = "mean over the heads, because that of each head would make this file of 34 tokens"
        assert (reason in page.locator("aside .note").first.inner_text()) != apart


def test_the_mean_of_gradients_is_that_of_the_heads(sparse_file, collected):
    html = sparse_file.read_text(encoding="utf-8")
    for number, layer in enumerate(collected.layers):
        exact = layer.relevance.double().mean(0).numpy()
        bound = exact.max() * error_bound(exact / exact.max(), 31)
        assert (np.abs(relevance_of(html, number)[0] - exact) <= bound).all()
