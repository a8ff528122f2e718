"""The page in Chromium: every view, every control, the weights, and accessibility."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from viewer_models import TEXTS

import fastbert
from fastbert.viewer.collect import collect
from fastbert.viewer.measures import rollout
from fastbert.viewer.text import tokenize

WEB = Path(__file__).parents[2] / "fastbert" / "viewer" / "web"
VIEWS = ("model", "head", "neuron", "text", "matrix")
QUANTITIES = ("attention", "norm", "rollout", "gradient")


@pytest.fixture(scope="module")
def tokens(tokenizer):
    found = tokenize(tokenizer, *TEXTS)
    found.pad(34, tokenizer.pad_id)
    return found


@pytest.fixture(scope="module")
def collected(masked_lm, tokens):
    return collect(masked_lm, tokens)


def ink_of(page: Any, selector: str) -> int:
    """Return the number of different colours in the canvases of a selector."""
    script = """selector => {
      const seen = new Set();
      for (const canvas of document.querySelectorAll(selector)) {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        for (const pixel of new Uint32Array(data.buffer)) seen.add(pixel);
      }
      return seen.size;
    }"""
    return page.evaluate(script, selector)


# Views


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_drawn(open_page, page_file, view, scheme):
    opened = open_page(page_file, color_scheme=scheme)
    page = opened.go(view=view, heads="0.2", token=3, layer=1)
    assert page.locator(f"#tab-{view}").get_attribute("aria-selected") == "true"
    assert len(page.locator("#summary").inner_text()) > 20
    if view == "head":
        assert page.locator("#view svg path").count() > 5
        assert page.locator("#view svg text").count() == 2 * 34
    elif view == "text":
        assert page.locator("#view .word").count() > 10
    else:
        assert ink_of(page, "#view canvas") > 20
    assert page.locator("#largest tbody tr").count() == (9 if view == "model" else 10)
    opened.check()


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_every_quantity_is_that_of_python(open_page, page_file, collected, tokens, quantity):
    """The numbers in the table of the matrix are the largest of the plane, within the codes."""
    layer = collected.layers[2]
    planes = {
        "attention": layer.weights[1],
        "norm": layer.weights[1] * layer.norms[1],
        "rollout": rollout(torch.stack([each.weights.mean(0) for each in collected.layers]))[2],
        "gradient": layer.relevance,
    }
    plane = planes[quantity]
    page = open_page(page_file).go(view="matrix", quantity=quantity, layer=2, heads=1)
    rows = page.locator("#largest tbody tr").all()
    assert len(rows) == 10
    most = float(plane.max())
    for row in rows:
        query, key, value = row.locator("td").all_text_contents()
        i, j = (int(re.findall(r"\((\d+)\)$", each)[0]) for each in (query, key))
        assert tokens.pieces[i] in query
        # Gradients have 31 levels; the weights have 255, and the page shows two digits.
        near = 0.04 if quantity == "gradient" else 0.012
        assert float(value) == pytest.approx(float(plane[i, j]), abs=near * most, rel=0.06)


def test_the_weights_in_the_page_are_those_of_the_model(open_page, page_file, collected):
    opened = open_page(page_file)
    page = opened.go(view="matrix")
    script = """async layer => {
      const text = document.getElementById('block-weights-' + layer).textContent;
      const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
      return [...new Uint8Array(await new Response(stream).arrayBuffer())];
    }"""
    data = json.loads(page.locator("#data").text_content())
    for number, layer in enumerate(collected.layers):
        codes = np.array(page.evaluate(script, number)).reshape(3, 34, 34).swapaxes(1, 2)
        error = np.abs((codes / data["levels"]) ** 2 - layer.weights.numpy())
        assert error.max() <= data["largestError"] + 1e-6
    # What the matrix says about a cell is what the program read from its block.
    canvas = page.locator("#view canvas")
    canvas.focus()
    for _ in range(4):
        canvas.press("ArrowDown")
    canvas.press("ArrowRight")
    note = page.locator("#view .note").inner_text()
    assert "(4)" in note
    assert "(1)" in note
    shown = float(note.rsplit(": ", 1)[1])
    assert shown == pytest.approx(float(collected.layers[0].weights[0, 4, 1]), abs=0.006)
    opened.check()


# Controls


def test_every_control_changes_the_state_and_the_picture(open_page, page_file):
    opened = open_page(page_file)
    page = opened.go(view="head")

    def after(action: Any, **expected: str) -> None:
        before = page.locator("#view").inner_html()
        action()
        opened.settle()
        state = opened.state()
        for name, value in expected.items():
            assert state[name] == value
        page.wait_for_function(
            "before => document.querySelector('#view').innerHTML !== before", arg=before
        )

    after(lambda: page.locator("#layer").press("ArrowRight"), layer="1")
    after(lambda: page.get_by_label("2", exact=True).check(), heads="0.2")
    after(lambda: page.get_by_role("button", name="All", exact=True).click(), heads="0.1.2")
    after(lambda: page.locator("#token").select_option("3"), token="3")
    after(lambda: page.locator("#view svg text").nth(10).click(), token="5")
    after(lambda: page.locator("#token").select_option("-1"), token="-1")
    for pairs in ("aa", "ab", "ba", "bb", "all"):
        after(lambda pairs=pairs: page.locator("#pairs").select_option(pairs), pairs=pairs)
    for name in ("norm", "gradient", "rollout", "attention"):
        after(lambda name=name: page.locator("#quantity").select_option(name), quantity=name)
    for view in ("model", "neuron", "text", "matrix"):
        after(page.locator(f"#tab-{view}").click, view=view)
    opened.check()


def test_sentences_filter_the_lines(open_page, page_file, tokens):
    page = open_page(page_file).go(view="head", pairs="ab", heads="0.1.2")
    rows = page.locator("#largest tbody tr").all()
    assert rows
    for row in rows:
        _, query, key, _ = row.locator("td").all_text_contents()
        ends = [int(re.findall(r"\((\d+)\)$", each)[0]) for each in (query, key)]
        assert [tokens.sentences[place] for place in ends] == [0, 1]


def test_sorting_puts_the_head_with_the_largest_measure_first(open_page, page_file):
    opened = open_page(page_file)
    page = opened.go()
    measured = json.loads(page.locator("#data").text_content())["layers"]
    for name, button in (("next", "Next word"), ("previous", "Previous word"),
                         ("same", "Same sentence"), ("separator", "Delimiter")):  # fmt: skip
        page.get_by_role("button", name=button).click()
        opened.settle()
        values = [
            (v, n, h) for n, e in enumerate(measured) for h, v in enumerate(e["measures"][name])
        ]
        _, layer, head = max(values)
        page.wait_for_function(
            "label => document.querySelector('.thumbnail').ariaLabel.startsWith(label)",
            arg=f"layer {layer}, head {head}:",
        )
        assert page.locator(".measures tbody th").first.inner_text() == f"{layer}·{head}"
    page.locator("#sort").select_option("score")
    opened.settle()
    page.get_by_role("button", name="entropy", exact=True).click()
    assert opened.state()["sort"] == "entropy"
    opened.check()


def test_a_link_restores_the_state(open_page, page_file):
    opened = open_page(page_file)
    wanted = {"view": "text", "layer": "2", "heads": "1.2", "token": "4", "quantity": "norm",
              "pairs": "aa", "sort": "next"}  # fmt: skip
    page = opened.go(**wanted)
    assert page.locator("#layer").input_value() == "2"
    assert [box.is_checked() for box in page.locator(".head input").all()] == [False, True, True]
    for name in ("token", "quantity", "pairs", "sort"):
        assert page.locator(f"#{name}").input_value() == wanted[name]
    before = page.locator("#view").inner_html()
    page.locator("#copy").click()
    page.locator("#status", has_text="link").wait_for()
    again = open_page(page_file).go(**opened.state())
    assert again.locator("#view").inner_html() == before
    nonsense = open_page(page_file)
    nonsense.go(view="<b>", layer="99", heads="x.77", token="-9", quantity="q", sort="toString")
    nonsense.check()
    assert nonsense.page.locator("#layer").input_value() == "0"


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_is_saved(open_page, page_file, view, tmp_path):
    opened = open_page(page_file, accept_downloads=True)
    page = opened.go(view=view, token=3)
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as waiting:
            page.locator(f"#{kind}").click()
        path = tmp_path / f"picture.{kind}"
        waiting.value.save_as(path)
        assert waiting.value.suggested_filename == f"attention-{view}-0-0.{kind}"
        content = path.read_bytes()
        assert content.startswith(start)
        assert len(content) > 2000
        if kind == "png":
            import PIL.Image

            colours = PIL.Image.open(path).convert("RGB").getcolors(1 << 24)
            assert len(colours) > 20
    opened.check()


def test_the_keyboard_reaches_everything(open_page, page_file):
    opened = open_page(page_file)
    page = opened.go()
    page.locator("#tab-model").focus()
    page.keyboard.press("ArrowRight")
    opened.settle()
    assert opened.state()["view"] == "head"
    page.keyboard.press("ArrowLeft")
    opened.settle()
    names = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {
        "tab-model",
        "layer",
        "token",
        "quantity",
        "pairs",
        "sort",
        "copy",
        "thumbnail",
    } <= names
    page.locator(".thumbnail").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    opened.settle()
    assert (opened.state()["view"], opened.state()["heads"]) == ("matrix", "1")
    canvas = page.locator("#view canvas")
    canvas.press("+")
    canvas.press("-")
    for name in ("Zoom in", "Zoom out", "Fit the whole matrix"):
        page.get_by_role("button", name=name).click()
    opened.check()


def test_zoom_enlarges_the_matrix(open_page, page_file):
    opened = open_page(page_file)
    page = opened.go(view="matrix")
    before = page.locator("#view canvas").screenshot()
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_timeout(100)
    enlarged = page.locator("#view canvas").screenshot()
    assert enlarged != before
    page.get_by_role("button", name="Fit the whole matrix").click()
    page.wait_for_timeout(100)
    assert page.locator("#view canvas").screenshot() == before


# What a page may not do


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_violation_of_accessibility(open_page, page_file, view, scheme):
    axe = WEB / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("no axe-core: `make test-viewer` installs it")
    page = open_page(page_file, color_scheme=scheme).go(view=view, token=3)
    page.locator("details summary").click()
    # The page forbids scripts from elsewhere, but the tool evaluates in it.
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    told = [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in found]
    assert told == []


def test_a_phone_shows_everything_without_scrolling_sideways(open_page, page_file):
    opened = open_page(
        page_file, viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True,
        device_scale_factor=2,
    )  # fmt: skip
    for view in VIEWS:
        page = opened.go(view=view, token=3)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, view
    opened.check()


def test_markup_in_a_text_is_shown_as_text(open_page, masked_lm, tokenizer, tmp_path):
    hostile = """</script><script>window.hacked = 1</script><img src=x onerror="hacked=1"> '"&lt;"""
    file = fastbert.view(masked_lm, tokenizer, hostile[:40], hostile[-20:], title=hostile).save(
        tmp_path / "page.html"
    )
    opened = open_page(file)
    for view in VIEWS:
        page = opened.go(view=view)
        assert page.evaluate("window.hacked === undefined && !document.querySelector('img')")
        assert page.locator("h1").inner_text() == hostile
    opened.check()


def test_padding_and_windows_are_shown_as_hidden(open_page, page_file, tokens):
    page = open_page(page_file).go(view="text")
    assert "padding × " in page.locator("#view span.word.padding").inner_text()
    opened = open_page(page_file)
    page = opened.go(view="matrix")
    canvas = page.locator("#view canvas")
    canvas.focus()
    for _ in range(4):
        canvas.press("Shift+ArrowRight")
    assert "hidden (padding or outside the window)" in page.locator("#view .note").inner_text()


def test_the_page_works_in_the_frame_of_a_notebook(open_page, masked_lm, tokenizer, tmp_path):
    frame = fastbert.view(masked_lm, tokenizer, *TEXTS)._repr_html_()
    file = tmp_path / "notebook.html"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8><html data-ready><body>{frame}")
    opened = open_page(file)
    inside = opened.go().frame_locator("iframe")
    inside.locator("#tab-matrix").click()
    inside.locator("#view canvas").wait_for()
    assert "Rows are queries" in inside.locator("#summary").inner_text()
    assert opened.problems == []


# 512 tokens × 12 layers × 12 heads


@pytest.fixture(scope="module")
def large(tmp_path_factory, tokenizer):
    config = fastbert.BertConfig(vocab_size=len(tokenizer), initializer_range=0.05)
    torch.manual_seed(0)
    model = fastbert.BertForMaskedLM(config).eval()
    words = ("The old mill stood [MASK] the river. " * 80).split()
    while len(tokenize(tokenizer, " ".join(words)).ids) > 512:
        words.pop()
    page = fastbert.view(model, tokenizer, " ".join(words))
    return page.save(tmp_path_factory.mktemp("large") / "page.html")


@pytest.mark.every_case
def test_512_tokens_open_and_every_view_is_drawn(open_page, large):
    assert large.stat().st_size < 15e6
    opened = open_page(large)
    for view in VIEWS:
        opened.go(view=view, layer=11)
    opened.check()
