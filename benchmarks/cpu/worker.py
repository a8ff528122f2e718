"""One engine in a process of its own: a request is a line of JSON, and so is the answer.

python -m benchmarks.cpu.worker ENGINE FOLDER THREADS

Its own process, so that no two thread pools spin against each other while one of them is timed,
and so that the peak of the resident memory is one engine's. The clock runs in here: what a pipe
takes is nobody's time. What libraries print goes to the log.
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
from benchmarks.cpu.runtimes import Built, build

# A call shorter than SHORT_S is repeated for WARM_S before it is timed.
SHORT_S, WARM_S = 0.1, 0.03


class Server:
    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self.engine, self.folder, self.threads = engine, folder, threads
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        self.built: Built | None = None
        self.call: Callable[[int], object] | None = None
        self.seconds = float("inf")  # of a call, as measured last

    def load(self) -> dict[str, Any]:
        """Builds the engine."""
        self.built = build(self.engine, self.config, self.folder, self.threads)
        return {"note": self.built.note}

    def gate(self) -> dict[str, Any]:
        """Why this engine of ours must not be timed: it breaks the tolerance rule; or None."""
        from benchmarks.cpu.parity import refusal

        return {"refused": refusal(self.engine, self.config, self.folder)}

    def shape(self, lengths: list[int]) -> dict[str, Any]:
        """Takes batches of these lengths from now on; the first call, and numbers of its result."""
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

    def training(self, lengths: list[int]) -> dict[str, Any]:
        """Takes training steps on such batches from now on; the first one, and its loss."""
        from benchmarks.cpu.training import stepper

        self.call = stepper(self.engine, self.config, lengths, self.threads)
        start = time.perf_counter()
        loss = self.call(0)
        return {"seconds": time.perf_counter() - start, "loss": float(loss)}

    def measure(self, first: int, calls: int) -> dict[str, Any]:
        """Mean seconds of a call, once the threads and caches are this engine's again: others had
        them meanwhile, and some spin on for longer than a short call takes."""
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
        """Where the time of one call goes."""
        from benchmarks.cpu.breakdown import operations

        assert self.built is not None
        return {"operations": operations(self.built, self.engine, lengths, seconds)}

    def forget_peak(self) -> dict[str, Any]:
        """The peak of the resident memory starts anew from what is held now, freed memory given
        back."""
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
        """Peak of the resident memory, and bytes of prepacked weights where they are counted."""
        return {"peak": resident_peak(), "prepacked": prepacked_bytes()}


def resident_peak() -> int | None:
    """VmHWM in bytes; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0][1]) * 1024 if lines else None


def prepacked_bytes() -> int | None:
    """Bytes of the weights that our products keep prepacked; None in other engines."""
    if "fastbert.ops" not in sys.modules:
        return None
    from fastbert.ops import backend

    count = getattr(backend.EXTENSION, "packed_bytes", None)
    return None if count is None else int(count())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    engine, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    server = Server(engine, folder, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # the driver reports it as this engine's reason
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
