"""Time, memory and file size of ``fastbert view`` and of BertViz, on the same model and texts.

    python -m benchmarks.viewer --out FOLDER [--threads 2] [--lengths 32 128 512]

The model is BERT-base with random weights (initializer range 0.05), as a masked LM of transformers
in fp32. Each of the two programs runs in a process of its own. Its first call, with 8 tokens, is a
warm-up, and a second call is timed once, because the calls of BertViz take minutes. The time starts
with a loaded model and the token ids, and ends with the HTML text. fastbert computes more:
gradients, norms, queries and keys, and measures. BertViz computes eager attention and renders
``head_view`` with all layers. CPU seconds count all threads, and depend less on other programs than
the elapsed seconds. The memory is the peak resident memory of the process minus its resident memory
before the call. If Chromium is installed, playwright opens the pages of fastbert in it. The pages
of BertViz load libraries from the network and are not opened.
``python -m benchmarks.viewer_frames`` measures frames of a page that moves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastbert import json_file, machine

CONTENDERS = ("fastbert", "BertViz")
WORDS = 2000
# The switches keep Chromium from sending requests to Google.
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def page_of(contender: str, length: int) -> str:
    """Return a contender's HTML for a text of `length` tokens; print the measurement to stderr."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"mask_token": "[MASK]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    torch.manual_seed(0)
    config = transformers.BertConfig(initializer_range=0.05, attn_implementation="eager")
    model = transformers.BertForMaskedLM(config).eval()
    run = {"fastbert": _fastbert, "BertViz": _bertviz}[contender]
    run(model, tokenizer, "w1 [MASK] w2 w3 w4 w5")
    numbers = torch.randint(WORDS, (length - 3,), generator=torch.Generator().manual_seed(0))
    text = "[MASK] " + " ".join(f"w{number}" for number in numbers.tolist())
    # Writing 5 makes the kernel reset the peak of the resident memory (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    html = run(model, tokenizer, text)
    result = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "memory": _memory("VmHWM") - before,
        "bytes": len(html.encode()),
    }
    print(json.dumps(result), file=sys.stderr)
    return html


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _fastbert(model: Any, tokenizer: Any, text: str) -> str:
    import fastbert

    return fastbert.view(model, tokenizer, text).html


def _bertviz(model: Any, tokenizer: Any, text: str) -> str:
    from bertviz import head_view

    inputs = tokenizer(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        attention = model(**inputs, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    return head_view(attention, tokens, html_action="return").data


def measure(contender: str, length: int, threads: int, page: Path) -> dict[str, Any]:
    """Run a contender in a process of its own, and return its row, which may be an error."""
    command = [sys.executable, "-m", "benchmarks.viewer", "--one", contender]
    command += ["--lengths", str(length), "--threads", str(threads), "--out", str(page)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"contender": contender, "tokens": length}
    lines = ran.stderr.strip().splitlines()
    if ran.returncode:
        return row | {"error": lines[-1] if lines else f"exit status {ran.returncode}"}
    return row | json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def browse(page: Path) -> dict[str, Any]:
    """Open a page of fastbert in Chromium, and return the median seconds until it is drawn."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(BROWSER))
        tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        seconds = []
        for _ in range(5):
            tab.goto("about:blank")
            began = time.perf_counter()
            tab.goto(f"file://{page}")
            tab.wait_for_selector("html[data-ready]")
            seconds.append(time.perf_counter() - began)
        browser.close()
    return {"open": statistics.median(seconds)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| tokens | program | s | CPU s | peak memory, MB | file, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row["tokens"]), row["contender"]]
        if "error" in row:
            cells += [row["error"], "", "", ""]
        else:
            cells += [f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}"]
            cells += [f"{row['memory'] / 1e6:,.0f}"]
            cells += [f"{row['bytes'] / 1e6:,.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all contenders and write ``viewer.json`` and ``viewer.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512], help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=CONTENDERS, help="measure this contender in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        html = page_of(options.one, options.lengths[0])
        if options.one == "fastbert":
            options.out.write_text(html, encoding="utf-8")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for length in options.lengths:
        page = (options.out / "page.html").resolve()
        for contender in CONTENDERS:
            rows.append(measure(contender, length, options.threads, page))
            print(json.dumps(rows[-1]), flush=True)
        if shutil.which("chromium") and not rows[-2].get("error"):
            rows[-2]["browser"] = browse(page)
            print(json.dumps(rows[-2]["browser"]), flush=True)
        page.unlink(missing_ok=True)
    about = dataclasses.asdict(machine.describe())
    load = os.getloadavg()[2]
    record = {"machine": about, "threads": options.threads, "load": load, "rows": rows}
    json_file.write(options.out / "viewer.json", record, json_file.record)
    (options.out / "viewer.md").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
