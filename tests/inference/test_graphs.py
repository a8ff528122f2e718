"""Graphs of the encoder give the model's results, with padded buckets and static memory.

Without a GPU, a recording is the trace of a function, and a replay repeats the recorded operators
on the recorded memory. A value that Python reads from the data during the recording therefore stays
fixed, as in a CUDA graph.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _trace import Trace
from torch import Tensor

import fastbert
from fastbert import BertConfig, BertModel
from fastbert.graphs import static_batch
from fastbert.graphs.buckets import Bucket, Buckets, PaddedBucket
from fastbert.graphs.static_batch import StaticBatch, StaticPadded
from fastbert.inference.graphed_model import GraphedModel, graphed
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.launches import counted
from fastbert.testing.yardstick import Yardstick, each, run_sides

CONFIG = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=48,
    initializer_range=0.3,
)
GENERATOR = torch.Generator().manual_seed(1)
POISONED = 59  # an id whose embedding is NaN
BUCKETS = Buckets(max_tokens=64, max_batch=4, max_seqlen=48)
# These operators read a number from the device. Neither a graph nor a fast call may run them.
SYNCHRONISING = {
    "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item", "aten.masked_select",
    "aten.nonzero", "aten.unique_dim", "aten._unique2",
}  # fmt: skip


interpreted = pytest.mark.skipif(
    not backends.interpreted(), reason="Triton takes CPU tensors interpreted only"
)


def model(backend: str | None = "reference", **overrides: Any) -> BertModel:
    torch.manual_seed(0)
    made = BertModel(dataclasses.replace(CONFIG, **overrides), backend=backend).eval()
    with torch.no_grad():
        made.get_input_embeddings().weight[POISONED] = torch.nan
    return made


def traced(plain: BertModel, max_graphs: int = 64) -> GraphedModel:
    return GraphedModel(plain, BUCKETS, max_graphs, lambda device: Trace())


def integers(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def padded(*lengths: int, length: int | None = None) -> dict[str, Tensor]:
    shape = (len(lengths), length or max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)).long()
    ids, types = integers(1, POISONED, shape), integers(0, 2, shape)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": types * mask}


def packed(*lengths: int, slack: int = 0) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = integers(1, POISONED, (int(ends[-1]) + slack,))
    return {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": max(lengths)}


def poison(graphs: GraphedModel) -> None:
    """Fill every bucket with an id whose embedding is NaN; rows outside a batch keep this id."""
    for graph in graphs._cache.graphs.values():
        graph.batch.ids.fill_(POISONED)


def agree(graphs: GraphedModel, *batches: dict[str, Any]) -> None:
    """Check that graphs and model agree by the tolerance rule, over all batches together."""
    plain = graphs.model
    sides: list[Callable[..., Any]] = [graphs]
    for dtype in (torch.float64, torch.float32):
        reference = BertModel(plain.config, backend="reference").to(dtype).eval()
        reference.load_state_dict(plain.state_dict())
        sides.append(reference)
    with torch.no_grad():
        runs = run_sides(lambda side: [side(**inputs) for inputs in batches], *sides)
        for inputs, out in zip(batches, runs[0], strict=True):
            assert [x.shape for x in out] == [x.shape for x in plain(**inputs)]
            if "attention_mask" in inputs:
                assert not out[0][inputs["attention_mask"] == 0].any()
        for i, name in enumerate(("last_hidden_state", "pooler_output")):

            def joined(run: list[Any], i: int = i) -> torch.Tensor:
                return torch.cat([out[i].flatten() for out in run])

            assert_close(name, *each(joined, *runs))


# Buckets


@pytest.mark.parametrize(
    ("batch", "bucket"),
    [
        ((1, 1, 1), (16, 1, 16)),
        ((16, 1, 16), (16, 1, 16)),
        ((17, 1, 17), (24, 1, 24)),
        ((24, 2, 12), (24, 2, 16)),
        ((25, 3, 20), (32, 4, 32)),
        ((33, 1, 33), (48, 1, 48)),
        ((49, 4, 30), (64, 4, 32)),
        ((64, 4, 48), (64, 4, 48)),
        ((0, 1, 0), None),
        ((65, 1, 48), None),
        ((20, 5, 4), None),
    ],
)
def test_bucket_of_a_batch(batch, bucket):
    assert BUCKETS.find(*batch) == (bucket and Bucket(*bucket))


def test_a_bucket_holds_its_batch_and_a_third_of_it_is_the_most_that_is_slack():
    buckets = Buckets(1000, 10, 512)
    for tokens in range(1, 1001):
        longest = min(tokens, 512)
        bucket = buckets.find(tokens, min(tokens, 10), longest)
        assert tokens <= bucket.tokens <= 1000
        assert longest <= bucket.max_seqlen <= min(bucket.tokens, 512)
        assert bucket.tokens <= 16 or 3 * (bucket.tokens - tokens) < bucket.tokens
        assert buckets.find(*bucket) == bucket
    assert len({buckets.find(n, 1, 1).tokens for n in range(1, 1001)}) == 13


def test_the_static_batch_ends_where_the_batch_does():
    static = StaticBatch(Bucket(16, 4, 16), torch.device("cpu"))
    memory = [t.data_ptr() for t in (static.ids, static.positions, static.cu_seqlens)]
    for lengths in ((3, 6), (1, 2, 3, 4), (9,)):
        with torch.no_grad():
            inputs = packed(*lengths)
            plain = model()
            seen = []
            plain.embeddings.register_forward_pre_hook(lambda _, a, seen=seen: seen.append(a[0]))
            plain(**inputs)
        static.fill(seen[0])
        total, batch = sum(lengths), len(lengths)
        assert torch.equal(static.ids[:total], inputs["input_ids"])
        assert torch.equal(static.cu_seqlens[: batch + 1], inputs["cu_seqlens"])
        assert (static.cu_seqlens[batch + 1 :] == total).all()
        places = torch.cat([torch.arange(n) for n in lengths])
        assert torch.equal(static.positions[:total], places)
    assert memory == [t.data_ptr() for t in (static.ids, static.positions, static.cu_seqlens)]


# Tests that the results equal those of the model

BATCHES = {
    "one": padded(7),
    "one_token": padded(1),
    "full": {"input_ids": integers(1, POISONED, (2, 11))},
    "padded": padded(9, 1, 20, 4),
    "padded_wide": padded(5, 3, length=40),
    "left": {"input_ids": integers(1, POISONED, (2, 5)),
             "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])},
    "packed": packed(13, 2, 8),
    "packed_slack": packed(13, 2, slack=5),
    "empty_sequence": padded(6, 0, 3),
    "largest": padded(48, 16),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", None, pytest.param("triton", marks=interpreted)])
def test_every_batch_agrees_with_the_model(backend):
    slow = backend == "triton"
    graphs = traced(model(backend, num_hidden_layers=1 if slow else 2))
    batches = [packed(7, 4), packed(9, 3, slack=2)] if slow else list(BATCHES.values())
    agree(graphs, *batches)
    recorded = len(graphs.recorded)
    poison(graphs)
    agree(graphs, *reversed(batches))
    assert len(graphs.recorded) == recorded


def test_slack_changes_no_bit():
    graphs = traced(model())
    inputs = padded(9, 4)
    first = graphs(**inputs)
    poison(graphs)
    again = graphs(**inputs)
    assert torch.equal(first.last_hidden_state, again.last_hidden_state)
    assert torch.equal(first.pooler_output, again.pooler_output)


def test_results_are_the_callers_to_keep():
    graphs = traced(model())
    for make in (packed, padded):
        first = graphs(**make(9, 4))
        kept = first.last_hidden_state.clone(), first.pooler_output.clone()
        graphs(**make(9, 4))
        assert torch.equal(first.last_hidden_state, kept[0])
        assert torch.equal(first.pooler_output, kept[1])


@pytest.mark.parametrize("inputs", [padded(50), padded(30, 30, 30), padded(1, 1, 1, 1, 1)])
def test_what_has_no_bucket_runs_without_one(inputs):
    wide = model(max_position_embeddings=64)
    graphs = traced(wide)
    with torch.no_grad():
        assert torch.equal(graphs(**inputs)[0], wide(**inputs)[0])
    assert graphs.recorded == ()


def test_a_general_mask_runs_without_a_graph():
    graphs = traced(model())
    inputs = {"input_ids": integers(1, POISONED, (1, 6)), "attention_mask": torch.ones(1, 6, 6)}
    inputs["attention_mask"] = inputs["attention_mask"].tril().bool()
    with torch.no_grad():
        assert torch.equal(graphs(**inputs)[0], graphs.model(**inputs)[0])
    assert graphs.recorded == ()


def test_outputs_as_asked():
    graphs = traced(model())
    inputs = padded(5)
    out = graphs(**inputs, return_dict=False)
    assert isinstance(out, tuple)
    assert torch.equal(out[0], graphs(**inputs).last_hidden_state)
    assert not out[0].requires_grad
    bare = BertModel(CONFIG, add_pooling_layer=False).eval()
    assert traced(bare)(**inputs).pooler_output is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_recorded_in_one_mode_and_used_in_another(mode):
    graphs = traced(model())
    inputs = padded(5, 3)
    with torch.inference_mode():
        expected = graphs(**inputs)[0]
    with mode():
        assert torch.equal(graphs(**inputs)[0], expected)


# Tests of masks on a GPU


@pytest.fixture
def far(monkeypatch):
    """Treat every mask as if it were on a GPU."""
    monkeypatch.setattr(static_batch, "is_far", lambda mask: True)


MASKED = {
    name: inputs for name, inputs in BATCHES.items()
    if "attention_mask" in inputs and name not in ("padded", "padded_wide", "largest")
} | {
    "middle": {"input_ids": integers(1, POISONED, (2, 5)),
               "attention_mask": torch.tensor([[1, 0, 1, 1, 1], [0, 1, 0, 1, 0]])},
    "no_token": {"input_ids": integers(1, POISONED, (2, 5)),
                 "attention_mask": torch.tensor([[0] * 5, [1] * 5]).bool()},
    "positions": padded(6, 2) | {"position_ids": integers(0, 40, (2, 6))},
}  # fmt: skip


@pytest.mark.parametrize("first_position", [None, 2])
def test_a_graph_removes_the_padding_itself(far, first_position):
    architecture = dataclasses.replace(CONFIG.architecture, first_position=first_position)
    graphs = traced(model(architecture=architecture))
    batches = [
        inputs for inputs in MASKED.values()
        if first_position is None or "position_ids" not in inputs
    ]  # fmt: skip
    agree(graphs, *batches)
    recorded = graphs.recorded
    assert all(isinstance(bucket, PaddedBucket) for bucket in recorded)
    poison(graphs)
    agree(graphs, *reversed(batches))
    assert graphs._cache.recorder.recorded == len(recorded) == len(set(recorded))


def test_another_mask_of_the_same_shape_replays_the_graph(far):
    graphs = traced(model())
    for lengths in ((9, 1), (2, 7), (9, 9), (0, 3), (1, 1)):
        agree(graphs, padded(*lengths, length=9))
    assert graphs.recorded == (PaddedBucket(2, 16),)
    assert graphs._cache.recorder.recorded == 1


def test_a_padded_batch_with_too_many_places_is_unpadded_first(far):
    graphs = traced(model())
    agree(graphs, padded(5, 3, length=40))
    assert graphs.recorded == (Bucket(16, 2, 16),)


@pytest.mark.parametrize(
    ("batch", "bucket"),
    [
        ((1, 1), (1, 16)),
        ((3, 16), (4, 16)),
        ((1, 17), (1, 24)),
        ((2, 30), (2, 32)),
        ((1, 48), (1, 48)),
        ((3, 17), None),
        ((1, 49), None),
        ((5, 2), None),
        ((0, 3), None),
    ],
)
def test_bucket_of_a_padded_batch(batch, bucket):
    assert BUCKETS.find_padded(*batch) == (bucket and PaddedBucket(*bucket))


def test_the_removal_of_padding_asks_the_device_nothing():
    static = StaticPadded(PaddedBucket(2, 16), torch.device("cpu"))
    with torch.no_grad(), counted() as launches:
        static.unpadded()
    assert launches.foreign
    assert not launches.foreign.keys() & SYNCHRONISING, launches.foreign


# Recordings


def test_one_recording_for_each_bucket():
    graphs = traced(model())
    for lengths in ((3, 4), (5, 9), (2, 14), (8, 8)):
        graphs(**padded(*lengths))
    assert graphs.recorded == (Bucket(16, 2, 16),)
    assert graphs._cache.recorder.recorded == 1
    assert graphs._cache.recorder.replayed == 4
    graphs(**padded(9, 8))
    assert graphs.recorded[-1] == Bucket(24, 2, 16)


def test_the_graph_used_longest_ago_makes_room():
    graphs = traced(model(), max_graphs=2)
    small, middle, large = padded(10), padded(20), padded(40)
    for inputs in (small, middle, small, large, small):
        graphs(**inputs)
    assert [bucket.tokens for bucket in graphs.recorded] == [48, 16]
    assert graphs._cache.recorder.recorded == 3
    graphs(**middle)
    assert graphs._cache.recorder.recorded == 4


@interpreted
def test_the_recorded_function_asks_the_device_nothing():
    graphs = traced(model("triton", num_hidden_layers=1))
    static = StaticBatch(Bucket(16, 2, 16), torch.device("cpu"))
    with torch.no_grad(), counted() as launches:
        graphs._compute(static.input)
    assert launches.kernels.total() > 3
    assert not launches.foreign.keys() & SYNCHRONISING, launches.foreign


@interpreted
def test_a_packed_call_of_the_model_asks_the_device_nothing(monkeypatch):
    # A model checks values on the CPU unless it is being compiled, and never on a GPU.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain, inputs = model("triton", num_hidden_layers=1), packed(9, 4)
    with torch.no_grad(), counted() as launches:
        plain(**inputs)
    assert not launches.foreign.keys() & SYNCHRONISING, launches.foreign


def test_weights_changed_in_place_are_seen():
    graphs = traced(model())
    inputs = padded(6, 2)
    before = graphs(**inputs)[0]
    with torch.no_grad():
        for parameter in graphs.model.parameters():
            parameter.mul_(1.5)
    after = graphs(**inputs)[0]
    assert not torch.equal(before, after)
    agree(graphs, inputs, *(padded(n, 3) for n in range(4, 10)))
    assert graphs._cache.recorder.recorded == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
        lambda m: m.set_backend(None),
        lambda m: setattr(m.pooler.dense, "weight", torch.nn.Parameter(torch.eye(32))),
        lambda m: m.encoder.layer.__setitem__(1, copy.deepcopy(m.encoder.layer[0])),
    ],
    ids=["double", "assign", "backend", "parameter", "module"],
)
def test_weights_that_moved_are_recorded_anew(change):
    graphs = traced(model())
    inputs = padded(6, 2)
    graphs(**inputs)
    change(graphs.model)
    first = graphs._cache.recorder
    with torch.no_grad():
        stock = Yardstick(lambda: graphs.model(**inputs)[0])
        oracle = copy.deepcopy(graphs.model).double()(**inputs)[0]
        got = graphs(**inputs)[0]
        assert graphs._cache.recorder is not first
        assert got.dtype == stock.library.dtype
    if got.dtype == torch.float64:  # In float64, both are the same model.
        torch.testing.assert_close(got, oracle)
    else:
        assert_close("last_hidden_state", got, oracle, stock)


def test_autocast_has_graphs_of_its_own():
    graphs = traced(model())
    inputs = padded(6, 2)
    graphs(**inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got, expected = graphs(**inputs), graphs.model(**inputs)
    assert got[0].dtype == expected[0].dtype
    torch.testing.assert_close(got[1], expected[1])
    assert graphs._cache.recorder.recorded == 2


def test_threads_take_turns():
    graphs = traced(model())
    inputs = [padded(5 + i, 3) for i in range(4)]
    with torch.no_grad():
        expected = [graphs.model(**batch)[0] for batch in inputs]
    results: list[list[Tensor]] = [[] for _ in inputs]

    def work(i: int) -> None:
        results[i] = [graphs(**inputs[i])[0] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, right in zip(results, expected, strict=True):
        assert len(got) == 5
        for tensor in got:
            torch.testing.assert_close(tensor, right)


# Errors


def test_errors_say_what_is_missing():
    plain = model()
    if not torch.cuda.is_available():
        message = "graphed: got a model on cpu, allowed: a CUDA device, .*this machine has none"
        with pytest.raises(RuntimeError, match=message):
            graphed(plain)
    assert fastbert.graphed is graphed
    masked = fastbert.BertForMaskedLM(CONFIG)
    with pytest.raises(
        TypeError, match="graphed: got BertForMaskedLM of fastbert, allowed: BertModel of fastb"
    ):
        graphed(masked)
    graphs = traced(plain)
    plain.train()
    with pytest.raises(RuntimeError, match="graphed: got a model in training mode, allowed: model"):
        graphs(**padded(4))
    plain.eval()
    with pytest.raises(ValueError, match="input_ids: got 60"):
        graphs(torch.full((1, 4), 60))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_graphs(dtype):
    plain = model(None).to("cuda", dtype)
    graphs = graphed(plain, max_tokens=64, max_batch=4)
    for _ in range(2):
        for name, inputs in BATCHES.items():
            there = {
                key: value.to("cuda") if isinstance(value, Tensor) else value
                for key, value in inputs.items()
            }
            with torch.no_grad():
                expected = plain(**there)
            for given in (inputs, there):
                got = graphs(**given)
                assert got[0].device == expected[0].device, name
                torch.testing.assert_close(got[0], expected[0])
                torch.testing.assert_close(got[1], expected[1])
        poison(graphs)
