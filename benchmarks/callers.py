"""Measure one model under the calls of several threads or processes, on the real MiniLM checkpoint.

    python -m benchmarks.callers [--out out/callers] [--seconds 5] [--words 30] [--callers 1 4 16]

Each caller sends a text, waits for the embedding and sends the next text. The contenders are an
`Embedder` that all threads call, a `DynamicBatcher` in front of it, one process for each caller
with one thread of torch each, and stock sentence-transformers in threads. The contenders take
turns. The results are the calls per second of all callers together, and the median and the 99th
percentile of the time of a call. The program requires that the `DynamicBatcher` returns bitwise the
same embeddings as single calls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fastbert import json_file
from fastbert.bench.quantized_accuracy import model_folder, real_sentences
from fastbert.bench.timing import percentile
from fastbert.inference import DynamicBatcher, Embedder, quantize
from fastbert.machine import describe

PAUSE_S = 0.3
FORMATS = ("fp32", "bf16", "int8")


def embedder(form: str) -> Embedder:
    """Return the model in fp32 or bf16, or with int8 weights and activations in bf16."""
    model = Embedder(str(model_folder()))
    if form != "fp32":
        model.encoder.to(torch.bfloat16)
    if form == "int8":
        quantize(model.encoder, inplace=True)
    return model


def stock() -> Callable[[str], Any]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder()), device="cpu")
    return lambda text: model.encode(text, show_progress_bar=False)


def drawn_texts(words: int, count: int = 256) -> list[str]:
    """Return `count` texts of `words` words each, joined from randomly drawn real sentences."""
    draw, sentences = random.Random(0), real_sentences(count)
    joined = (" ".join(draw.sample(sentences, 20)).split() for _ in range(count))
    return [" ".join(text[:words]) for text in joined]


def times_of_a_caller(
    call: Callable[[str], Any], texts: Sequence[str], seconds: float
) -> list[float]:
    """Call in a loop for `seconds`, and return the duration of each call in seconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call(texts[len(times) % len(texts)])
        times.append(time.perf_counter() - start)
    return times


def from_threads(
    call: Callable[[str], Any], texts: Sequence[str], callers: int, seconds: float
) -> list[float]:
    """Return the duration in seconds of each call, over `callers` threads."""
    times: list[float] = []
    threads = [
        threading.Thread(target=lambda k=k: times.extend(
            times_of_a_caller(call, texts[k:] + texts[:k], seconds)
        ))
        for k in range(callers)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


_OWN: dict[str, Embedder] = {}


def in_a_process(form: str, texts: Sequence[str], seconds: float) -> list[float]:
    """Return the duration in seconds of each call of this process, with one thread of torch."""
    torch.set_num_threads(1)
    if form not in _OWN:
        _OWN[form] = embedder(form)
        _OWN[form](texts[0])
    return times_of_a_caller(_OWN[form], texts, seconds)


def from_processes(form: str, texts: Sequence[str], callers: int, seconds: float) -> list[float]:
    """Return the duration in seconds of each call, over `callers` processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(callers, mp_context=context) as pool:
        for length in (0.2, seconds):
            turns = [pool.submit(in_a_process, form, texts, length) for _ in range(callers)]
            found = [turn.result() for turn in turns]
    return [value for values in found for value in values]


def row(name: str, callers: int, times: list[float], seconds: float) -> dict[str, Any]:
    return {
        "contender": name,
        "callers": callers,
        "calls_per_second": len(times) / seconds,
        "p50_ms": 1e3 * percentile(times, 0.5),
        "p99_ms": 1e3 * percentile(times, 0.99),
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['contender']:<24} {row['callers']:>3} callers"
        f" {row['calls_per_second']:>7,.0f} calls/s"
        f"  p50 {row['p50_ms']:>7.2f} ms  p99 {row['p99_ms']:>7.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/callers"), help="folder that receives the results"
    )
    parser.add_argument("--seconds", type=float, default=5, help="seconds of each measurement")
    parser.add_argument("--words", type=int, default=30, help="words of a text")
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = drawn_texts(options.words)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[str], Any]] = {"stock fp32": stock()}
    for form in options.formats:
        model = embedder(form)
        batcher = DynamicBatcher(model)
        calls[f"Embedder {form}"], calls[f"DynamicBatcher {form}"] = model, batcher
        if not torch.equal(batcher(texts), torch.stack([model(text) for text in texts])):
            raise SystemExit(f"the bits of merged calls differ from those of single calls: {form}")
    for callers in options.callers:
        for name, call in calls.items():
            from_threads(call, texts, callers, 0.2)
            time.sleep(PAUSE_S)
            times = from_threads(call, texts, callers, options.seconds)
            rows.append(row(name, callers, times, options.seconds))
            print(line(rows[-1]), flush=True)
        for form in options.formats if callers <= 4 else ():
            times = from_processes(form, texts, callers, options.seconds)
            rows.append(row(f"processes {form}", callers, times, options.seconds))
            print(line(rows[-1]), flush=True)
    machine = describe()
    settings = {"seconds": options.seconds, "words": options.words, "threads": options.threads}
    content = {"machine": machine, "settings": settings, "rows": rows}
    json_file.write(options.out / "callers.json", content, json_file.record)
    print(f"written: {options.out}/callers.json; {options.threads} threads, {machine.cpu}")


if __name__ == "__main__":
    main()
