"""C++ operators give right results when several Python threads call them at the same time.

`make sanitize` runs this file under ThreadSanitizer, which also finds data races that leave the
results right.
"""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch

from fastbert import ops
from fastbert.testing import parity
from fastbert.testing.cases import OPS
from fastbert.testing.selection import find

THREADS = 4
ROUNDS = 3


@pytest.fixture(autouse=True)
def parallel_loops():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_threads(*bodies):
    """Run all functions at the same time, each in its own thread, and return their results."""
    barrier = threading.Barrier(len(bodies))

    def run(body):
        torch.set_num_threads(2)  # the setting applies to the current thread only
        barrier.wait()
        return [body() for _ in range(ROUNDS)]

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(run, body) for body in bodies]]


def product(operators, x, weight):
    return operators.linear(x, weight, None, None, "gelu", False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_that_share_a_weight_get_the_bits_of_one_thread(operators, dtype):
    x, weight = torch.randn(200, 320).to(dtype), torch.randn(320, 320)
    expected = product(operators, x, weight)
    for results in in_threads(*THREADS * [lambda: product(operators, x, weight)]):
        assert all(torch.equal(result, expected) for result in results)


def test_threads_that_make_and_free_weights_do_not_disturb_each_other(operators):
    def make_and_free():
        x, weight = torch.randn(40, 160), torch.randn(320, 160)
        kept = product(operators, x, weight)
        return torch.equal(kept, product(operators, x, weight.clone()))

    for results in in_threads(*THREADS * [make_and_free]):
        assert all(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_an_operator_has_the_same_bits_on_every_thread(op, dtype, extension):
    for case in find(op, quick=True):
        if parity.refusal(case, "cpu", dtype, "cpu"):
            continue
        inputs = case.inputs(dtype)

        def run(case=case, inputs=inputs):
            function = getattr(ops, case.op)
            return parity.run_with_gradients(function, inputs, {"backend": "cpu"})

        expected = run()
        for results in in_threads(run, run):
            for tensors in results:
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, expected[name]), (case.name, name)
