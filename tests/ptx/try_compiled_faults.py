"""Insert mistakes into compiled kernels, and print the outcome of each as JSON.

    python tests/ptx/try_compiled_faults.py [NAME ...]    # the named faults, or all

Each case first runs without a fault, and must pass. The environment variables must be those of
`fastbert.ops.backend.compiler_environment`, as in test_compiled_faults.py.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from compiled_faults import CASES, FAULTS, UNCAUGHT, CompiledFault

from fastbert.testing import parity
from fastbert.testing.ptx.triton_launches import Binary, Emulator, serving_triton
from ptxmachine import PtxFault

# A fault may cause an endless loop. In a correct kernel, a warp executes far fewer instructions.
LONGEST = 1_000_000


class Broken(Emulator):
    """An emulator that inserts a fault into every launch whose name is ``fault.launch``."""

    def __init__(self, fault: CompiledFault) -> None:
        super().__init__(fault.arch, seed=1, threads=1, limit=LONGEST)
        self.fault = fault

    def binary(self, launch: Any) -> Binary:
        binary = super().binary(launch)
        if launch.name != self.fault.launch:
            return binary
        return binary._replace(ptx=self.fault.broken(binary.ptx))


def judge(emulator: Emulator, case: str, dtype: str) -> str:
    """Run a case on an emulator; return the machine's error, the failed tensors, or ""."""
    try:
        with serving_triton(emulator.arch, emulator.run):
            results = parity.check_case(CASES[case], "triton", getattr(torch, dtype))
    except PtxFault as fault:
        return f"{fault.kind}: {fault}"
    return ", ".join(f"{result}" for result in results if not result.passed)


def try_fault(fault: CompiledFault) -> dict[str, str]:
    """Try a fault; if it removes a mask, try it with several memory layouts.

    An access without its mask, beyond the end of a tensor, may reach another tensor. The machine
    allows this access, and the result may be right. This depends on the addresses of the tensors.
    """
    held: list[torch.Tensor] = []
    for attempt in range(4 if fault.kind in ("load_mask", "store_mask") else 1):
        # These allocations change the addresses of the tensors in the next attempt.
        held += [torch.empty(3000 * (attempt + 1) + 700 * i) for i in range(attempt)]
        found = judge(Broken(fault), fault.case, fault.dtype)
        if found:
            break
    return {"name": str(fault), "found": found}


def try_all(faults: list[CompiledFault]) -> list[dict[str, str]]:
    """Try the faults of one case, after checking that the case passes without a fault."""
    arch, case, dtype = faults[0].arch, faults[0].case, faults[0].dtype
    found = judge(Emulator(arch, seed=1, threads=1), case, dtype)
    if found:
        raise RuntimeError(f"sm_{arch} {case} {dtype} fails without a fault: {found}")
    return [try_fault(fault) for fault in faults]


def main() -> None:
    torch.set_num_threads(1)
    # New memory is filled with NaN, which reveals elements that no kernel has written.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    names = sys.argv[1:] or [str(fault) for fault in (*FAULTS, *UNCAUGHT)]
    groups: dict[tuple[int, str, str], list[CompiledFault]] = {}
    for fault in (*FAULTS, *UNCAUGHT):
        if str(fault) in names:
            groups.setdefault((fault.arch, fault.case, fault.dtype), []).append(fault)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for outcomes in pool.imap_unordered(try_all, groups.values()):
            for outcome in outcomes:
                print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
