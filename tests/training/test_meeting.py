"""Processes agree on a text even if the store has entries of processes that died earlier."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as distributed

from fastbert.training.meeting import agree


def test_each_attempt_agrees_on_another_text():
    store = distributed.HashStore()
    store.set_timeout(datetime.timedelta(seconds=30))
    agreed = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            texts = set(pool.map(lambda rank: agree(store, rank, 4), range(4)))
            assert len(texts) == 1
            agreed += texts
    assert len(set(agreed)) == 20


def test_an_attempt_that_was_killed_in_the_middle_disturbs_no_other():
    store = distributed.HashStore()
    store.set_timeout(datetime.timedelta(seconds=30))
    # This process wrote its question into the store, and died before the first process answered.
    store.set("question/1", "dead")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree, store, 0, 2)
        while not store.check(["answer/dead"]):
            pass
        assert pool.submit(agree, store, 1, 2).result() == first.result()
