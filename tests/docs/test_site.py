"""The site builds without network, has no broken links, and loads nothing from other sites."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
MODULES = (
    *("ops", "modules", "modules.alignment", "data", "training", "finetuning", "seq2seq"),
    "analysis",
)

missing = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)}; make docs installs them"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")}
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return site


def test_a_page_loads_nothing_from_another_machine(site: Path):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?://[^\" >]+)")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    assert not {url for page in pages for url in loads.findall(page.read_text(encoding="utf-8"))}
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not [url for style in styles for url in re.findall(r"url\(['\"]?https?://", style)]


@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_cut(browser: Any, site: Path, width: int):
    """No page scrolls sideways; an element that is wider than the page scrolls in its own box."""
    cut = """width => [...document.querySelectorAll('article *')].filter((node) => {
      if (node.getBoundingClientRect().right <= width + 1) return false;
      const boxes = [];
      for (let box = node; box; box = box.parentElement) boxes.push(getComputedStyle(box));
      return !boxes.some(({overflowX}) => ['auto', 'scroll'].includes(overflowX));
    }).map((node) => node.outerHTML.slice(0, 120))"""
    page = browser.new_page(viewport={"width": width, "height": 900})
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file.name
        assert page.evaluate(cut, width) == [], file.name
    # At a width of 1280 pixels, the page shows all columns of the results.
    page.goto((site / "performance.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")
    boxes = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
    wide = page.evaluate(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).length")
    assert (wide == 0) == (width == 1280)
    page.close()


def test_the_pictures_of_the_records_are_there(site: Path):
    for picture in (ROOT / "benchmarks" / "results").rglob("*.png"):
        target = site / "results" / picture.relative_to(ROOT / "benchmarks" / "results")
        assert target.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name: str, site: Path):
    module = importlib.import_module(f"fastbert.{name}")
    text = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
    described = {anchor.rsplit(".", 1)[-1] for anchor in re.findall(r'id="([\w.]+)"', text)}
    assert set(module.__all__) <= described


def test_examples_are_shown_as_code(site: Path):
    """No example becomes a quote; Markdown quotes prompts outside ``Examples:`` sections."""
    pages = sorted((site / "api").glob("*.html"))
    assert len(pages) > 5
    assert not [page.name for page in pages if "<blockquote>" in page.read_text(encoding="utf-8")]
