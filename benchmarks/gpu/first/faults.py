"""Insert mistakes into the backend that replaces CUDA C++ in a rehearsal, and run a program.

    python -m benchmarks.gpu.first.faults benchmarks.gpu.first.smoke --backend cpu ...

- attention: every call hangs, like a kernel that waits for ever, and the canary detects the hang.
  The call advances the clock of its case, so that the rehearsal need not wait for the limit.
- layer_norm: the case with 29 rows hangs; the canary does not run this case.
- linear_gelu and feed_forward, which share their kernels: a launch with 33 rows, which a case of
  linear_gelu has, is refused. The result for 65 rows, which the case of feed_forward has, is wrong.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.gpu.first import watch
from fastbert.ops import backend as backends

STAND_IN = "cpu"
HANG_S = 3600
REFUSAL = "CUDA error: invalid argument"


def hang(x: Tensor, result: Callable[[], Any]) -> Any:
    watch.now = lambda: time.monotonic() + HANG_S
    time.sleep(HANG_S)


def hang_at_29_rows(x: Tensor, result: Callable[[], Any]) -> Any:
    return hang(x, result) if x.shape[0] == 29 else result()


def refuse_33_rows_and_miss_65(x: Tensor, result: Callable[[], Any]) -> Any:
    if x.shape[0] == 33:
        raise RuntimeError(REFUSAL)
    y, h = result()
    return (1.5 * y if x.shape[0] == 65 else y), h


FAULTS: dict[str, Callable[[Tensor, Callable[[], Any]], Any]] = {
    "attention": hang,
    "layer_norm": hang_at_29_rows,
    "feed_forward": refuse_33_rows_and_miss_65,
}


def install() -> None:
    """Insert each mistake into the forward pass of the backend that replaces CUDA C++."""
    for name, fault in FAULTS.items():
        row = backends.TABLES[name][STAND_IN]
        backends.TABLES[name][STAND_IN] = dataclasses.replace(
            row, forward=_faulty(row.forward, fault)
        )


def _faulty(honest: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, *arguments: Any) -> Any:
        return fault(x, lambda: honest(x, *arguments))

    return forward


def main() -> None:
    """Insert the mistakes and run the module that the first argument names."""
    import fastbert.ops  # noqa: F401  # registers the operations

    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
