"""During a call, the encoder reuses the memory of one layer's tensors for the next layer."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastbert import BertConfig, BertModel

# The memory of 4 x 64 tokens' hidden states is large enough for the encoder to reuse.
CONFIG = BertConfig(
    vocab_size=99,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=512,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return BertModel(CONFIG).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 99, (4, 64))


@torch.no_grad()
def states(model, ids):
    return model(ids, output_hidden_states=True).hidden_states


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_all_states_have_memory_of_their_own(model, ids):
    hidden_states = states(model, ids)
    kept = [state.clone() for state in hidden_states]
    for other in (ids.flip(0), ids[:2], ids):
        states(model, other)
    assert len({state.data_ptr() for state in hidden_states}) == len(hidden_states)
    assert all(map(torch.equal, hidden_states, kept))


def test_a_result_may_end_on_another_thread_and_in_another_call(model, ids):
    expected = states(model, ids)[-1].clone()
    results = [states(model, ids) for _ in range(4)]

    def work():
        for _ in range(20):
            if results:
                results.pop()
            assert torch.equal(states(model, ids)[-1], expected)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result()


def test_a_result_can_grow_be_pickled_and_be_shared(model, ids):
    last = states(model, ids)[-1]
    expected = last.clone()
    assert torch.equal(pickle.loads(pickle.dumps(last)), expected)
    last.resize_(8, 64, 128)
    assert torch.equal(last[:4], expected)
    shared = states(model, ids)[-1].share_memory_()
    assert torch.equal(shared, expected)


def test_a_refused_layer_keeps_no_memory(model, ids):
    """An error in the middle of a call frees the reused memory, and later calls are right."""
    expected = states(model, ids)[-1].clone()
    dense = model.encoder.layer[1].output.dense
    bias = dense.bias
    dense.bias = torch.nn.Parameter(torch.zeros(5))
    try:
        with pytest.raises((ValueError, RuntimeError)):
            states(model, ids)
    finally:
        dense.bias = bias
    assert torch.equal(states(model, ids)[-1], expected)


@pytest.mark.every_case
def test_many_calls_of_growing_lengths_keep_no_memory(model):
    lengths = list(range(8, 65, 8))
    everything = [torch.randint(1, 99, (16, length)) for length in lengths]
    for given in everything:
        states(model, given)
    gc.collect()
    before = resident()
    for _ in range(30):
        for given in everything:
            states(model, given)
    assert resident() - before < 16 << 20
