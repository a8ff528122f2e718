"""What mkdocs does at build time: tables from the code and the records, pictures, whole files.

A page writes ``{{ name argument … }}``; the line is replaced by the Markdown that the function of
that name returns.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch

from fastbert import ops
from fastbert.activations import ACTIVATIONS
from fastbert.ops.backend import TABLES, Implementation, Request

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {"2026-11-22-zen5-2-cores": "Zen 5", "2026-11-22-xeon-amx-2-cores": "Xeon AMX"}
CALL = re.compile(r"^\{\{ (\w+)(.*) \}\}$", re.MULTILINE)
BACKENDS = ("reference", "triton", "cpu", "cuda")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every column but the first is centred."""
    rule = ["---", *[":---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


# Which backend serves which operation


def backends() -> str:
    """The backend tables of ``fastbert.ops``: operations by backends, with their activations."""
    rows = [[f"`{op}`", *(_served(TABLES[op].get(name)) for name in BACKENDS)] for op in TABLES]
    return table(["operation", *(f"`{name}`" for name in BACKENDS)], sorted(rows))


def _served(implementation: Implementation | None) -> str:
    """One cell: the dtypes of an implementation, and the activations if it refuses some."""
    if implementation is None:
        return "–"
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    dtypes = ", ".join(short[str(dtype).removeprefix("torch.")] for dtype in implementation.dtypes)
    requests = {name: Request("cpu", torch.float32, activation=name) for name in ACTIVATIONS}
    allowed = [name for name in requests if implementation.refuses(requests[name]) is None]
    return dtypes if len(allowed) == len(ACTIVATIONS) else f"{dtypes}; {', '.join(allowed)} only"


# Speed


def rows_of(record: str, section: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The measured rows of a record: label of the batch → contender → row."""
    content = json.loads((RESULTS / record / f"{section}.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        if row.get("seconds"):
            label = row["label"] if section != "training" else f"{row['label']}, {row['dtype']}"
            found.setdefault(label, {})[row["contender"]] = row
    return found


def milliseconds(seconds: float) -> str:
    """Three significant digits, at least one of them before the point."""
    value = 1000 * seconds
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def best(contenders: dict[str, dict[str, Any]], ending: str = "") -> dict[str, Any]:
    """The fastest peer; with ``ending`` among those whose name ends so."""
    peers = [r for name, r in contenders.items() if not r["ours"] and name.endswith(ending)]
    return min(peers, key=lambda row: row["seconds"])


def beside(contenders: dict[str, dict[str, Any]], ours: str, ending: str = "") -> list[str]:
    """Three cells: our time, the best peer's, and how many times as fast ours is."""
    row, peer = contenders[ours], best(contenders, ending)
    ratio = peer["seconds"] / row["seconds"]
    name = peer["contender"].replace(" fp32", "") if ending else peer["contender"]
    return [
        milliseconds(row["seconds"]),
        f"{milliseconds(peer['seconds'])} {name}",
        f"{ratio:.2f} ×",
    ]


def speed(record: str, section: str) -> str:
    """Times of the encoder in ms: bf16 beside all peers, fp32 beside fp32 peers, and int8."""
    rows = []
    for label, contenders in rows_of(record, section).items():
        stock = min(
            contenders[f"transformers {kind} fp32"]["seconds"] for kind in ("eager", "sdpa")
        )
        rows.append(
            [
                label,
                *beside(contenders, "fastbert bf16"),
                *beside(contenders, "fastbert fp32", "fp32"),
                f"{stock / contenders['fastbert fp32']['seconds']:.2f} ×",
                milliseconds(contenders["fastbert int8"]["seconds"]),
            ]
        )
    header = ["batch", "bf16 ms", "best peer ms", "ratio", "fp32 ms", "best fp32 peer ms", "ratio"]
    return table([*header, "to transformers fp32", "int8 ms"], rows)


def training(record: str) -> str:
    """One training step of BERT-base: our time and the faster of transformers' two."""
    rows = []
    for label, contenders in rows_of(record, "training").items():
        (ours,) = (name for name, row in contenders.items() if row["ours"])
        rows.append([label, *beside(contenders, ours)])
    return table(["batch", "fastbert ms", "best peer ms", "ratio"], rows)


def targets(record: str) -> str:
    """The floors and goals of BERT-base in a record, and whether each is met."""
    text = (RESULTS / record / "cpu.md").read_text(encoding="utf-8")
    start = text.index("| shape | ours | ratio |")
    return text[start : text.index("\n\n", start)]


def int8(record: str) -> str:
    """Errors of sentence embeddings of the real MiniLM checkpoint against float64."""
    content = json.loads((RESULTS / record / "int8.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["name"],
            f"{row['max_error']:.1e}",
            f"{row['rms_error']:.1e}",
            f"{row['spearman']:.5f}",
            f"{row['top_1']:.1%}",
        ]
        for row in content["result"]["rows"]
        if row["against"] == "float64"
    ]
    header = ["format", "largest error", "RMS error", "Spearman", "same nearest sentence"]
    return table(header, rows)


def memory(record: str) -> str:
    """Peak resident memory in MiB on a full batch 8×128 of BERT-base."""
    contenders = rows_of(record, "bert-base")["BERT-base 8×128 full"]
    names = [name for name, row in contenders.items() if row.get("peak_bytes")]
    cells = [[name, f"{contenders[name]['peak_bytes'] / 2**20:,.0f}"] for name in names]
    return table(["engine", "peak MiB"], cells)


def sentences(record: str) -> str:
    """Texts per second of sentence-transformers' ``encode``, and the ratio to stock fp32."""
    content = json.loads((RESULTS / record / "sentences.json").read_text(encoding="utf-8"))
    spreads = list(dict.fromkeys(row["spread"] for row in content["rows"]))
    found: dict[str, dict[str, Any]] = {}
    for row in content["rows"]:
        found.setdefault(row["contender"], {})[row["spread"]] = row
    rows = []
    for contender, by_spread in found.items():
        figures = [by_spread[spread] for spread in spreads]
        worst = max(row["largest_difference"] for row in figures)
        cells = [f"{r['texts_per_second']:,.0f} ({r['to_stock_fp32']:.2f} ×)" for r in figures]
        rows.append([contender, *cells, f"{worst:.1e}"])
    return table(["encoder inside", *spreads, "largest difference"], rows)


def machine(record: str) -> str:
    """The machine, the versions and the date of a record, and the limits that were measured."""
    text = (RESULTS / record / "cpu.md").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines()[:8] if line.startswith("- "))


def summary() -> str:
    """The table of README: each model in bf16 beside its fastest peer, machine by machine."""
    header = ["batch"]
    for record in MACHINES:
        header += [f"{MACHINES[record]}: fastbert ms", "fastest peer ms", "ratio"]
    rows = []
    for section in ("bert-base", "minilm"):
        found = [rows_of(record, section) for record in MACHINES]
        for label in found[0]:
            cells = [cell for part in found for cell in beside(part[label], "fastbert bf16")]
            rows.append([label, *cells])
    return table(header, rows)


# The API, and whole files


def api(name: str, *names: str) -> str:
    """A directive of mkdocstrings for each public class and function of a module, or of ``names``.

    The public names are those of ``__all__``. ``fastbert.reference`` has the names of
    ``fastbert.ops`` and helpers, which are left out.
    """
    module = importlib.import_module(name)
    wanted = names or getattr(module, "__all__", ops.__all__)
    public = [getattr(module, each, None) for each in wanted]
    found = [each for each in public if inspect.isclass(each) or inspect.isfunction(each)]
    return "\n\n".join(f"::: {each.__module__}.{each.__qualname__}" for each in found)


def include(path: str) -> str:
    """A Markdown file of the repository, without its first heading: the page has one."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"\A# .*\n", "", text)


FUNCTIONS = {
    function.__name__: function
    for function in (
        backends,
        speed,
        training,
        targets,
        int8,
        memory,
        sentences,
        machine,
        summary,
        api,
        include,
    )
}


def expand(markdown: str) -> str:
    """``markdown`` with every ``{{ call }}`` replaced."""
    return CALL.sub(lambda call: FUNCTIONS[call[1]](*call[2].split()), markdown)


# What mkdocs calls


def on_page_markdown(markdown: str, **_: Any) -> str:
    return expand(markdown)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures of the records as ``results/<record>/<name>.png``."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.rglob("*.png")):
        target = f"results/{picture.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files
