"""The worker threads of a parallel call may not run on the core of the thread that wakes them.

Each case runs in a process of its own, because the tests change the cores of threads.
"""

from __future__ import annotations

import _fresh_python
import pytest

PREAMBLE = """
import os, sys, threading, torch
from fastbert import BertModel
from fastbert.config import BertConfig

torch.set_num_threads(2)
torch.manual_seed(0)
config = BertConfig(vocab_size=99, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=512, max_position_embeddings=64)
model = BertModel(config).eval()
ids = torch.randint(1, 99, (8, 64))
cores = os.sched_getaffinity(0)

def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}

def call():
    with torch.no_grad():
        return model(ids).last_hidden_state

def worker_of_a_call():
    before = tasks()
    first = call()
    (worker,) = tasks() - before
    return first, worker

def without(core):
    return cores - {core} or cores
"""


def run(code: str) -> None:
    done = _fresh_python.run("-c", PREAMBLE + code, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_worker_avoids_the_core_of_its_caller_and_follows_it():
    run("""
first, worker = worker_of_a_call()
for core in [*cores, *cores]:
    os.sched_setaffinity(0, {core})
    assert torch.equal(call(), first)
    assert os.sched_getaffinity(worker) == without(core), (core, os.sched_getaffinity(worker))
    assert os.sched_getaffinity(0) == {core}
""")


def test_a_set_of_cores_that_a_user_gave_to_a_worker_is_kept():
    run("""
_, worker = worker_of_a_call()
first = min(cores)
os.sched_setaffinity(0, {first})
call()
os.sched_setaffinity(worker, {first})
call()
assert os.sched_getaffinity(worker) == {first}, "the caller stays on its core: nothing is set"
other = max(cores)
os.sched_setaffinity(0, {other})
call()
assert os.sched_getaffinity(worker) == {first}, os.sched_getaffinity(worker)
os.sched_setaffinity(0, {first})
call()
assert os.sched_getaffinity(worker) == {first}, "no other core is left"
""")


def test_each_caller_has_workers_of_its_own():
    run("""
def caller(core):
    torch.set_num_threads(2)
    os.sched_setaffinity(0, {core})
    for _ in range(20):
        results.append(call())

results = [call()]
threads = [threading.Thread(target=caller, args=(core,)) for core in [*cores][:4]]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert all(torch.equal(result, results[0]) for result in results)
""")


@pytest.mark.parametrize("threads", [1, 3, 2])
def test_the_workers_of_another_number_of_threads_are_others(threads):
    run(f"""
first = call()
for number in (4, {threads}, 2, 4):
    torch.set_num_threads(number)
    torch.ones(1 << 20).mul_(2)
    for core in cores:
        os.sched_setaffinity(0, {{core}})
        assert torch.equal(call(), first)
""")


def test_a_forked_child_does_not_touch_the_threads_of_its_parent():
    run("""
first, worker = worker_of_a_call()
core = min(cores)
os.sched_setaffinity(0, {core})
call()
child = os.fork()
if child == 0:
    os.sched_setaffinity(0, {max(cores)})
    equal = torch.equal(call(), first)
    os._exit(0 if equal else 1)
assert os.waitpid(child, 0)[1] == 0
""")
