"""The limits of this machine, measured in each run: rates of products by format, and of memory.

The products come from a loop in C on operands in registers or the L1 cache (``peak.c``), which is
compiled for this processor. Without a C compiler, the limit is the best rate of torch's matmul, and
the header says so. The memory limit is the rate of a copy larger than the caches, in bytes read and
written per second.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fastbert.bench.limits import Limits
from fastbert.bench.timing import copy_rate, product_rate

FORMATS = ("fp32", "bf16", "int8")
COPY_BYTES = 256 << 20
# Seconds of one sample. Of many short samples, the fastest was not disturbed by other programs.
SAMPLE_S = 0.005
SAMPLES = 20


@dataclass(frozen=True)
class Ceilings:
    """The rates of all threads together: operations/s and computing unit by format, and bytes/s.

    ``torch_*`` are the FLOP/s of torch's matmul, from which the duration of the run is estimated.
    """

    threads: int
    products: dict[str, float]
    units: dict[str, str]
    bytes: float
    torch_fp32: float
    torch_bf16: float

    def limits(self, form: str) -> Limits:
        """Return the ceilings as limits of a chip; a CPU has no unit for exponentials."""
        rate = self.products[form]
        return Limits(self.units[form], rate, self.bytes, rate, self.bytes, float("inf"))

    def lines(self) -> list[str]:
        products = ", ".join(
            f"{form} {self.products[form] / 1e9:,.0f} ({self.units[form]})" for form in FORMATS
        )
        return [
            f"limits of {self.threads} threads, in 10⁹ operations/s: {products}; "
            f"copy {self.bytes / 1e9:.1f} GB/s",
            f"products of torch: fp32 {self.torch_fp32 / 1e9:,.0f}, "
            f"bf16 {self.torch_bf16 / 1e9:,.0f} GFLOP/s",
        ]


def measure(threads: int, *, size: int = 1024, copied: int = COPY_BYTES) -> Ceilings:
    """Measure each ceiling as the best of a few short samples, because a median is not a limit."""
    torch.set_num_threads(threads)
    fp32 = product_rate(size, torch.float32, "cpu")
    bf16 = product_rate(size, torch.bfloat16, "cpu")
    products, units = _peaks(threads)
    for form, by_torch in (("fp32", fp32), ("bf16", bf16)):
        if not products.get(form):
            products[form], units[form] = by_torch, "torch matmul"
    # Some processors multiply operands that were widened to fp32 faster than operands in bf16.
    if products["bf16"] < products["fp32"]:
        products["bf16"], units["bf16"] = products["fp32"], f"widened, {units['fp32']}"
    if not products.get("int8"):
        products["int8"], units["int8"] = products["fp32"], "as fp32"
    return Ceilings(threads, products, units, copy_rate(copied, "cpu"), fp32, bf16)


def _peaks(threads: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return rates and units by format; both are empty if no C compiler can compile the loop."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        return {}, {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peak.so"
        source = Path(__file__).with_name("peak.c")
        command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", target, source]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return {}, {}
        library = ctypes.CDLL(str(target))
    rates, units = {}, {}
    for form in FORMATS:
        function, unit = getattr(library, f"peak_{form}"), getattr(library, f"unit_{form}")
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
        unit.restype = ctypes.c_char_p
        rates[form] = max(_rate(function, threads) for _ in range(SAMPLES))
        units[form] = unit().decode()
    return rates, units


def _rate(function: Callable[[int], float], threads: int) -> float:
    """Return the operations per second of all threads together; ctypes releases the GIL."""
    rounds = 1 << 12
    while True:
        rates, seconds = [0.0] * threads, [0.0] * threads

        def run(index: int, rounds: int = rounds, rates=rates, seconds=seconds) -> None:
            start = time.perf_counter()
            done = function(rounds)
            seconds[index] = time.perf_counter() - start
            rates[index] = done / seconds[index]

        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if min(seconds) > SAMPLE_S / 2 or not all(rates):
            return sum(rates)
        rounds *= 2
