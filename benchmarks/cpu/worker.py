"""Run one implementation in its own process; each request and each answer is a line of JSON.

    python -m benchmarks.cpu.worker ENGINE FOLDER THREADS

In separate processes, the thread pools of other implementations do not spin on the cores of a timed
implementation, and the peak of the resident memory belongs to one implementation. The worker
measures the time, so that no time includes the pipe. The output of libraries goes to the log.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.batches import batches, sample
from benchmarks.cpu.exactness import padded, pooled
from benchmarks.cpu.runtimes import BY_NAME, Built, build, refusal

# A call shorter than SHORT_S is repeated for WARM_S before it is timed.
SHORT_S, WARM_S = 0.1, 0.03


class Server:
    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self.engine, self.folder, self.threads = engine, folder, threads
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        self.built: Built | None = None
        self.call: Callable[[int], object] | None = None
        self.seconds = float("inf")  # seconds of a call in the last measurement

    def load(self) -> dict[str, Any]:
        """Build the implementation."""
        self.built = build(self.engine, self.config, self.folder, self.threads)
        return {"note": self.built.note}

    def gate(self) -> dict[str, Any]:
        """Return the reason if this variant of fastbert breaks the tolerance rule, else None."""
        return {"refused": refusal(self.engine, self.config)}

    def shape(self, lengths: list[int]) -> dict[str, Any]:
        """Use batches with `lengths` in later calls; return the first call's seconds and sample."""
        assert self.built is not None
        built, made = self.built, batches(self.config["vocab_size"], lengths)
        built.prepare(len(lengths), max(lengths))
        inputs = [built.inputs(batch) for batch in made]
        self.call = lambda index: built.call(inputs[index % len(inputs)])
        gc.collect()
        if built.compiles:
            self.call(0)
        start = time.perf_counter()
        result = self.call(0)
        self.seconds = seconds = time.perf_counter() - start
        return {"seconds": seconds, "sample": sample(built.array(result), made[0])}

    def embed(self, ids: list[list[int]]) -> dict[str, Any]:
        """Return the embedding of each sequence of token ids."""
        assert self.built is not None
        built, vectors = self.built, []
        for batch in padded(ids):
            built.prepare(*batch["input_ids"].shape)
            hidden = built.array(built.call(built.inputs(batch)))
            vectors += pooled(hidden, batch).tolist()
        return {"embeddings": vectors}

    def imports(self) -> dict[str, Any]:
        """Import the modules of the training step, and return the resident memory in bytes."""
        from fastbert.bench.encoder import STOCK
        from fastbert.bench.training_step import trainee
        from fastbert.config import BertConfig

        tiny = BertConfig.preset("tiny", vocab_size=64)
        trainee("fastbert auto" if BY_NAME[self.engine].ours else f"{STOCK}eager", tiny, "cpu")
        trainee.cache_clear()
        self.forget_peak()
        return {"resident": resident_peak()}

    def training(self, lengths: list[int]) -> dict[str, Any]:
        """Train on batches with `lengths` in later calls; return the first step's time and loss."""
        from benchmarks.cpu.training import stepper

        self.call = stepper(self.engine, self.config, lengths, self.threads)
        start = time.perf_counter()
        loss = self.call(0)
        return {"seconds": time.perf_counter() - start, "loss": float(loss)}

    def task(self, task: str, **work: Any) -> dict[str, Any]:
        """Do the work of a task in later calls; return the first call's seconds and its result."""
        from benchmarks.cpu import jobs

        job = jobs.begin(task, self.engine, self.folder, self.threads, **work)
        self.call = job.call
        start = time.perf_counter()
        result = self.call(0)
        self.seconds = seconds = time.perf_counter() - start
        results = [result, *(self.call(index) for index in range(1, job.compared))]
        numbers = [job.numbers(result) for result in results]
        return {"seconds": seconds, "sample": numbers, "note": job.note}

    def arrivals(self, gaps: list[float]) -> dict[str, Any]:
        """Return the seconds of one call for each gap.

        A call is due ``gap`` seconds after the call before it was due. A call that is late begins
        at once, and the time of a call does not include the delay.
        """
        assert self.call is not None
        times, due = [], time.perf_counter()
        for index, gap in enumerate(gaps):
            due = max(due + gap, time.perf_counter())
            if (pause := due - time.perf_counter()) > 0:
                time.sleep(pause)
            start = time.perf_counter()
            self.call(index)
            times.append(time.perf_counter() - start)
        return {"times": times}

    def measure(self, first: int, calls: int) -> dict[str, Any]:
        """Return the mean seconds of a call.

        Short calls are first repeated for WARM_S. Other implementations have used the caches since
        the last measurement, and some of their threads spin for longer than a short call takes.
        """
        assert self.call is not None
        if self.seconds < SHORT_S:
            end = time.perf_counter() + WARM_S
            while time.perf_counter() < end:
                self.call(first)
        start = time.perf_counter()
        for index in range(first, first + calls):
            self.call(index)
        self.seconds = (time.perf_counter() - start) / calls
        return {"seconds": self.seconds}

    def breakdown(self, lengths: list[int], seconds: float) -> dict[str, Any]:
        """Return the time of each operation in one call."""
        from benchmarks.cpu.breakdown import operations

        assert self.built is not None
        return {"operations": operations(self.built, self.engine, lengths, seconds)}

    def forget_peak(self) -> dict[str, Any]:
        """Return freed memory to the system and reset the peak of the resident memory."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError as error:
            return {"forgot": False, "why": str(error)}
        return {"forgot": True}

    def peak(self) -> dict[str, Any]:
        """Return the peak of the resident memory in bytes."""
        return {"peak": resident_peak()}


def resident_peak() -> int | None:
    """Return VmHWM in bytes, or None if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0][1]) * 1024 if lines else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    engine, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    server = Server(engine, folder, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # The driver reports the error as the reason for a refusal.
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
