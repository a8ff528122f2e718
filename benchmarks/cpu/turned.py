"""Products that keep no copy of a weight, in turns with products of prepacked weights.

Run ``python -m benchmarks.cpu.turned``. The weights of a whole model take turns, so that they are
not in the cache, and the two products of a weight follow each other. The times are processor times
of one thread, so other processes on the machine change them less than times on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from fastbert.ops import backend as backends

MODELS = {"BERT-base": (768, 12), "MiniLM": (384, 6)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Print a table: the time with a prepacked weight divided by the time without a copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", nargs="+", default=["amx", "avx512_bf16", "avx512", "avx2"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 128, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| level | dtype | model | rows | query, key, value | projection | inner | outer | all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for level in arguments.levels:
        backends.EXTENSION.set_cpu_isa(level)
        for name in arguments.dtypes:
            for model in MODELS:
                for ratios in _ratios(model, DTYPES[name], arguments.rows, arguments.rounds):
                    print(f"| {level} | {name} | {model} | {' | '.join(ratios)} |", flush=True)
    backends.EXTENSION.set_cpu_isa(None)


def _ratios(model: str, dtype: torch.dtype, rows: list[int], rounds: int) -> Iterator[list[str]]:
    """Yield, for each number of rows, the number and the ratios of the products and of all."""
    size, layers = MODELS[model]
    shapes = [(3 * [size], size), ([size], size), ([4 * size], size), ([size], 4 * size)]
    weights = [
        [[torch.randn(n, k).to(dtype) for n in parts] for parts, k in shapes] for _ in range(layers)
    ]
    joined = [[torch.cat(parts) if len(parts) > 1 else parts[0] for parts in w] for w in weights]
    operators = torch.ops.fastbert_C
    for count in rows:
        inputs = [torch.randn(count, k).to(dtype) for _, k in shapes]
        times: list[list[tuple[float, float]]] = [[] for _ in shapes]
        for _ in range(rounds + 1):
            for layer in range(layers):
                for i, x in enumerate(inputs):
                    activation = "gelu" if i == 2 else "none"
                    start = time.thread_time()
                    operators.linear(x, joined[layer][i], None, None, activation, False)
                    middle = time.thread_time()
                    operators.linear_of_parts(x, weights[layer][i], [], activation)
                    times[i].append((middle - start, time.thread_time() - middle))
        # The first round packs the weights.
        medians = [
            [statistics.median(column) for column in zip(*t[layers:], strict=True)] for t in times
        ]
        medians.append([sum(column) for column in zip(*medians, strict=True)])
        yield [str(count), *(f"{kept / read:.2f}" for kept, read in medians)]
    backends.EXTENSION.forget_packed()


if __name__ == "__main__":
    main()
