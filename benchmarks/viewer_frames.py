"""Frames of the page of ``fastbert view`` while it moves: scrolling, panning, zooming, new tokens.

    python -m benchmarks.viewer_frames --out FOLDER

The page has 512 tokens, 12 layers and 12 heads of BERT-base with random weights. A motion makes one
step in each frame, as a wheel, a pointer or a held key does. The rate counts the frames that the
browser shows, which depends on the load of the machine. The work is the CPU time of the page's main
thread per frame, which depends less on the load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.viewer import BROWSER, page_of
from fastbert import json_file, machine

FRAMES = 120
# Longest time between two frames, in ms, that counts as in time for 60 frames per second.
LATEST = 20.0


class Motion(NamedTuple):
    """A motion of a view.

    Attributes:
        view: Name of the view.
        step: JavaScript that makes step number `i`; `find` is querySelector.
        heads: Numbers of the chosen heads, joined by dots.
        token: Index of the query token in the URL of the page; -1 means all tokens.
    """

    view: str
    step: str
    heads: str = "0"
    token: int = -1


ALL_HEADS = ".".join(map(str, range(12)))
SCROLL = "(find('#view .scroll') ?? document.scrollingElement).scrollTop += 24"
MOVE = """
const box = target.getBoundingClientRect();
const [clientX, clientY] = [box.left + x, box.top + y];
target.dispatchEvent(new PointerEvent('pointermove', {clientX, clientY, bubbles: true}));"""
DRAG = """
const target = find('#view canvas');
const box = target.getBoundingClientRect();
if (i === 0) find('[aria-label="Zoom in"]').click();
const [clientX, clientY] = [box.left + 400 + 1.5 * i, box.top + 400 + i];
const type = i === 0 ? 'mousedown' : 'mousemove';
const event = new MouseEvent(type, {clientX, clientY, bubbles: true, view: window});
(i === 0 ? target : window).dispatchEvent(event);"""
WHEEL = """
const target = find('#view canvas');
const box = target.getBoundingClientRect();
const [clientX, clientY] = [box.left + 300, box.top + 300];
const deltaY = i < 60 ? -40 : 40;
target.dispatchEvent(new WheelEvent('wheel', {clientX, clientY, deltaY, cancelable: true}));"""


def _press(selector: str, key: str) -> str:
    event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true, cancelable: true}})"
    return f"find('{selector}').dispatchEvent({event})"


HOVER_WORDS = """
const words = document.querySelectorAll('#view button.word');
words[i % words.length].dispatchEvent(new PointerEvent('pointerenter'));"""

MOTIONS = {
    "model, scrolling": Motion("model", SCROLL),
    "head, scrolling": Motion("head", SCROLL),
    "head, scrolling with 12 heads": Motion("head", SCROLL, ALL_HEADS),
    "head, pointer over tokens": Motion(
        "head", f"const [target, x, y] = [find('#view canvas'), 40, 20 + 4 * i];{MOVE}", ALL_HEADS
    ),
    "head, arrow keys": Motion("head", _press("#view .scroll", "ArrowRight"), ALL_HEADS, 3),
    "neuron, scrolling": Motion("neuron", SCROLL),
    "neuron, arrow keys": Motion("neuron", _press("#view .scroll", "ArrowRight"), token=3),
    "text, scrolling": Motion("text", SCROLL),
    "text, pointer over words": Motion("text", HOVER_WORDS, ALL_HEADS),
    "text, arrow keys": Motion("text", _press("#view .words", "ArrowRight"), token=3),
    "matrix, dragging": Motion("matrix", DRAG),
    "matrix, zooming": Motion("matrix", WHEEL),
    "matrix, pointer over cells": Motion(
        "matrix", f"const [target, x, y] = [find('#view canvas'), 100 + 3 * i, 100 + 2 * i];{MOVE}"
    ),
    "matrix, arrow keys": Motion("matrix", _press("#view canvas", "ArrowRight")),
}

# This drawing costs twice as much time as the heaviest motion. A machine that does not draw it at
# 60 frames per second is too slow, or too busy, to judge the page by the frame rate alone.
REFERENCE = Motion(
    "",
    """
const pen = find('canvas').getContext('2d');
pen.clearRect(0, 0, 1000, 800);
for (let line = 0; line < 2000; line += 1) {
  pen.strokeStyle = `rgb(${line % 255} 80 160 / ${line / 2000})`;
  pen.beginPath();
  pen.moveTo(100, (line * 37 + i) % 800);
  pen.bezierCurveTo(400, line % 800, 600, i, 900, (line * 91) % 800);
  pen.stroke();
}""",
)
REFERENCE_PAGE = "data:text/html,<html data-ready><canvas width=1000 height=800></canvas>"

RUN = """([body, frames]) => new Promise((done) => {
  const find = (selector) => document.querySelector(selector);
  const move = new Function('i', 'find', body);
  const times = [];
  const step = (now) => {
    times.push(now);
    if (times.length > frames) return done(times.slice(1).map((time, i) => time - times[i]));
    move(times.length - 1, find);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def measure(tab: Any, page: str, motion: Motion, layer: int = 11) -> dict[str, float]:
    """Run a motion on a page, and measure its frames.

    Args:
        tab: A page of playwright whose browser is Chromium.
        page: URL of the file, without a hash.
        motion: The motion.
        layer: Number of the layer in the page.

    Returns:
        The ``rate`` in frames per second, from the median time of a frame, the share of frames
        ``in_time``, the ``longest`` frame in ms, and the ``work`` per frame in ms.
    """
    tab.goto("about:blank")
    state = f"view={motion.view}&layer={layer}&heads={motion.heads}&token={motion.token}"
    tab.goto(f"{page}#{state}")
    tab.wait_for_selector("html[data-ready]")
    tab.wait_for_timeout(700)
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = _work(session)
    gaps = tab.evaluate(RUN, [motion.step, FRAMES])
    work = _work(session) - before
    session.detach()
    return {
        "rate": 1000 / statistics.median(gaps),
        "in_time": sum(gap <= LATEST for gap in gaps) / len(gaps),
        "longest": max(gaps),
        "work": 1000 * work / len(gaps),
    }


def _work(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the measurements of all motions as a Markdown table."""
    lines = [
        "| motion | frames per second | frames in time | longest frame | work per frame |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [name, f"{row['rate']:.0f}", f"{100 * row['in_time']:.0f} %"]
        cells += [f"{row['longest']:.0f} ms", f"{row['work']:.1f} ms"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all motions and write ``frames.json`` and ``frames.md``."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    page = (options.out / "page.html").resolve()
    page.write_text(page_of("fastbert", 512), encoding="utf-8")
    before = os.getloadavg()[0]
    rows = {}
    with sync_playwright() as started:
        program = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=program, args=list(BROWSER))
        tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        for name, motion in MOTIONS.items():
            rows[name] = measure(tab, page.as_uri(), motion)
            print(name, json.dumps(rows[name]), flush=True)
        version = browser.version
        browser.close()
    page.unlink()
    about = dataclasses.asdict(machine.describe())
    load = [before, os.getloadavg()[0]]
    record = {"machine": about, "chromium": version, "load": load, "rows": rows}
    json_file.write(options.out / "frames.json", record, json_file.record)
    (options.out / "frames.md").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
