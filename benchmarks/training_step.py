"""Time and peak memory of a training step of fastbert and of transformers, in one run.

    python -m benchmarks.training_step --out FOLDER [--steps 5] [--threads 2]

A step is forward, backward and fused AdamW with MLM and NSP, on a batch of 8 sequences of at most
128 tokens, half of which is padding. bf16 means autocast with fp32 weights. Each implementation has
its own process, and the processes take turns. The memory is the peak of the resident memory during
the steps, less the resident memory after the imports and before the model. It therefore contains
the weights, the gradients, the moments of AdamW and the activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cpu.remote import Remote
from benchmarks.cpu.training import NAMES
from fastbert import json_file
from fastbert.bench.encoder import BASE, MINILM, EncoderShape, half_padded
from fastbert.config import BertConfig
from fastbert.machine import describe

MODELS = {"BERT-base": BASE, "MiniLM-L6": MINILM}
LENGTHS = half_padded(8, 128)
HEADER = """| model | format | engine | ms per step | tokens/s | peak memory, MiB | time | memory |
|---|---|---|---:|---:|---:|---:|---:|"""


def contest(
    name: str, config: BertConfig, form: str, steps: int, threads: int
) -> list[dict[str, Any]]:
    """Return a row for each implementation of a model in one format; the first row is fastbert's.

    Args:
        name: Name of the model.
        config: Configuration of the model.
        form: Format, a key of ``NAMES``.
        steps: Number of timed steps of each implementation.
        threads: Number of threads of each implementation.
    """
    shape = EncoderShape(name, config, LENGTHS)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
        workers = {n: stack.enter_context(Remote(n, Path(folder), threads)) for n in NAMES[form]}
        start, seconds = {}, {engine: [] for engine in workers}
        for engine, worker in workers.items():
            start[engine] = worker.ask("imports")["resident"]
            worker.ask("training", lengths=list(LENGTHS))
            # The first two steps check the implementation and allocate the moments of AdamW; their
            # peak memory does not count.
            worker.measure(1, 1)
            worker.ask("forget_peak")
        for turn in range(steps):
            order = list(workers) if turn % 2 == 0 else list(workers)[::-1]
            for engine in order:
                seconds[engine].append(workers[engine].measure(turn, 1))
        for engine, worker in workers.items():
            median = statistics.median(seconds[engine])
            rows.append(
                {
                    "model": name,
                    "format": form,
                    "engine": engine,
                    "seconds": median,
                    "all_seconds": seconds[engine],
                    "tokens_per_second": shape.tokens / median,
                    "peak_bytes": worker.ask("peak")["peak"] - start[engine],
                    "start_bytes": start[engine],
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; a ratio is a value over the value of fastbert."""
    lines = [HEADER]
    for row in rows:
        own = next(r for r in rows if (r["model"], r["format"]) == (row["model"], row["format"]))
        time, memory = (row[key] / own[key] for key in ("seconds", "peak_bytes"))
        lines.append(
            f"| {row['model']} | {row['format']} | {row['engine']} | {1e3 * row['seconds']:,.0f} | "
            f"{row['tokens_per_second']:,.0f} | {row['peak_bytes'] / 2**20:,.0f} | "
            f"{time:.2f} × | {memory:.2f} × |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all models and formats, and write ``training_step.json`` and ``.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the results")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each engine")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for form in NAMES:
            rows += contest(name, MODELS[name], form, options.steps, options.threads)
            print(f"{name}, {form}: done", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": dataclasses.asdict(describe()),
        "threads": options.threads,
        "lengths": list(LENGTHS),
        "rows": rows,
    }
    json_file.write(options.out / "training_step.json", content, json_file.record)
    text = table(rows)
    (options.out / "training_step.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
