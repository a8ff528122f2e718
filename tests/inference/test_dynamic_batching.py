"""Calls from several threads are merged into batches, and each caller gets its own rows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import _fresh_python
import pytest
import torch

from fastbert.config import BertConfig
from fastbert.data import Encoded, stories, train_tokenizer
from fastbert.inference import DynamicBatcher, Embedder, OverloadedError
from fastbert.modules import BertModel

WORDS = ["the", "old", "mill", "by", "a", "river", "dog", "ran", "over", "hill", "and", "saw"]


class Model:
    """A model that maps a text to its length and the sum of its ids, of which each letter has one.

    While `gate` is closed, a batch waits. The list `batches` has the texts of each batch. A batch
    with a text in `poisoned` fails.
    """

    device = torch.device("cpu")

    def __init__(self, poisoned=()):
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.batches, self.poisoned = [], set(poisoned)

    def tokenizer(self, texts):
        if not texts[0]:
            raise ValueError("no tokens")
        return Encoded([ord(c) for c in "".join(texts)], [], False)

    def forward(self, batch):
        ids, ends = batch["input_ids"].tolist(), batch["cu_seqlens"].tolist()
        lines = [ids[a:b] for a, b in itertools.pairwise(ends)]
        texts = ["".join(map(chr, line)) for line in lines]
        self.batches.append(texts)
        self.begun.set()
        assert self.gate.wait(60)
        if self.poisoned & set(texts):
            raise RuntimeError(f"poison in {texts}")
        return torch.tensor([[len(line), sum(line)] for line in lines], dtype=torch.float64)


def row(text):
    return [float(len(text)), float(sum(map(ord, text)))]


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def busy(model):
    """Return a function that starts a batcher, which computes "first" until the gate opens."""
    batchers = []

    def start(**options):
        batcher = DynamicBatcher(model, **options)
        batchers.append(batcher)
        model.gate.clear()
        first = batcher.submit("first")
        assert model.begun.wait(60)
        return batcher, first

    yield start
    model.gate.set()
    for batcher in batchers:
        batcher.close()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(stories(50, seed=0), 200)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return Embedder(str(folder), normalize=True)


def texts_of(seed, count):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.choice([1, 3, 8, 30, 90]))) for _ in range(count)]


@pytest.mark.parametrize(
    "calls", [400, pytest.param(10_000, marks=pytest.mark.every_case)], ids=str
)
def test_a_merged_call_has_the_bits_of_a_call_alone(embedder, calls):
    texts = texts_of(0, 100)
    alone = [embedder(text) for text in texts]
    draw = random.Random(1)
    asked = [draw.choices(range(len(texts)), k=draw.choice([1, 1, 1, 2, 5])) for _ in range(calls)]
    with DynamicBatcher(embedder, tokens_per_batch=300) as batcher, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda numbers: batcher([texts[n] for n in numbers]), asked))
    differences = [
        numbers
        for numbers, rows in zip(asked, found, strict=True)
        if not torch.equal(rows, torch.stack([alone[n] for n in numbers]))
    ]
    assert differences == []


def test_waiting_calls_become_batches_in_the_order_of_arrival(busy, model):
    batcher, first = busy(tokens_per_batch=10)
    later = [batcher.submit(text) for text in ("aaaa", ["bbb", "ccc"], "d" * 15, "ee")]
    model.gate.set()
    rows = [future.result(60).tolist() for future in (first, *later)]
    assert rows == [row("first"), row("aaaa"), [row("bbb"), row("ccc")], row("d" * 15), row("ee")]
    # No text waits for a text that came later, even if the later text would fill up a batch.
    assert model.batches == [["first"], ["aaaa", "bbb", "ccc"], ["d" * 15], ["ee"]]


def test_a_call_may_need_several_batches(busy, model):
    batcher, _ = busy(tokens_per_batch=4)
    many = batcher.submit(["aa", "bb", "cc", "dd", "ee"])
    after = batcher.submit("ff")
    model.gate.set()
    assert many.result(60).tolist() == [row(2 * c) for c in "abcde"]
    assert after.result(60).tolist() == row("ff")
    assert model.batches == [["first"], ["aa", "bb"], ["cc", "dd"], ["ee", "ff"]]


def test_the_shapes_of_results(model):
    with DynamicBatcher(model) as batcher:
        assert batcher("a").shape == (2,)
        assert batcher(["a"]).shape == (1, 2)
        assert batcher(("a", "b")).tolist() == row("ab")
        assert batcher([("a", "b"), "c"]).tolist() == [row("ab"), row("c")]
        assert batcher([]).shape == (0, 2)
        assert batcher("a").dtype == torch.float32


def test_a_result_does_not_keep_the_rows_of_its_batch(busy, model):
    batcher, _ = busy()
    calls = [batcher.submit("a"), batcher.submit(["b", "c"])]
    model.gate.set()
    for call in calls:
        rows = call.result(60)
        assert rows.untyped_storage().nbytes() == rows.numel() * 4
        assert not rows.is_inference()


def test_a_call_without_others_is_computed_by_its_own_thread(model):
    forward, threads = model.forward, []
    model.forward = lambda batch: (threads.append(threading.get_ident()), forward(batch))[1]
    own = threading.get_ident()
    with DynamicBatcher(model, tokens_per_batch=4) as batcher:
        batcher("a")
        batcher("aaaaaaa")
        batcher(["aa", "bb"])
        assert threads == [own] * 3
        batcher(["aa", "bb", "c"])
        batcher("a", timeout=60)
        batcher.submit("a").result(60)
        asyncio.run(batcher.acall("a"))
        assert len(threads) == 8
        assert own not in threads[3:]


def test_calls_wait_for_a_call_that_its_own_thread_computes(model):
    """The second and the third call form one batch, because both wait for the first call."""
    model.gate.clear()
    with DynamicBatcher(model) as batcher, ThreadPoolExecutor(1) as pool:
        first = pool.submit(batcher, "first")
        assert model.begun.wait(60)
        later = [batcher.submit("a")]
        time.sleep(0.05)
        later.append(batcher.submit("b"))
        model.gate.set()
        assert first.result(60).tolist() == row("first")
        assert [call.result(60).tolist() for call in later] == [row("a"), row("b")]
    assert model.batches == [["first"], ["a", "b"]]


@pytest.mark.parametrize("here", [True, False])
def test_a_failed_call_leaves_the_front_usable(model, here):
    model.poisoned = {"bad"}
    with DynamicBatcher(model) as batcher:
        with pytest.raises(RuntimeError, match="poison"):
            batcher("bad", timeout=None if here else 60)
        assert batcher("a").tolist() == row("a")
        assert batcher("b", timeout=60).tolist() == row("b")
        assert batcher._waiting == 0


def test_a_call_that_waits_can_be_cancelled(busy, model):
    batcher, first = busy()
    cancelled, other = batcher.submit(["a", "b"]), batcher.submit("c")
    assert cancelled.cancel()
    assert not first.cancel()
    model.gate.set()
    assert other.result(60).tolist() == row("c")
    with pytest.raises(CancelledError):
        cancelled.result(60)
    assert model.batches == [["first"], ["c"]]


def test_a_call_that_waits_too_long_is_cancelled(busy, model):
    batcher, first = busy()
    with pytest.raises(TimeoutError):
        batcher("late", timeout=0.05)
    model.gate.set()
    assert batcher("next", timeout=60).tolist() == row("next")
    assert first.result(60).tolist() == row("first")
    assert model.batches == [["first"], ["next"]]


def test_too_many_texts_are_refused(busy, model):
    batcher, _ = busy(max_waiting=3)
    two = batcher.submit(["a", "b"])
    with pytest.raises(OverloadedError, match="got 1 while 3 wait or run, allowed: max_waiting=3"):
        batcher("c")
    two.cancel()
    model.gate.set()
    for _ in range(100):
        # A cancelled call counts towards the limit only until its turn comes.
        with contextlib.suppress(OverloadedError):
            assert batcher(["c", "d", "e"]).tolist() == [row("c"), row("d"), row("e")]
            break
        time.sleep(0.01)
    else:
        pytest.fail("the places of a cancelled call are never free")
    with pytest.raises(OverloadedError, match="got 4 while 0 wait"):
        batcher(["a", "b", "c", "d"])


def test_an_error_reaches_only_its_caller(model):
    model.poisoned = {"bad", "worse"}
    with DynamicBatcher(model) as batcher:
        model.gate.clear()
        calls = {text: batcher.submit(text) for text in ("first", "a", "bad", "b", "worse", "c")}
        model.gate.set()
        for text, call in calls.items():
            if text in model.poisoned:
                with pytest.raises(RuntimeError, match=rf"poison in \['{text}'\]"):
                    call.result(60)
            else:
                assert call.result(60).tolist() == row(text)
        # The failed calls leave no text in the queue.
        assert batcher("d", timeout=60).tolist() == row("d")
        assert batcher._waiting == 0


def test_a_failed_call_of_several_batches_ends_at_once(busy, model):
    batcher, _ = busy(tokens_per_batch=3)
    model.poisoned = {"bad"}
    failing, other = batcher.submit(["aaa", "bad", "ccc", "ddd"]), batcher.submit("eee")
    model.gate.set()
    with pytest.raises(RuntimeError, match="poison"):
        failing.result(60)
    assert other.result(60).tolist() == row("eee")
    assert model.batches == [["first"], ["aaa"], ["bad"], ["eee"]]
    assert batcher._waiting == 0


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ([1], TypeError, r"texts\[0\]: got int, allowed: a str or two in a tuple"),
        (["a", None], TypeError, r"texts\[1\]: got None"),
        ([("a", "b", "c")], TypeError, r"texts\[0\]: got \('a', 'b', 'c'\)"),
        (["a", ""], ValueError, "no tokens"),
    ],
)
def test_wrong_texts_are_refused_before_they_wait(model, texts, error, message):
    with DynamicBatcher(model) as batcher:
        with pytest.raises(error, match=message):
            batcher.submit(texts)
        assert batcher("a").tolist() == row("a")
    assert model.batches == [["a"]]


@pytest.mark.parametrize("name", ["tokens_per_batch", "max_waiting"])
def test_limits_are_at_least_1(model, name):
    with pytest.raises(ValueError, match=f"{name}: got 0, allowed: at least 1"):
        DynamicBatcher(model, **{name: 0})


def test_close_computes_what_waits(busy, model):
    batcher, _ = busy()
    waiting = batcher.submit("a")
    closing = threading.Thread(target=batcher.close)
    closing.start()
    model.gate.set()
    closing.join(60)
    assert waiting.result(0).tolist() == row("a")
    with pytest.raises(RuntimeError, match="the DynamicBatcher is closed"):
        batcher("b")


def test_coroutines_wait_without_blocking_the_loop(busy, model):
    batcher, _ = busy()

    async def main():
        tasks = [asyncio.create_task(batcher.acall(text)) for text in ("a", "b", "c")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        model.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    a, b, c = asyncio.run(main())
    assert (a.tolist(), c.tolist()) == (row("a"), row("c"))
    assert isinstance(b, asyncio.CancelledError)
    assert model.batches == [["first"], ["a", "c"]]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_thread_has_the_number_of_threads_of_torch(threads, model):
    before = torch.get_num_threads()
    forward, seen = model.forward, []
    model.forward = lambda batch: (seen.append(torch.get_num_threads()), forward(batch))[1]
    try:
        torch.set_num_threads(threads)
        with DynamicBatcher(model) as batcher:
            batcher("a")
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]


FORKED = """
import os, sys, torch
from fastbert.inference import DynamicBatcher, Embedder

batcher = DynamicBatcher(Embedder(sys.argv[1], normalize=True))
texts = ["the old mill", "a dog ran over the hill and saw the river"]
rows = batcher(texts, timeout=60)
child = os.fork()
same = torch.equal(batcher(texts, timeout=60), rows)
if child == 0:
    os._exit(0 if same else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
batcher.close()
sys.exit(0 if same and status == 0 else 1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_its_own_thread(embedder):
    run = _fresh_python.run("-c", FORKED, embedder.folders[0], timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_process_ends_without_close(embedder):
    program = FORKED.partition("child =")[0]
    run = _fresh_python.run("-c", program, embedder.folders[0], timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
