"""The fixtures of pages for small models, and of a page in the browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from viewer_models import TEXTS, tiny_masked_lm

import fastbert
from fastbert.data import WordPieceTokenizer, stories, train_tokenizer
from fastbert.viewer import page as pages
from fastbert.viewer.collect import Collected, collect
from fastbert.viewer.text import Tokens, tokenize


@pytest.fixture(scope="session")
def tokenizer() -> WordPieceTokenizer:
    return train_tokenizer(stories(30, 0), 300)


@pytest.fixture(scope="session")
def masked_lm(tokenizer) -> fastbert.BertForMaskedLM:
    return tiny_masked_lm(len(tokenizer))


@pytest.fixture(scope="session")
def page_file(masked_lm, tokenizer, tmp_path_factory) -> Path:
    """Return a page of a pair of texts with a mask and padding."""
    torch.manual_seed(0)
    page = fastbert.view(masked_lm, tokenizer, *TEXTS, pad_to=34)
    return page.save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="session")
def tokens(tokenizer) -> Tokens:
    """Return the tokens of the texts in `page_file`."""
    found = tokenize(tokenizer, *TEXTS)
    found.pad(34, tokenizer.pad_id)
    return found


@pytest.fixture(scope="session")
def collected(masked_lm, tokens) -> Collected:
    """Return the results of the model that `page_file` shows."""
    return collect(masked_lm, tokens)


@pytest.fixture(scope="session")
def sparse_file(collected, tokens, tmp_path_factory) -> Path:
    """Return a page with queries and keys of one layer, and with gradients averaged over heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "NEURON_BUDGET", 1)
        patch.setattr(pages, "RELEVANCE_BUDGET", 1)
        html = pages.build(collected, tokens, "Sparse")
    return fastbert.viewer.Page(html).save(tmp_path_factory.mktemp("sparse") / "page.html")


class Opened:
    """A page in the browser, with the requests that it made and the errors that it reported."""

    def __init__(self, context: Any, file: Path) -> None:
        context.add_init_script(path=Path(__file__).parent / "record_uses.js")
        self.file, self.page = file, context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console",
            lambda message: (
                self.problems.append(message.text) if message.type in ("error", "warning") else None
            ),
        )

    def go(self, **state: object) -> Any:
        """Open the page in the state `state`, and wait until the page has drawn it."""
        self.page.goto("about:blank")
        query = "&".join(f"{name}={value}" for name, value in state.items())
        self.page.goto(f"file://{self.file}#{query}")
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def settle(self) -> None:
        """Wait until the page has drawn the last change."""
        self.page.wait_for_selector("#view:not([aria-busy])")

    def state(self) -> dict[str, str]:
        """Return the state in the hash of the URL, which the page updates 0.35 s after a change.

        A timer that ends later than the page's timer waits for the update even on a busy machine.
        """
        self.page.evaluate("() => new Promise((done) => setTimeout(done, 400))")
        script = "Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
        return self.page.evaluate(script)

    def picture(self) -> list[str]:
        """Return the picture of the view: the view's elements, and the pixels of its canvases."""
        self.page.wait_for_selector("#view:not([aria-busy])")
        self.page.wait_for_function("() => !document.querySelector('#view [data-drawing]')")
        # The page draws a change in the next frame.
        script = """() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done([
          document.querySelector('#view').innerHTML,
          ...[...document.querySelectorAll('#view canvas')].map((canvas) => canvas.toDataURL()),
        ]))))"""
        return self.page.evaluate(script)

    def controls(self) -> set[str]:
        """Return the controls that the page has now: elements with events, and key bindings."""
        return set(self.page.evaluate("window.controls()"))

    def used(self) -> set[str]:
        """Return the controls that real events have used since the page was opened."""
        return set(self.page.evaluate("[...window.used]"))

    def check(self) -> None:
        """Fail if the page requested another file, or if its console has an error or a warning."""
        own = f"file://{self.file}"
        others = [url for url in self.requests if not url.startswith((own, "blob:", "data:"))]
        assert others == []
        assert self.problems == []


@pytest.fixture
def open_page(browser) -> Iterator[Any]:
    contexts = []

    def start(file: Path, **options: Any) -> Opened:
        size = {"width": 1280, "height": 900}
        contexts.append(browser.new_context(**({"viewport": size} | options)))
        return Opened(contexts[-1], file)

    yield start
    for context in contexts:
        context.close()
