"""Show which kernels take the time of a forward pass or of a training step on a GPU.

    python -m benchmarks.gpu.profile --engine "fastbert cuda" --model BERT-base --batch 256 \\
        --length 128 [--half-padded] [--train] [--dtype bfloat16] [--trace FILE.json.gz]

The program prints a JSON object for each kernel: its name, its launches and its microseconds, per
pass. The last object has the sum over the kernels and the time between the starts of two passes,
whose difference is the time in which the GPU waits. The trace, for chrome://tracing or Perfetto,
shows what the CPU does meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from benchmarks.gpu.encoder import FULL, prepared_pass
from fastbert.bench.encoder import EncoderShape, half_padded
from fastbert.bench.training_step import training_step
from fastbert.testing.cases import Inputs

PASSES = 5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="fastbert auto")
    parser.add_argument("--model", choices=list(FULL.models), default="BERT-base")
    parser.add_argument("--batch", type=int, default=256, help="sequences of the batch")
    parser.add_argument("--length", type=int, default=128, help="longest sequence, in tokens")
    parser.add_argument("--half-padded", action="store_true", help="half of the tokens are padding")
    parser.add_argument("--train", action="store_true", help="a pre-training step with AdamW")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--trace", help="file that receives two passes, with the CPU's functions")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    lengths = (options.length,) * options.batch
    if options.half_padded:
        lengths = half_padded(options.batch, options.length)
    shape = EncoderShape("profile", FULL.models[options.model], lengths)
    call = step_of(options.engine, shape, getattr(torch, options.dtype), train=options.train)
    for row in profile(call):
        print(json.dumps(row))
    if options.trace:
        trace(call, options.trace)
    return 0


def step_of(engine: str, shape: EncoderShape, dtype: torch.dtype, *, train: bool) -> Callable:
    """Return a function that runs one pass of ``engine`` on the batch of ``shape``."""
    if train:
        return training_step(engine, shape, 0, "cuda", dtype)
    run = prepared_pass(engine, shape, dtype, "cuda", Inputs({"seed": 0})).run
    return torch.inference_mode()(run)


def profile(call: Callable[[], object]) -> list[dict[str, object]]:
    """Return a row for each kernel of ``call``, the longest first, and a row for the whole."""
    for _ in range(PASSES):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(PASSES):
        call()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / PASSES
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(PASSES):
            call()
        torch.cuda.synchronize()
    launches: defaultdict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.name].append(event.device_time_total)
    rows: list[dict[str, object]] = [
        {"kernel": name[:160], "launches": len(times) / PASSES, "us": round(sum(times) / PASSES, 1)}
        for name, times in sorted(launches.items(), key=lambda item: -sum(item[1]))
    ]
    total = sum(map(sum, launches.values())) / PASSES
    return [*rows, {"kernels_us": round(total, 1), "pass_us": round(1e6 * wall, 1)}]


def trace(call: Callable[[], object], path: str) -> None:
    """Write a trace of two calls, which follow each other without a wait between them."""
    with torch.profiler.profile(with_stack=True) as recorded:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(path)


if __name__ == "__main__":
    sys.exit(main())
