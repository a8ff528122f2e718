"""Every control of the page is used by a test, and does what its name says.

A use drives one or more controls by real events, and checks their effect. A control of the page
that no use names is an error, and so is a use that does not reach the controls that it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

VIEWS = ("model", "head", "neuron", "text", "matrix")
ARROWS = ("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight")


class Use(NamedTuple):
    """A function that uses the controls `names` in a state of the page, and checks their effect."""

    work: Callable[[Any], None]
    names: tuple[str, ...]
    state: dict[str, Any]
    sparse: bool
    options: dict[str, Any]


USES: list[Use] = []


def use(
    *names: str, sparse: bool = False, options: dict[str, Any] | None = None, **state: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def keep(work: Callable[[Any], None]) -> Callable[[Any], None]:
        USES.append(Use(work, names, state, sparse, options or {}))
        return work

    return keep


def keys(element: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{element} keydown {name}" for name in names)


# Uses of tabs, controls, link and pictures


@use(*(f"#tab-{view} click" for view in VIEWS))
def tabs(opened: Any) -> None:
    for view in reversed(VIEWS):
        opened.page.locator(f"#tab-{view}").click()
        assert opened.state()["view"] == view
        assert opened.page.locator("[role=tab][aria-selected=true]").get_attribute("id") == (
            f"tab-{view}"
        )


@use(*keys('div "Views"', "ArrowLeft", "ArrowRight"))
def tabs_by_keys(opened: Any) -> None:
    opened.page.locator("#tab-model").focus()
    for key, view in (("ArrowRight", "head"), ("ArrowLeft", "model"), ("ArrowLeft", "matrix")):
        opened.page.keyboard.press(key)
        assert opened.state()["view"] == view
        assert opened.page.evaluate("document.activeElement.id") == f"tab-{view}"


@use("#layer input", view="matrix")
def layer(opened: Any) -> None:
    before = opened.picture()
    opened.page.locator("#layer").press("ArrowRight")
    opened.settle()
    assert opened.page.locator("output").inner_text() == "1"
    assert opened.picture() != before
    assert opened.state()["layer"] == "1"


@use(".head input change", 'button "All" click', view="head")
def heads(opened: Any) -> None:
    before = opened.picture()
    opened.page.get_by_label("2", exact=True).check()
    assert opened.state()["heads"] == "0.2"
    two = opened.picture()
    opened.page.get_by_role("button", name="All", exact=True).click()
    assert opened.state()["heads"] == "0.1.2"
    assert len({str(each) for each in (before, two, opened.picture())}) == 3
    opened.page.get_by_label("0", exact=True).uncheck()
    assert opened.state()["heads"] == "1.2"


def choose(opened: Any, name: str, value: str) -> None:
    """Choose an option by keys, because `select_option` makes no events like those of a user."""
    box = opened.page.locator(f"#{name}")
    box.focus()
    values = box.locator("option").evaluate_all("each => each.map(({value}) => value)")
    apart = values.index(value) - values.index(box.input_value())
    for _ in range(abs(apart)):
        opened.page.keyboard.press("ArrowDown" if apart > 0 else "ArrowUp")
    assert box.input_value() == value


@use("#token change", "#pairs change", "#quantity change", view="text", layer=1)
def selects(opened: Any) -> None:
    pictures = [opened.picture()]
    chosen = [("token", "3"), ("token", "-1"), *(("pairs", each) for each in ("aa", "ab", "ba"))]
    chosen += [("pairs", "bb"), ("pairs", "all")]
    chosen += [("quantity", each) for each in ("norm", "rollout", "gradient", "attention")]
    for name, value in chosen:
        choose(opened, name, value)
        assert opened.state()[name] == value
        pictures.append(opened.picture())
    first, token, back, aa, ab, ba, bb, every, norm, rollout, gradient, attention = map(
        str, pictures
    )
    assert first == back == every == attention
    assert len({first, token, aa, ab, ba, bb, norm, rollout, gradient}) == 9


@use("#sort change")
def sort(opened: Any) -> None:
    for name, label in (("entropy", "entropy"), ("score", "gradient × attention")):
        choose(opened, "sort", name)
        opened.settle()
        assert f"sorted by {label}" in opened.page.locator("#summary").inner_text()
        header = opened.page.locator("th[aria-sort=descending]")
        assert header.inner_text() == label
    choose(opened, "sort", "layer")
    assert opened.page.locator("th[aria-sort=ascending]").inner_text() == "head"


@use("#copy click", view="head", layer=2)
def copied_link(opened: Any) -> None:
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.locator("#copy").click()
    opened.page.locator("#status", has_text="link").wait_for()
    assert "layer=2" in opened.page.evaluate("navigator.clipboard.readText()")


@use("#svg click", "#png click", view="matrix")
def pictures(opened: Any) -> None:
    for kind in ("svg", "png"):
        with opened.page.expect_download() as waiting:
            opened.page.locator(f"#{kind}").click()
        assert waiting.value.suggested_filename == f"attention-matrix-0-0.{kind}"


@use('button "Light or dark" click', view="text", token=3)
def theme(opened: Any) -> None:
    def background() -> str:
        return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, words = background(), opened.picture()
    opened.page.get_by_role("button", name="Light or dark").click()
    assert (light, background()) == ("rgb(255, 255, 255)", "rgb(20, 22, 26)")
    assert opened.picture() != words
    opened.page.get_by_role("button", name="Light or dark").click()
    assert background() == light
    assert opened.picture() == words


@use("(prefers-color-scheme: dark) change", view="text", token=3)
def theme_of_the_system(opened: Any) -> None:
    before = opened.picture()
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_timeout(100)
    assert opened.picture() != before


@use("window hashchange")
def changed_link(opened: Any) -> None:
    opened.page.evaluate("location.hash = '#view=neuron&layer=1&token=5&heads=2'")
    opened.page.locator("#tab-neuron[aria-selected=true]").wait_for()
    opened.settle()
    assert "Head 2, query" in opened.page.locator("#summary").inner_text()
    assert opened.page.locator("#token").input_value() == "5"


@use("window resize", view="neuron")
def resized_window(opened: Any) -> None:
    wide = opened.page.locator("#view canvas").bounding_box()["width"]
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.page.wait_for_function(
        "wide => document.querySelector('#view canvas').clientWidth < wide", arg=wide
    )


# Uses of the table and of the measures


@use('summary "The largest values as a table" click', "#largest focus", view="matrix")
def table(opened: Any) -> None:
    assert not opened.page.locator("#largest table").is_visible()
    opened.page.locator("details summary").click()
    assert opened.page.locator("#largest table").is_visible()
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.id") == "largest"


PATTERNS = {"Next word": "next", "Previous word": "previous", "Same sentence": "same",
            "Delimiter": "separator"}  # fmt: skip


@use(*(f'button "{label}" click' for label in PATTERNS))
def patterns(opened: Any) -> None:
    for label, name in PATTERNS.items():
        button = opened.page.get_by_role("button", name=label)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert opened.state()["sort"] == name


@use("button in th[scope=col] click", "button in th[scope=row] click")
def measures(opened: Any) -> None:
    opened.page.get_by_role("button", name="distance", exact=True).click()
    assert opened.state()["sort"] == "distance"
    opened.page.get_by_role("button", name="Show layer 2, head 1").click()
    assert (opened.state()["layer"], opened.state()["heads"]) == ("2", "1")
    assert opened.page.locator(".measures tr.chosen th").inner_text() == "2·1"


@use('div "Measures of all heads" focus')
def measures_by_keys(opened: Any) -> None:
    opened.page.get_by_role("button", name="Delimiter").focus()
    opened.page.keyboard.press("Tab")
    label = opened.page.evaluate("document.activeElement.ariaLabel")
    assert label == "Measures of all heads"


# Views


@use(".thumbnail click")
def thumbnail(opened: Any) -> None:
    opened.page.locator(".thumbnail").nth(4).click()
    state = opened.state()
    assert (state["view"], state["layer"], state["heads"]) == ("matrix", "1", "1")
    # The view that had the thumbnail is closed, so the tab of the new view has the focus.
    assert opened.page.evaluate("document.activeElement.id") == "tab-matrix"


@use(*keys("model .thumbnails", *ARROWS, "Home", "End"))
def thumbnails_by_keys(opened: Any) -> None:
    opened.page.locator(".thumbnail").first.focus()
    moves = (("End", 8), ("ArrowRight", 8), ("ArrowLeft", 7), ("ArrowUp", 4), ("ArrowDown", 7),
             ("Home", 0), ("ArrowRight", 1))  # fmt: skip
    for key, place in moves:
        opened.page.keyboard.press(key)
        labels = "[...document.querySelectorAll('.thumbnail')].indexOf(document.activeElement)"
        assert opened.page.evaluate(labels) == place
        assert opened.page.locator(".thumbnail[tabindex='0']").count() == 1


def label_place(opened: Any, token: int) -> tuple[float, float]:
    box = opened.page.locator("#view canvas").bounding_box()
    return box["x"] + 60, box["y"] + 4 + 18 * token + 9


@use("head canvas click", view="head")
def click_on_a_token(opened: Any) -> None:
    every = opened.picture()
    opened.page.mouse.click(*label_place(opened, 5))
    assert opened.state()["token"] == "5"
    assert re.match(r"Lines from \S+ \(5\);", opened.page.locator("#summary").inner_text())
    opened.page.mouse.click(*label_place(opened, 5))
    assert opened.state()["token"] == "-1"
    opened.page.mouse.move(0, 0)
    assert opened.picture() == every


@use("head canvas pointermove", "head canvas pointerleave", view="head")
def pointer_over_tokens(opened: Any) -> None:
    """A pointer over a token shows the lines of this token, but does not change the state."""
    every = opened.picture()[1]
    opened.page.mouse.move(*label_place(opened, 5))
    opened.page.wait_for_timeout(100)
    hovered = opened.picture()[1]
    opened.page.mouse.move(0, 0)
    opened.page.wait_for_timeout(100)
    assert opened.picture()[1] == every
    assert opened.state().get("token", "-1") == "-1"
    opened.page.locator("#token").select_option("5")
    assert opened.picture()[1] == hovered != every


TOKEN_KEYS = ("ArrowLeft", "ArrowRight", "Escape")
LOW = {"viewport": {"width": 1280, "height": 500}}


@use(*(f"head .scroll {event}" for event in ("scroll", "focus")),
     *keys("head .scroll", *TOKEN_KEYS), view="head", options=LOW)  # fmt: skip
def head_by_keys(opened: Any) -> None:
    token_keys(opened)
    scrolled(opened)


@use(*(f"neuron .scroll {event}" for event in ("scroll", "focus")),
     *keys("neuron .scroll", *TOKEN_KEYS), view="neuron")  # fmt: skip
def neuron_by_keys(opened: Any) -> None:
    token_keys(opened)
    scrolled(opened)


def token_keys(opened: Any) -> None:
    """An arrow key chooses the next or the previous token; Escape chooses all tokens."""
    opened.page.locator("#tab-model").focus()
    opened.page.locator("#view .scroll").focus()
    pressed = ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Escape")
    for key, token in zip(pressed, ("0", "1", "2", "1", "-1"), strict=True):
        before = opened.picture()
        opened.page.keyboard.press(key)
        assert opened.page.locator("#token").input_value() == token
        if opened.page.locator("#tab-neuron[aria-selected=true]").count() == 0 or token != "0":
            assert opened.picture() != before
        assert opened.page.evaluate("document.activeElement.className") == "scroll tall"
    last = opened.page.locator("#token option").count() - 2
    opened.page.locator("#token").select_option(str(last))
    opened.page.locator("#view .scroll").press("ArrowRight")
    assert opened.page.locator("#token").input_value() == str(last)
    opened.page.locator("#view .scroll").press("Escape")


def scrolled(opened: Any) -> None:
    opened.page.locator("#view .scroll").evaluate("each => each.scrollTo(0, 0)")
    opened.page.wait_for_timeout(100)
    before = opened.picture()
    box = opened.page.locator("#view .scroll").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    opened.page.mouse.wheel(0, 60)
    opened.page.wait_for_function("() => document.querySelector('#view .scroll').scrollTop > 0")
    opened.page.wait_for_timeout(100)
    assert opened.picture() != before


@use(".offer click", view="neuron", sparse=True)
def offered_layer(opened: Any) -> None:
    page = opened.page
    assert "no queries and keys of layer 0" in page.locator("#summary").inner_text()
    note = page.locator("#view .note").inner_text()
    assert "queries and keys of 1 of 3 layers only, because" in note
    assert "larger than 15 MB" in note
    page.get_by_role("button", name="Show layer 2", exact=True).click()
    assert opened.state()["layer"] == "2"
    page.locator("#view canvas").wait_for()
    page.locator("#layer").press("ArrowLeft")
    page.locator(".offer").wait_for()


@use(".word click", ".word pointerenter", ".word pointerleave", view="text")
def words(opened: Any) -> None:
    every = opened.picture()
    word = opened.page.locator(".word").nth(3)
    word.hover()
    opened.page.wait_for_timeout(100)
    hovered = [each.get_attribute("style") for each in opened.page.locator(".word").all()]
    opened.page.mouse.move(0, 0)
    opened.page.wait_for_timeout(100)
    assert opened.picture() == every
    word.click()
    opened.settle()
    assert word.get_attribute("aria-pressed") == "true"
    assert [each.get_attribute("style") for each in opened.page.locator(".word").all()] == hovered
    assert opened.state()["token"] != "-1"
    word.click()
    assert opened.state()["token"] == "-1"


@use(*keys("text .words", "ArrowLeft", "ArrowRight", "Escape"), view="text")
def words_by_keys(opened: Any) -> None:
    first = opened.page.locator(".word").first
    first.focus()
    for key, word in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        opened.page.keyboard.press(key)
        opened.settle()
        pressed = opened.page.locator(".word[aria-pressed=true]")
        assert pressed.inner_text() == opened.page.locator(".word").nth(word).inner_text()
        assert pressed.evaluate("each => each === document.activeElement")
        assert opened.page.locator(".word[tabindex='0']").count() == 1
    opened.page.keyboard.press("Escape")
    assert opened.state()["token"] == "-1"


CELL = 84
SIDE = 34


def cell(opened: Any) -> tuple[int, int]:
    """Return the query and the key of the cell that the note below the matrix names."""
    script = "document.querySelector('#view .note').textContent.match(/\\((\\d+)\\)/g)"
    query, key = (int(each.strip("()")) for each in opened.page.evaluate(script))
    return query, key


def step(opened: Any) -> float:
    """Return the side of a cell in pixels when the whole matrix is shown."""
    return (opened.page.locator("#view canvas").bounding_box()["width"] - CELL) / SIDE


@use("matrix canvas focus", *keys("matrix canvas", *ARROWS), view="matrix")
def cells_by_keys(opened: Any) -> None:
    opened.page.locator("#view canvas").focus()
    moves = (("ArrowDown", (1, 0)), ("ArrowRight", (1, 1)), ("ArrowUp", (0, 1)),
             ("ArrowUp", (0, 1)), ("ArrowLeft", (0, 0)), ("Shift+ArrowDown", (10, 0)),
             ("Shift+ArrowRight", (10, 10)), ("Shift+ArrowRight", (10, 20)))  # fmt: skip
    for key, expected in moves:
        opened.page.keyboard.press(key)
        assert cell(opened) == expected


def place_of(opened: Any, query: int, key: int) -> tuple[float, float]:
    box = opened.page.locator("#view canvas").bounding_box()
    side = step(opened)
    return box["x"] + CELL + (key + 0.5) * side, box["y"] + CELL + (query + 0.5) * side


@use("matrix canvas pointermove", view="matrix")
def pointer_over_cells(opened: Any) -> None:
    opened.page.mouse.move(*place_of(opened, 7, 20))
    assert cell(opened) == (7, 20)


@use('button "Zoom in" click', 'button "Zoom out" click', 'button "Fit the whole matrix" click',
     *keys("matrix canvas", "+", "-"), view="matrix")  # fmt: skip
def zoom_by_buttons_and_keys(opened: Any) -> None:
    def after(name: str) -> str:
        if name in "+-":
            opened.page.locator("#view canvas").press(name)
        else:
            opened.page.get_by_role("button", name=name).click()
        # The page animates a zoom for a quarter of a second, with the library d3.
        opened.page.wait_for_timeout(100)
        return opened.picture()[1]

    whole = opened.picture()[1]
    once = after("Zoom in")
    twice = after("+")
    assert len({whole, once, twice}) == 3
    assert after("-") == once
    assert after("Zoom out") == whole
    after("Zoom in")
    assert after("Fit the whole matrix") == whole


@use("matrix canvas wheel", "matrix canvas dblclick", view="matrix")
def zoom_at_the_pointer(opened: Any) -> None:
    """After a zoom, the pointer is over the same cell as before."""
    whole = opened.picture()[1]
    place = place_of(opened, 7, 20)
    opened.page.mouse.move(*place)
    opened.page.mouse.wheel(0, -300)
    opened.page.wait_for_timeout(200)
    enlarged = opened.picture()[1]
    opened.page.mouse.move(place[0] + 1, place[1])
    assert enlarged != whole
    assert cell(opened) == (7, 20)
    opened.page.mouse.dblclick(*place)
    opened.page.wait_for_timeout(600)
    assert opened.picture()[1] != enlarged
    opened.page.mouse.move(place[0], place[1])
    assert cell(opened) == (7, 20)


@use("matrix canvas mousedown", view="matrix")
def drag(opened: Any) -> None:
    """A drag moves the matrix with the pointer, but not beyond the edge of the matrix."""
    x, y = place_of(opened, 17, 17)
    opened.page.mouse.move(x, y)
    opened.page.mouse.wheel(0, -500)
    opened.page.wait_for_timeout(200)
    found = cell(opened)
    opened.page.mouse.down()
    opened.page.mouse.move(x + 40, y + 30, steps=4)
    opened.page.mouse.up()
    opened.page.mouse.move(x + 41, y + 30)
    assert cell(opened) == found
    opened.page.mouse.move(x, y)
    assert cell(opened) != found
    opened.page.get_by_role("button", name="Fit the whole matrix").click()
    opened.page.wait_for_timeout(100)
    whole = opened.picture()[1]
    opened.page.mouse.down()
    opened.page.mouse.move(x + 40, y + 30, steps=4)
    opened.page.mouse.up()
    opened.page.mouse.move(x, y)
    assert cell(opened) == (17, 17)
    opened.page.mouse.move(*place_of(opened, 0, 0))
    assert len(whole) > 1000


@use(*(f"matrix canvas touch{kind}" for kind in ("start", "move", "end", "cancel")),
     view="matrix", options={"has_touch": True})  # fmt: skip
def pinch(opened: Any) -> None:
    whole = opened.picture()[1]
    session = opened.page.context.new_cdp_session(opened.page)
    x, y = place_of(opened, 17, 17)

    def touch(kind: str, apart: float) -> None:
        points = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        gone = kind in ("touchEnd", "touchCancel")
        session.send("Input.dispatchTouchEvent",
                     {"type": kind, "touchPoints": [] if gone else points})  # fmt: skip

    for last in ("touchEnd", "touchCancel"):
        before = opened.picture()[1]
        touch("touchStart", 30)
        for apart in (40, 60, 90):
            touch("touchMove", apart)
        touch(last, 90)
        opened.page.wait_for_timeout(100)
        assert opened.picture()[1] != before
    assert opened.picture()[1] != whole


@pytest.mark.parametrize("each", USES, ids=lambda each: each.work.__name__)
def test_a_use_has_its_effect_and_reaches_its_controls(open_page, page_file, sparse_file, each):
    opened = open_page(sparse_file if each.sparse else page_file, **each.options)
    opened.go(**each.state)
    each.work(opened)
    assert set(each.names) <= opened.used()
    opened.check()


def test_every_control_of_the_page_has_a_use(open_page, page_file, sparse_file):
    found = set()
    for file in (page_file, sparse_file):
        opened = open_page(file, has_touch=True)
        for view in VIEWS:
            opened.go(view=view)
            found |= opened.controls()
    assert len(found) > 60
    named = [name for each in USES for name in each.names]
    assert sorted(found) == sorted(named)
