"""Functions that mkdocs calls when it builds the site: tables, pictures and included files.

A line ``{{ name argument … }}`` of a page is replaced by the Markdown that the function of this
name returns. The tables come from the code and from the records of the benchmarks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fastbert import ops
from fastbert.activations import ACTIVATIONS
from fastbert.ops import gpu_times as times
from fastbert.ops.backend import ORDER, TABLES, Implementation, Request, dtype_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The record from which README shows the tasks of users.
USERS = "2026-11-28-zen3-2-cores"
MACHINES = {"2026-11-28-zen4-2-cores": "Zen 4", "2026-11-25-xeon-amx-2-cores": "Xeon AMX"}
CALL = re.compile(r"^\{\{ (\w+)(.*) \}\}$", re.MULTILINE)
BACKENDS = ("reference", "triton", "cpu", "cuda")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; every column except the first is centred."""
    rule = ["---", *[":---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


# Which backend serves which operation


def backends() -> str:
    """Return the backend tables of ``fastbert.ops``: operations by backends, with their dtypes."""
    rows = [[f"`{op}`", *(_served(TABLES[op].get(name)) for name in BACKENDS)] for op in TABLES]
    return table(["operation", *(f"`{name}`" for name in BACKENDS)], sorted(rows))


def _served(implementation: Implementation | None) -> str:
    """Return a cell: the dtypes of an implementation, and its activations if it refuses some."""
    if implementation is None:
        return "–"
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    dtypes = ", ".join(short[dtype_name(dtype)] for dtype in implementation.dtypes)
    requests = {name: Request("cpu", torch.float32, activation=name) for name in ACTIVATIONS}
    allowed = [name for name in requests if implementation.refuses(requests[name]) is None]
    return dtypes if len(allowed) == len(ACTIVATIONS) else f"{dtypes}; {', '.join(allowed)} only"


def gpu_times() -> str:
    """Return the times by which an operation chooses its backend on a GPU; the choice is bold."""
    rows = []
    for row in times.rows(times.POINTS, ORDER["cuda"]):
        cells = [row["op"], row["architecture"], row["gpu"], row["dtype"], row["shape"]]
        by_backend = row["microseconds"]
        for name in ("cuda", "triton"):
            cell = f"{by_backend[name]:g}"
            cells.append(f"**{cell}**" if name == row["first"] else cell)
        rows.append([f"`{cells[0]}`", *cells[1:5], row["pass"], *cells[5:], row["kind"]])
    names = ["operation", "code", "GPU", "dtype", "shape", "pass"]
    return table([*names, "`cuda`, µs", "`triton`, µs", "times are"], rows)


# Which family is supported, by the tests that show it


@functools.cache
def _shown() -> dict[str, dict[str, str]]:
    command = [sys.executable, str(ROOT / "tests" / "collected_families.py")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise RuntimeError(f"tests/collected_families.py: {done.stderr}")
    return json.loads(done.stdout)


def support(record: str) -> str:
    """Return families by claims, each marked if a test shows it, and the speed in a record."""
    speed = {
        (row["family"], row["format"]): row["transformers seconds"] / row["fastbert seconds"]
        for row in measured_families(record)
        if row["shape"] == "8×128 half padded"
    }
    claims = list(dict.fromkeys(claim for found in _shown().values() for claim in found))
    rows = [
        [
            f"`{family}`",
            *("✓" if claim in found else "–" for claim in claims),
            *(
                f"{speed[family, form]:.2f} ×" if (family, form) in speed else "–"
                for form in ("fp32", "bf16")
            ),
        ]
        for family, found in _shown().items()
    ]
    return table(["family", *claims, "speed fp32", "speed bf16"], rows)


def evidence() -> str:
    """Return a list of the claims of `support`, with the tests that show them."""
    tests: dict[str, dict[str, None]] = {}
    for found in _shown().values():
        for claim, test in found.items():
            tests.setdefault(claim, {})[f"`tests/{test}`"] = None
    return "\n".join(f"- {claim}: {', '.join(names)}" for claim, names in tests.items())


def measured_families(record: str) -> list[dict[str, Any]]:
    """Return the rows of ``families.json`` in a record."""
    return json.loads((RESULTS / record / "families.json").read_text(encoding="utf-8"))["rows"]


# Speed


def measured(record: str, section: str) -> list[dict[str, Any]]:
    """Return the rows of a section of a record that have a time."""
    content = json.loads((RESULTS / record / f"{section}.json").read_text(encoding="utf-8"))
    return [row for row in content["rows"] if row.get("seconds")]


def rows_of(record: str, section: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the measured rows of a record: label of the batch → contender → row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in measured(record, section):
        label = row["label"] if section != "training" else f"{row['label']}, {row['dtype']}"
        found.setdefault(label, {})[row["contender"]] = row
    return found


def milliseconds(seconds: float) -> str:
    """Format a time in ms, with one decimal below 100 ms and none from there on."""
    value = 1000 * seconds
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def best(contenders: dict[str, dict[str, Any]], ending: str = "") -> dict[str, Any]:
    """Return the row of the fastest floating-point peer whose name ends in ``ending``."""
    peers = [
        row
        for name, row in contenders.items()
        if not row["ours"] and row["dtype"] != "int8" and name.endswith(ending)
    ]
    return min(peers, key=lambda row: row["seconds"])


def beside(contenders: dict[str, dict[str, Any]], ours: str, ending: str = "") -> list[str]:
    """Return three cells: the time of ``ours``, the time of the best peer, and their ratio."""
    row, peer = contenders[ours], best(contenders, ending)
    ratio = peer["seconds"] / row["seconds"]
    name = peer["contender"].replace(" fp32", "") if ending else peer["contender"]
    return [
        milliseconds(row["seconds"]),
        f"{milliseconds(peer['seconds'])} {name}",
        f"{ratio:.2f} ×",
    ]


def speed(record: str, section: str) -> str:
    """Return the times of the encoder: bf16 and all peers, fp32 and fp32 peers, and int8."""
    rows = []
    for label, contenders in rows_of(record, section).items():
        names = [f"transformers {kind} fp32" for kind in ("eager", "sdpa")]
        stock = min(contenders[name]["seconds"] for name in names if name in contenders)
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
    """Return the times of one training step of BERT-base, in fastbert and in the best peer."""
    rows = []
    for label, contenders in rows_of(record, "training").items():
        (ours,) = (name for name, row in contenders.items() if row["ours"])
        rows.append([label, *beside(contenders, ours)])
    return table(["batch", "fastbert ms", "best peer ms", "ratio"], rows)


def targets(record: str) -> str:
    """Return a record's table of speed ratios of BERT-base, and whether each meets its limits."""
    return section(record, "bert-base").partition("\n\n")[0]


def int8(record: str) -> str:
    """Return the errors of the real MiniLM checkpoint's sentence embeddings against float64."""
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


def tables(record: str, stem: str) -> str:
    """Return the tables at the start of ``<stem>.md`` in a record."""
    text = (RESULTS / record / f"{stem}.md").read_text(encoding="utf-8")
    return "\n\n".join(part for part in text.split("\n\n") if part.startswith("|"))


def section(record: str, name: str) -> str:
    """Return a page of a record of the CPU, without its heading and its machine."""
    text = (RESULTS / record / f"{name}.md").read_text(encoding="utf-8")
    return text.split("\n\n", 2)[2].strip()


def memory(record: str) -> str:
    """Return each engine's peak resident memory in MiB, for a full 8×128 batch of BERT-base."""
    contenders = rows_of(record, "bert-base")["BERT-base 8×128 full"]
    names = [name for name, row in contenders.items() if row.get("peak_bytes")]
    cells = [[name, f"{contenders[name]['peak_bytes'] / 2**20:,.0f}"] for name in names]
    return table(["engine", "peak MiB"], cells)


def machine(record: str) -> str:
    """Return the machine, the versions and the date of a record, and the measured limits."""
    content = json.loads((RESULTS / record / "bert-base.json").read_text(encoding="utf-8"))
    return "\n".join(f"- {line}" for line in content["header"])


def gpu(record: str, section: str) -> str:
    """Return the times of a section on a GPU: each engine of fastbert, and the fastest peer."""
    matches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in measured(record, section):
        if row["same_function"]:
            matches.setdefault((row["series"], row["label"]), []).append(row)
    rows = []
    for (series, label), timed in matches.items():
        ours = sorted((row for row in timed if row["ours"]), key=lambda row: row["seconds"])
        peer = min((row for row in timed if not row["ours"]), key=lambda row: row["seconds"])
        own = {row["contender"].removeprefix("fastbert ").rstrip("*"): row for row in ours}
        names = [name for name in ("cuda", "triton", "auto") if name in own]
        cells = [f"{1e6 * own[name]['seconds']:,.0f} {name}" for name in names]
        rows.append(
            [
                f"{series}, {label.removesuffix(' bfloat16')}",
                ", ".join(cells),
                f"{1e6 * peer['seconds']:,.0f} {peer['contender']}",
                f"{peer['seconds'] / ours[0]['seconds']:.2f} ×",
            ]
        )
    return table(["shape", "fastbert, µs", "best peer, µs", "ratio"], rows)


def summary() -> str:
    """Return the table of README: BERT-base in bf16 and its fastest peer, for each machine."""
    header = ["batch"]
    for record in MACHINES:
        header += [f"{MACHINES[record]}: fastbert ms", "fastest peer ms", "ratio"]
    rows = []
    found = [rows_of(record, "bert-base") for record in MACHINES]
    for label in found[0]:
        cells = [cell for part in found for cell in beside(part[label], "fastbert bf16")]
        rows.append([label, *cells])
    return table(header, rows)


TASKS = {"encode": "encode", "rerank": "rerank", "embedder": "train an embedder on"}


def tasks(record: str) -> str:
    """Return the rates of stock code, of the best peers and of fastbert in the tasks of users."""
    rows = []
    for section, verb in TASKS.items():
        for label, contenders in rows_of(record, section).items():
            stock = contenders["transformers sdpa fp32"]
            cells = [f"{verb} {label}", f"{stock['rate']:,.0f} {stock['unit']}"]
            for form in ("fp32", "int8"):
                of_form = [row for row in contenders.values() if row["dtype"] == form]
                peers = [row for row in of_form if not row["ours"] and row is not stock]
                peer = min(peers, key=lambda row: row["seconds"], default=None)
                ours = contenders.get(f"fastbert {form}")
                cells.append(_rate_of(peer, form, stock))
                cells.append(_rate_of(ours, form, stock))
            rows.append(cells)
    header = ["task", "stock, fp32", "best fp32 peer", "fastbert fp32", "best int8 peer"]
    return table([*header, "fastbert int8"], rows)


def _rate_of(row: dict[str, Any] | None, form: str, stock: dict[str, Any]) -> str:
    """Return a cell: the rate, and the name of a peer or fastbert's ratio to stock code."""
    if row is None:
        return "–"
    if row["ours"]:
        return f"**{row['rate']:,.0f}** ({stock['seconds'] / row['seconds']:.1f} ×)"
    return f"{row['rate']:,.0f} {row['contender'].replace(f' {form}', '')}"


def headline() -> str:
    """Return the table of the home page: BERT-base 8×128 in bf16, and its fastest peer."""
    rows = []
    for record, name in MACHINES.items():
        for label, contenders in rows_of(record, "bert-base").items():
            if "8×128" in label:
                batch = label.removeprefix("BERT-base ")
                rows.append([f"{name}, {batch}", *beside(contenders, "fastbert bf16")])
    return table(["machine, batch", "fastbert ms", "fastest peer ms", "ratio"], rows)


# The API, and whole files


def api(name: str, *names: str) -> str:
    """Return a directive of mkdocstrings for each public class and function of a module.

    The names are ``names``, else the ``__all__`` of the module, else the ``__all__`` of
    ``fastbert.ops``. Names of other kinds of objects are left out.
    """
    module = importlib.import_module(name)
    wanted = names or getattr(module, "__all__", ops.__all__)
    public = [getattr(module, each, None) for each in wanted]
    found = [each for each in public if inspect.isclass(each) or inspect.isfunction(each)]
    return "\n\n".join(f"::: {each.__module__}.{each.__qualname__}" for each in found)


def include(path: str) -> str:
    """Return a Markdown file of the repository without its heading; the page has its own."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"\A# .*\n", "", text)


def viewer() -> str:
    """Return the cost of ``fastbert view`` beside that of BertViz."""
    path = RESULTS / "2026-11-23-viewer" / "viewer.json"
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        cells = [
            str(row["tokens"]),
            row["contender"],
            f"{row['seconds']:.1f} s",
            f"{row['cpu_seconds']:.1f} s",
        ]
        cells += [f"{row['memory'] / 1e6:,.0f} MB", f"{row['bytes'] / 1e6:,.2f} MB"]
        shown = row.get("browser")
        rows.append([*cells, f"{shown['open']:.2f} s" if shown else "–"])
    header = ["tokens", "program", "to write", "CPU time", "peak memory", "file", "to open"]
    return table(header, rows)


FUNCTIONS = {
    function.__name__: function
    for function in (
        backends,
        gpu_times,
        support,
        evidence,
        speed,
        training,
        targets,
        int8,
        viewer,
        tables,
        memory,
        machine,
        gpu,
        summary,
        headline,
        tasks,
        section,
        api,
        include,
    )
}


def expand(markdown: str) -> str:
    """Return ``markdown`` with every ``{{ call }}`` replaced."""
    return CALL.sub(lambda call: FUNCTIONS[call[1]](*call[2].split()), markdown)


# Hooks of mkdocs


def on_page_markdown(markdown: str, **_: Any) -> str:
    # A ratio in a narrow column stays on one line.
    return expand(markdown).replace(" ×", "\u00a0×")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of the records as ``results/<record>/<name>.png``."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.rglob("*.png")):
        target = f"results/{picture.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files
