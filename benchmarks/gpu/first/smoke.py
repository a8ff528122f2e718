"""Run cases several times, and check that all results are finite and the same in each run.

    python -m benchmarks.gpu.first.smoke --backend triton --shard 0/16 --reruns 20

The program prints a JSON object for each case: before its runs, and again after them with the
result and the kernels that were launched. After an error of the device or a case that hangs, later
cases in the process would fail too, so the program then starts itself again with the next case. A
case counts as hung if it takes longer than ``--limit``, not counting the compilation of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.first.watch import limited
from fastbert import ops
from fastbert.ops import backend as backends
from fastbert.testing import parity
from fastbert.testing.cases import CASES, OPS, TABLE_OF, Case
from fastbert.testing.launches import counted

# Seconds that one case may take, without its compilation.
CASE_LIMIT_S = 8.0
MARK = "smoke"
DTYPES = ("bfloat16", "float16", "float32")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=backends.BACKENDS, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--op", choices=OPS, help="only this operation")
    parser.add_argument(
        "--family", choices=list(backends.TABLES), help="only operations with this backend table"
    )
    parser.add_argument("--quick", action="store_true", help="only the quick cases")
    parser.add_argument("--reruns", type=int, default=20, help="runs after the first")
    parser.add_argument("--shard", default="0/1", help="number of the shard / number of shards")
    parser.add_argument("--first", type=int, default=0, help="number of the first case to run")
    parser.add_argument(
        "--limit", type=float, default=CASE_LIMIT_S, help="seconds of a case without compilation"
    )
    parser.add_argument("--emulate", type=int, help="run on the PTX machine, as 90 for sm_90")
    options = parser.parse_args()
    with emulation(options.emulate):
        return run(options)


@contextlib.contextmanager
def emulation(arch: int | None) -> Iterator[None]:
    """Run Triton launches on CPU tensors on the PTX machine, unless ``arch`` is None."""
    if arch is None:
        yield
        return
    from fastbert.testing.ptx.triton_launches import emulated

    with emulated(arch):
        yield


def selected(options: argparse.Namespace, device: str) -> list[Case]:
    """Return this shard of the cases that fit the options and that the backend serves."""
    number, shards = map(int, options.shard.split("/"))
    dtype = getattr(torch, options.dtype)
    cases = [
        case
        for case in CASES
        if options.op in (None, case.op)
        and options.family in (None, TABLE_OF[case.op])
        and (case.quick or not options.quick)
        and parity.refusal(case, options.backend, dtype, device) is None
    ]
    return cases[number::shards]


def run(options: argparse.Namespace) -> int:
    """Run the cases from ``--first`` on; return 1 if one of them failed, else 0."""
    on_gpu = options.backend in ("triton", "cuda") and not options.emulate
    device = "cuda" if on_gpu else "cpu"
    cases = selected(options, device)
    failed = False
    for number in range(options.first, len(cases)):
        case = cases[number]
        said = {MARK: "started", "op": case.op, "case": case.name, "backend": options.backend}
        say(said)
        start = time.monotonic()
        give_up = functools.partial(restart, said, number + 1)
        with limited(options.limit, functools.partial(give_up, f"{options.limit} s")):
            result = tried(case, options, device)
            if result["faults"] and device == "cuda" and not device_works():
                give_up("; ".join(result["faults"]))
        failed = failed or bool(result["faults"])
        say({**said, MARK: "done", **result, "seconds": round(time.monotonic() - start, 2)})
    return 1 if failed else 0


def tried(case: Case, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the result of `smoke`; if the case raises, the error is the only entry of faults."""
    try:
        return smoke(case, options, device)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"faults": [reason], "kernels": {}}


def smoke(case: Case, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Run a case once and ``--reruns`` times more, and return its faults and its launches."""
    inputs = case.inputs(getattr(torch, options.dtype), device)
    function, extra = getattr(ops, case.op), {"backend": options.backend}

    def once() -> dict[str, torch.Tensor]:
        return parity.run_with_gradients(function, inputs, extra)

    with counted() as launches:
        first = once()
    # The output for a query without visible keys is 0, so every result must be finite.
    faults = [f"{name} is not finite" for name, x in first.items() if not x.isfinite().all()]
    for number in range(options.reruns):
        again = once()
        changed = [name for name, x in again.items() if not torch.equal(x, first[name])]
        if changed:
            faults.append(f"rerun {number + 1} has other bits in {', '.join(changed)}")
            break
    return {"faults": faults, "kernels": dict(launches.kernels)}


def device_works() -> bool:
    """Tell whether the CUDA context still runs kernels."""
    try:
        torch.ones(1, device="cuda").add(1).cpu()
    except Exception:
        return False
    return True


def restart(said: dict[str, Any], first: int, reason: str) -> None:
    """Report the case as failed, and start the program again with the next case."""
    say({**said, MARK: "done", "faults": [f"the process was given up: {reason}"], "kernels": {}})
    # These words begin with ``-m`` and a module: this program, or the program that started it.
    words = sys.orig_argv[1:]
    if "--first" in words:
        at = words.index("--first")
        del words[at : at + 2]
    os.execv(sys.executable, [sys.executable, *words, "--first", str(first)])


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    sys.exit(main())
