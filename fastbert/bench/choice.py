"""Write the table of GPU times by which operations choose a backend, from the recorded results.

``python -m fastbert.bench.choice`` reads ``benchmarks/results`` and writes
``fastbert/ops/gpu_times.json``. The recorded results are of two kinds.

- Predictions: ``*-predicted-bounds/OP.json`` for Triton and ``OP_cuda.json`` for CUDA C++, as
  ``fastbert bench --predict --json`` writes them, from the newest folder that has the shape. From
  the recorded counts, `fastbert.bench.predict` computes the estimates again.
- Measurements: ``bench-attention.json``, ``bench-rows.json`` and ``bench-gemm.json`` of
  ``make gpu``, in any folder. A measurement replaces the predictions for its architecture and
  shape; a shape that was measured with one backend only is not in the table.

To record a run, copy the folder of ``make gpu`` into ``benchmarks/results`` and run this command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastbert.bench import predict
from fastbert.bench.limits import BACKWARD, FORWARD
from fastbert.gpus import A100, B200, GPUS, H200, L4, Gpu
from fastbert.ops.gpu_times import MEASURED, PREDICTED, SIXTEEN_BITS, TABLE, Point
from fastbert.testing.ptx.sample import Launched

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# The GPUs that represent their architectures in predictions.
REPRESENTATIVES = (A100, L4, H200, B200)
PRODUCTS = ("linear_gelu", "feed_forward")
OPERATIONS = ("attention", "layer_norm", *PRODUCTS)
FILE_OF = {"triton": "{}.json", "cuda": "{}_cuda.json"}
SECTIONS = ("bench-attention.json", "bench-rows.json", "bench-gemm.json")
ATTENTION = re.compile(r"S(\d+) D(\d+)$")
ROWS = re.compile(r"(\d+)×(\d+)(?: drop)?$")
PRODUCT = re.compile(r"(\d+)×(\d+)×\d+$")
# Seconds by the key of a point, the direction and the backend.
Times = dict[tuple[Any, ...], dict[str, dict[str, float]]]


def points(results: Path = RESULTS) -> list[Point]:
    """Return the sorted points that have times of both backends, forward and backward."""
    times_by_key = {key: (PREDICTED, times) for key, times in _predicted(results).items()}
    times_by_key |= {key: (MEASURED, times) for key, times in _measured(results).items()}
    # A measurement replaces the predictions of its architecture, whichever GPU they are for.
    measured = {_without_gpu(key) for key, (kind, _) in times_by_key.items() if kind == MEASURED}
    rows = []
    for key, (kind, times) in times_by_key.items():
        if kind == PREDICTED and _without_gpu(key) in measured:
            continue
        forward, backward = times.get(FORWARD, {}), times.get(BACKWARD, {})
        if len(forward) > 1 and len(backward) > 1:
            op, arch, gpu, dtype, shape, width, size = key
            common = (op, arch, gpu, dtype, shape, width, size, kind)
            rows.append(Point(*common, forward, backward))
    return sorted(rows, key=lambda p: (p.op, p.arch, p.dtype, p.width, p.size))


def _without_gpu(key: tuple[Any, ...]) -> tuple[Any, ...]:
    op, arch, _, dtype, _, width, size = key
    return op, arch, dtype, width, size


def _predicted(results: Path) -> Times:
    times: Times = {}
    gpus = {gpu.name: gpu for gpu in REPRESENTATIVES}
    for op in OPERATIONS:
        for backend, name in FILE_OF.items():
            # The rows of a later folder replace the rows of an earlier folder.
            for file in sorted(results.glob(f"*-predicted-bounds/{name.format(op)}")):
                content = json.loads(file.read_text(encoding="utf-8"))
                for row in content["bounds"]:
                    gpu, place = gpus.get(row["gpu"]), _place(op, row["case"])
                    if gpu is None or place is None or " drop" in row["case"]:
                        continue
                    estimate = _estimate(row, content["launches"], gpu)
                    # A row without an estimate has only a bound for the operation, whatever the
                    # kernel does.
                    if not estimate:
                        continue
                    shape, width, size, _ = place
                    key = (op, gpu.arch, gpu.name, _bits(row["dtype"]), shape, width, size)
                    by_direction = times.setdefault(key, {})
                    by_direction.setdefault(row["direction"], {})[backend] = estimate
    return times


def _estimate(row: dict[str, Any], launches: dict[str, list[dict[str, Any]]], gpu: Gpu) -> float:
    """Return the estimated seconds of a recorded row from the counts of its launches."""
    case = {(c.op, c.name): c for c in predict.cases()}[row["op"], row["case"]]
    name = f"{case.op} {case.name} {row['dtype']} {row['direction']} sm_{predict.code_for(gpu)}"
    counted = [Launched(**launch) for launch in launches[name]]
    dtype = getattr(torch, row["dtype"])
    return predict.bound(case, dtype, row["direction"], counted, gpu).estimate


def _measured(results: Path) -> Times:
    """Return the measured times; a key gets the times of its largest batch in the newest folder."""
    measured: Times = {}
    largest: dict[tuple[Any, ...], tuple[str, int]] = {}
    for file in sorted(path for name in SECTIONS for path in results.glob(f"*/{name}")):
        content = json.loads(file.read_text(encoding="utf-8"))
        gpu = next((g for g in GPUS if g.name in (content["machine"]["gpu"] or "").split()), None)
        if gpu is None or content["toy"]:
            continue
        for row in content["rows"]:
            place = _place(row["op"], _shape_of(row))
            backend = backend_of(row["contender"])
            if place is None or "seconds" not in row or backend not in FILE_OF:
                continue
            if row["dtype"] == "float16":
                continue
            shape, width, size, batch = place
            key = (row["op"], gpu.arch, gpu.name, _bits(row["dtype"]), shape, width, size)
            rank = (file.parent.name, batch)
            if rank > largest.get(key, ("", 0)):
                measured[key], largest[key] = {}, rank
            if rank == largest[key]:
                times = measured[key].setdefault(row["direction"], {})
                times[backend] = min(row["seconds"], times.get(backend, row["seconds"]))
    return measured


def backend_of(contender: str) -> str:
    """Return the backend of a contender of fastbert.

    The paths of Triton's kernels count as Triton, because the kernels take the path that was faster
    (`attention_path` and `gemm_path` in ``kernels/tiles.py``).

    Args:
        contender: Name of a contender, such as ``"fastbert cuda"`` or ``"fastbert path=library"``.
    """
    name = contender.removeprefix("fastbert ").rstrip("*")
    return "triton" if name.startswith("path=") else name


def _shape_of(row: dict[str, Any]) -> str:
    """Return the name of the shape of a measured row, such as "S512 D64"."""
    label = row["label"].removesuffix(f" {row['dtype']}")
    dim = re.match(r"attention (D\d+) (?:forward|backward)$", row["series"])
    return f"{label} {dim[1]}" if dim else label


def _place(op: str, case: str) -> tuple[str, int, int, int] | None:
    """Return the name, width, size and batch of a shape, or None if the table lacks the shape."""
    if op == "attention" and (match := ATTENTION.match(case)):
        return case, int(match[2]), int(match[1]), 0
    if op == "layer_norm" and (match := ROWS.match(case)):
        return f"{match[2]} columns", int(match[2]), 0, int(match[1])
    if op in PRODUCTS and (match := PRODUCT.match(case)):
        return case, int(match[2]), int(match[1]), 0
    return None


def _bits(dtype: str) -> str:
    return SIXTEEN_BITS if dtype == "bfloat16" else dtype


def lines(entries: Iterable[Point]) -> Iterator[str]:
    """Yield the lines of ``gpu_times.json``; times have four significant digits."""
    yield "{"
    yield ' "note": "seconds; python -m fastbert.bench.choice writes this file from the records",'
    yield ' "points": ['
    rows = []
    for point in entries:
        content = point._asdict()
        for name in (FORWARD, BACKWARD):
            content[name] = {k: float(f"{v:.4g}") for k, v in sorted(content[name].items())}
        rows.append("  " + json.dumps(content))
    yield ",\n".join(rows)
    yield " ]"
    yield "}"


def main() -> int:
    """Write the table of GPU times, and print the numbers of its predicted and measured points."""
    text = "\n".join(lines(points())) + "\n"
    TABLE.write_text(text, encoding="utf-8")
    print(f"{TABLE}: {text.count(PREDICTED)} predicted, {text.count(MEASURED)} measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
