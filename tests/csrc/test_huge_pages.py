"""With huge pages, weights have unchanged values, and a forked process copies no page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastbert._C")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OPS = torch.ops.fastbert_C
MIB = 1 << 20


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


def test_a_forked_process_moves_nothing():
    """A forked process moves no weight to huge pages, because it would copy the parent's pages."""
    weight = torch.arange(4 * MIB, dtype=torch.float32)
    process = os.fork()
    if process == 0:
        before = huge_bytes(weight)
        OPS.use_huge_pages([weight])
        os._exit(int(huge_bytes(weight) > before))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_values_stay_and_the_pages_are_huge():
    """Weights keep their values; where huge pages work, a weight has most of its memory in them."""
    weights, gains = [], []
    for _ in range(6):
        weight = torch.arange(4 * MIB, dtype=torch.float32)  # 16 MiB
        expected, address, before = weight.clone(), weight.data_ptr(), huge_bytes(weight)
        OPS.use_huge_pages([weight, weight.view(2, -1)])
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
