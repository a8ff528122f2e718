"""With huge pages, weights have unchanged values, and a forked process copies no page."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastbert._C")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OPS = torch.ops.fastbert_C
MIB = 1 << 20
THREAD = "fastbert-pages"  # name of the thread that moves weights


def huge_bytes(t: torch.Tensor) -> int:
    """Return how many bytes of the memory mapping that contains `t` are in huge pages."""
    size, inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            begin, end = (int(bound, 16) for bound in bounds.groups())
            inside = begin <= t.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            size += int(line.split()[1]) * 1024
    return size


def moved(weights: list[torch.Tensor]) -> None:
    """Move weights to huge pages, and wait until the thread that moves them has ended."""
    OPS.use_huge_pages(weights)
    deadline = time.monotonic() + 60
    while THREAD in names_of_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names_of_threads() -> set[str]:
    names = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # The thread has just ended.
            names.add(path.read_text("utf-8").strip())
    return names


def test_a_forked_process_moves_nothing():
    """A forked process moves no weight to huge pages, because it would copy the parent's pages."""
    weight = torch.arange(4 * MIB, dtype=torch.float32)
    process = os.fork()
    if process == 0:
        before = huge_bytes(weight)
        moved([weight])
        os._exit(int(huge_bytes(weight) > before))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_values_stay_and_the_pages_are_huge():
    """Weights keep their values; where huge pages work, a weight has most of its memory in them."""
    weights, gains = [], []
    for _ in range(6):
        weight = torch.arange(4 * MIB, dtype=torch.float32)  # 16 MiB
        expected, address, before = weight.clone(), weight.data_ptr(), huge_bytes(weight)
        moved([weight, weight.view(2, -1)])
        gains.append(huge_bytes(weight) - before)
        assert weight.data_ptr() == address
        assert torch.equal(weight, expected)
        weight[5] = 7
        assert weight[5] == 7
        weights.append(weight)  # While this tensor lives, the next tensor gets other memory.
    if not ENABLED.exists() or "[never]" in ENABLED.read_text("utf-8"):
        assert set(gains) == {0}
    elif any(gains):  # Linux before 6.1 cannot move memory to huge pages.
        assert max(gains) >= 6 * 2 * MIB


def test_nothing_to_move():
    OPS.use_huge_pages([torch.zeros(0)])


def test_calls_do_not_wait_for_the_pages():
    """A call returns while its weights are still moved, and freed weights do no harm."""
    weights = [torch.zeros(64 * MIB, dtype=torch.uint8) for _ in range(8)]
    begun = time.perf_counter()
    OPS.use_huge_pages(weights)
    handed_over = time.perf_counter() - begun
    del weights
    kept = torch.full((MIB,), 3.0)
    moved([kept])
    took = time.perf_counter() - begun
    assert torch.equal(kept, torch.full((MIB,), 3.0))
    if took > 0.1:  # The system moved memory: 512 MiB take at least as long.
        assert handed_over < took / 2


def test_a_parent_moves_weights_after_a_fork():
    """After a fork, the parent moves the weights of later calls as it did before."""
    alive = []  # Memory of a freed weight would already be in huge pages.

    def gained() -> int:
        weight = torch.arange(4 * MIB, dtype=torch.float32)
        alive.append(weight)
        before = huge_bytes(weight)
        moved([weight])
        assert torch.equal(weight, torch.arange(4 * MIB, dtype=torch.float32))
        return huge_bytes(weight) - before

    before_fork = max(gained() for _ in range(4))
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    assert max(gained() for _ in range(4)) >= before_fork // 2
