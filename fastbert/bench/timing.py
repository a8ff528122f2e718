"""Timing of functions that take turns in one run on changing inputs; the result is the median."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# All input sets together have at least this number of bytes, unless there are MAX_INPUT_SETS sets.
# The number is more than a last-level cache holds, so that no call finds its inputs in the cache.
ROTATION_BYTES = 128 << 20
MAX_INPUT_SETS = 64
# A shorter sample would mostly measure the clock and the first kernel launch.
SHORTEST_SAMPLE_S = 2e-3
MAX_CALLS_PER_SAMPLE = 1000
LIMIT_SAMPLES = 20


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the 10th and 90th percentile of ``samples`` samples."""

    median: float
    p10: float
    p90: float
    samples: int


def input_sets(bytes_per_set: int, *, at_most: int = MAX_INPUT_SETS) -> int:
    """Return how many input sets overflow the caches together: from 2 to ``at_most``."""
    return max(2, min(at_most, -(-ROTATION_BYTES // max(1, bytes_per_set))))


class Watch(Protocol):
    """An object that measures the mean seconds of several calls of a candidate.

    The calls have the indices from ``first`` to ``first + calls - 1``.
    """

    def measure(self, call: Any, first: int, calls: int) -> float: ...


class Stopwatch:
    """A `Watch` for functions: it uses CUDA events if ``device`` is "cuda", and else a clock."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def measure(self, call: Callable[[int], object], first: int, calls: int) -> float:
        """Return the mean seconds of ``call(first)``, ``call(first + 1)``, … (``calls`` calls)."""
        if not self.on_gpu:
            start = time.perf_counter()
            for index in range(first, first + calls):
                call(index)
            return (time.perf_counter() - start) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for index in range(first, first + calls):
            call(index)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls


def shortest(call: Callable[[int], object], device: str) -> float:
    """Return the seconds per call in the shortest of ``LIMIT_SAMPLES`` samples.

    The function measures limits of the hardware, which a median would not show.
    """
    watch = Stopwatch(device)
    calls = 5 if watch.on_gpu else 1  # One call would include the latency of its launch.
    watch.measure(call, 0, calls)
    return min(watch.measure(call, 0, calls) for _ in range(LIMIT_SAMPLES))


def product_rate(size: int, dtype: torch.dtype, device: str) -> float:
    """Measure the FLOP/s of a matrix product ``(size, size) @ (size, size)`` of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / shortest(lambda _: a @ b, device)


def copy_rate(size: int, device: str) -> float:
    """Measure the rate of a copy of ``size`` bytes, in bytes read and written per second."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / shortest(lambda _: target.copy_(source), device)


def captured(call: Callable[[int], object], calls: int) -> Callable[[int], object]:
    """Return a function that replays a CUDA graph of ``call(0)`` … ``call(calls - 1)``.

    A replay contains the kernels and the gaps between them, without the work of the CPU. The
    current stream must not be the default stream. If ``call`` is a backward pass, its forward pass
    must have run on the current stream.

    Raises:
        RuntimeError: If the call synchronizes, or cannot be captured for another reason.
    """
    for index in range(calls):
        call(index)  # Compilations and allocations must happen before the capture.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(calls):
            call(index)
    return lambda _: graph.replay()


def peak_memory(call: Callable[[int], object]) -> int | None:
    """Return the peak of the device memory that one call adds, in bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def alternate(
    candidates: Mapping[str, Any],
    *,
    device: str = "cpu",
    seconds: float = 1.0,
    min_samples: int = 5,
    max_samples: int = 50,
    watch: Watch | None = None,
    once: Mapping[str, float] | None = None,
    settle: float = 0.0,
) -> dict[str, Timing]:
    """Time the candidates in turns and return one ``Timing`` per name.

    Every round takes one sample of each candidate. The order rotates by one from round to round, so
    that a slow moment of the machine or a warm cache favours no candidate.

    Args:
        candidates: Functions of an index, by which a candidate picks one of its input sets.
        device: Device of the calls, which selects the stopwatch.
        seconds: Limit of the total time, once there are ``min_samples`` samples.
        min_samples, max_samples: Limits of the number of samples.
        watch: Object that measures the candidates; None is a `Stopwatch`. Another object can
            measure candidates that are not functions of this process.
        once: Seconds of one call of each candidate after a warm-up, which the caller has measured.
            These times are the first samples.
        settle: Pause before each sample, in seconds.
    """
    watch = watch or Stopwatch(device)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    if once is not None:
        samples = {name: [once[name]] for name in candidates}
    else:
        once = {}
        for name, candidate in candidates.items():
            watch.measure(candidate, 0, 1)  # This call compiles, allocates and packs weights.
            once[name] = watch.measure(candidate, 1, 1)
    calls = {
        name: min(MAX_CALLS_PER_SAMPLE, max(1, int(SHORTEST_SAMPLE_S / max(once[name], 1e-9))))
        for name in candidates
    }
    names = list(candidates)
    deadline = time.perf_counter() + seconds
    first = len(samples[names[0]]) if names else 0
    for turn in range(first, max_samples):
        if turn >= min_samples and time.perf_counter() > deadline:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if settle:
                time.sleep(settle)
            samples[name].append(
                watch.measure(candidates[name], 2 + turn * calls[name], calls[name])
            )
    return {name: summarize(times) for name, times in samples.items()}


def percentile(times: Sequence[float], share: float) -> float:
    """Return the shortest of the times that at least this share of the times does not exceed."""
    return sorted(times)[max(1, math.ceil(share * len(times))) - 1]


def summarize(times: Sequence[float]) -> Timing:
    """Return the median and two percentiles of some times.

    For fewer than ten times, the percentiles are the minimum and the maximum.
    """
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Timing(
        statistics.median(ordered), ordered[tenth], ordered[len(ordered) - 1 - tenth], len(ordered)
    )
