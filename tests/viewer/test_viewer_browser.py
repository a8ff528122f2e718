"""The page works in Chromium: views, links, pictures, accessibility, and limits of a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from viewer_models import TEXTS

import fastbert

WEB = Path(__file__).parents[2] / "fastbert" / "viewer" / "web"
VIEWS = ("model", "head", "neuron", "text", "matrix")


def ink_of(page: Any, selector: str) -> int:
    """Return the number of different colours in the canvases that match `selector`."""
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
    if view == "text":
        assert page.locator("#view .word").count() > 10
    else:
        assert ink_of(page, "#view canvas") > 20
    assert page.locator("#largest tbody tr").count() == (9 if view == "model" else 10)
    opened.check()


# Tests of sentences, order and link


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
    # The page writes its state into the link when a control is used.
    page.get_by_label("0", exact=True).check()
    assert opened.state() == wanted | {"heads": "0.1.2"}
    again = open_page(page_file)
    again.go(**opened.state())
    assert again.picture() == opened.picture()
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


# Tests of the limits of a page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_violation_of_accessibility(open_page, page_file, view, scheme):
    axe = WEB / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("no axe-core: `make test-viewer` installs it")
    page = open_page(page_file, color_scheme=scheme).go(view=view, token=3)
    page.locator("details summary").click()
    # The page forbids scripts from elsewhere, but Playwright may evaluate axe in the page.
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


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 800)])
def test_the_texts_are_in_the_first_view(open_page, page_file, view, width, height):
    page = open_page(page_file, viewport={"width": width, "height": height}).go(view=view)
    shown = page.locator("header .text")
    assert shown.all_inner_texts() == [f"a {TEXTS[0]}", f"b {TEXTS[1]}"]
    assert all(each.bounding_box()["y"] < 200 for each in shown.all())


def test_a_long_text_leaves_room_for_the_view(open_page, masked_lm, tokenizer, tmp_path):
    text = f"The {'m' * 300}."
    file = fastbert.view(masked_lm, tokenizer, text).save(tmp_path / "page.html")
    shown = open_page(file).go().locator("header .text")
    assert shown.inner_text() == f"{text[:239]}…"


@pytest.mark.parametrize("width", [400, 1280, 1400])
def test_the_measures_are_not_cut(open_page, page_file, width):
    opened = open_page(page_file, viewport={"width": width, "height": 800})
    page = opened.go()
    page.locator("details summary").click()
    for selector in (".measures", "#largest"):
        box = page.locator(selector)
        inside, whole = box.evaluate("box => [box.clientWidth, box.scrollWidth]")
        assert box.bounding_box()["x"] + inside <= width
        assert whole <= inside or width == 400
        # The last column of a table that is wider than its box can be reached by scrolling.
        box.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
        last = box.locator("thead th").last.bounding_box()
        assert last["x"] + last["width"] <= box.bounding_box()["x"] + inside + 1.5
    assert page.evaluate("document.documentElement.scrollWidth") <= width
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


def test_the_tab_key_reaches_every_kind_of_control(open_page, page_file):
    page = open_page(page_file).go()
    names = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    controls = {"tab-model", "layer", "token", "quantity", "pairs", "sort", "copy", "thumbnail"}
    assert controls <= names


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
