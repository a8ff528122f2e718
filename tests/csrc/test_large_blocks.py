"""The memory of large tensors is kept for the next ones, and is never in use twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import _fresh_python
import pytest
import torch
from _forked import holds_in_a_child
from torch import Tensor

pytest.importorskip("fastbert._C")
# A product with n rows and 1,024 columns in fp32 has n / 256 MiB.
COLUMNS = 1024
WEIGHT = torch.eye(COLUMNS)


def product(x: Tensor) -> Tensor:
    """Return a copy of x, in memory of its own."""
    return torch.ops.fastbert_C.matmul(x, WEIGHT, None, x.dtype)


def rows(mib: int) -> Tensor:
    return torch.randn(mib * 256, COLUMNS)


def test_the_next_tensor_of_about_the_same_size_gets_the_memory_of_a_freed_one():
    x = rows(12)
    y = product(x[:-10])
    address = y.data_ptr()
    del y
    smaller = product(x[:-30])
    assert smaller.data_ptr() == address
    assert torch.equal(smaller, x[:-30])


def test_tensors_in_use_never_share_memory():
    x = rows(4)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(40):
        y = product(x + step)
        kept.append((y, y.clone()))
        if step % 3:
            kept.pop(step % len(kept))
        assert all(torch.equal(mine, copy) for mine, copy in kept)


def test_no_more_is_kept_than_was_in_use_at_one_time():
    """The largest amount that was in use is that of the process, so the process is a new one."""
    code = """
import torch
import fastbert.ops

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def product(x):
    return torch.ops.fastbert_C.matmul(x, weight, None, x.dtype)

torch.set_num_threads(1)
weight = torch.eye(1024)
big, bigger = torch.randn(16 * 256, 1024), torch.randn(24 * 256, 1024)
product(big[:256])
before = resident()
y = product(big)
del y
assert resident() - before > 15, "nothing is kept"
z = product(bigger)
assert resident() - before < 28, "more is kept than was in use"
del z
assert resident() - before < 28
"""
    process = _fresh_python.run("-c", code)
    assert process.returncode == 0, process.stderr


def test_tensors_may_be_freed_by_other_threads():
    x = rows(3)
    shared = [product(x) for _ in range(4)]

    def work() -> None:
        for step in range(30):
            y = product(x + step)
            shared.append(y)
            assert torch.equal(y, x + step)
            shared.pop(0)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result()


def test_a_child_of_a_fork_uses_its_own_copy():
    """The fork happens while another thread allocates, so the child must not wait for that thread.

    The child has one thread, because OpenMP's threads do not survive a fork.
    """
    x = rows(3)
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            product(x[:768])

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(20):
            expected = product(x)

            def is_the_same(expected: Tensor = expected) -> bool:
                torch.set_num_threads(1)
                return all(torch.equal(product(x), expected) for _ in range(3))

            assert holds_in_a_child(is_the_same)
    finally:
        stop.set()
        thread.join()


def test_a_result_can_grow_be_pickled_and_be_shared():
    x = rows(3)
    y = product(x)
    y.resize_(2 * len(x), COLUMNS)
    assert torch.equal(y[: len(x)], x)
    assert torch.equal(product(x).share_memory_(), x)
