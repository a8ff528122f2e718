"""A layer launches exactly the expected numbers of fastbert kernels and library GEMMs.

The tests compare exact numbers, because each additional launch costs time. After a deliberate
change, update the numbers here and in docs/kernels.md.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from quick_cases import long_case
from torch import Tensor

from fastbert import BertConfig, BertForPreTraining, BertModel
from fastbert.modules import executors
from fastbert.modules.dropout import draw_seeds
from fastbert.modules.inputs import enter
from fastbert.ops import backend as backends
from fastbert.testing.launches import Launches, counted, forward_and_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    backends.unavailable("triton", DEVICE) is not None, reason="Triton cannot run here"
)

# The launches of one layer in a 16-bit dtype, as (forward, backward).
HALF = (
    Launches(
        Counter(attention_short_forward=1, linear_gelu=1, layer_norm_forward=2),
        Counter(addmm=1, mm=2),
    ),
    Launches(
        Counter(
            attention_short_backward=1,
            feed_forward_backward=1,
            layer_norm_backward=2,
            partial_sums=1,
            sum_partials=4,
        ),
        Counter(addmm=2, mm=5),
    ),
)
# In fp32, a library GEMM computes the first product of the feed-forward, and the general kernels
# compute attention.
SINGLE = (
    Launches(
        Counter(attention_forward=1, activation=1, layer_norm_forward=2),
        Counter(addmm=2, mm=2),
    ),
    Launches(
        Counter(
            attention_statistics=1,
            attention_dq=1,
            attention_dkv=1,
            activation_backward=1,
            layer_norm_backward=2,
            partial_sums=1,
            sum_partials=4,
        ),
        Counter(addmm=2, mm=6),
    ),
)
# The launches outside the layers, each with its purpose. Each is small or occurs once in a model.
OUTSIDE_THE_LAYERS = {
    "aten.randint": "the seeds of all dropouts, one draw",
    "aten.stack": "the addresses of the seeds, which are multiples of 16 bytes",
    "aten.zeros": "token types, which the caller did not give",
    "aten.arange": "positions: the number of each row",
    "aten.searchsorted": "positions: the sequence of each row",
    "aten._to_copy": "cu_seqlens as indices",
    "aten.index_select": "positions: where each sequence starts; the pooler's rows",
    "aten.sub": "positions; the lengths of the sequences, which the pooler asks for",
    "aten.eq": "rows after the last sequence; sequences without a token",
    "aten.masked_fill": "the same",
    "aten.clamp": "the pooler's rows",
    "aten.tanh": "the pooler",
}


def config(layers: int) -> BertConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    return BertConfig.preset("tiny", vocab_size=50, num_hidden_layers=layers, **sizes)


def packed() -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, 5, 12, 13], dtype=torch.int32, device=DEVICE)
    return torch.randint(1, 50, (13,), device=DEVICE), ends


def encoder_launches(layers: int, training: bool, dtype: torch.dtype) -> tuple[Launches, Launches]:
    """Return the launches of `layers` layers for embedded rows that need a gradient."""
    model = BertModel(config(layers), backend="triton").to(DEVICE, dtype).train(training)
    ids, ends = packed()
    tokens = enter(model.config, ids, None, None, None, None, ends, 8)
    seeds = draw_seeds(model.config, training, ids.device)
    rows = model.embeddings(tokens, seeds.embeddings).detach().requires_grad_()
    return forward_and_backward(lambda: model.encoder(rows, tokens.layout, seeds=seeds.layers)[0])


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, SINGLE), long_case(torch.float16, HALF)],
    ids=["fp32", "fp16"],
)
def test_a_layer_launches_our_kernels_and_gemms_only(training, dtype, expected):
    launched = encoder_launches(1, training, dtype)
    assert launched[0].foreign == launched[1].foreign == {}
    # On a GPU, the choice of kernels also depends on the shape, so only the interpreter is exact.
    if backends.interpreted():
        assert launched == expected


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, SINGLE), (torch.float16, HALF)], ids=["fp32", "fp16"]
)
def test_a_layer_as_one_function_launches_the_same(monkeypatch, dtype, expected):
    """A layer that runs as one autograd function makes the same launches as its modules."""
    calls = []
    layer = executors.gpu_layer
    monkeypatch.setattr(executors, "is_watched", lambda: False)
    monkeypatch.setattr(executors, "gpu_layer", lambda *a: calls.append(1) or layer(*a))
    launched = encoder_launches(1, True, dtype)
    assert calls == [1]
    assert launched[0].foreign == launched[1].foreign == {}
    if backends.interpreted():
        assert launched == expected


@pytest.mark.every_case
def test_a_padded_batch_launches_the_same():
    """A batch without padding needs no additional launch, with or without a mask of pairs."""
    model = BertModel(config(1), backend="triton").to(DEVICE).train()
    ids = torch.randint(1, 50, (2, 7), device=DEVICE)
    for mask in (None, torch.ones(2, 7, 7, dtype=torch.bool, device=DEVICE).tril()):
        model.zero_grad()  # Adding to an existing gradient would be another launch.
        tokens = enter(model.config, ids, mask, None, None, None, None, None)
        seeds = draw_seeds(model.config, True, ids.device)
        rows = model.embeddings(tokens, seeds.embeddings).detach().requires_grad_()
        forward, backward = forward_and_backward(
            lambda tokens=tokens, rows=rows, seeds=seeds: model.encoder(
                rows, tokens.layout, seeds=seeds.layers
            )[0]
        )
        assert forward.foreign == backward.foreign == {}


def test_outside_the_layers_the_exceptions_have_names():
    model = BertModel(config(1), backend="triton").to(DEVICE).train()
    ids, ends = packed()
    # The input check reads no values on a GPU or while torch.compile traces.
    tokens = enter(model.config, ids, None, None, None, None, ends, 8)
    with counted() as launches:
        seeds = draw_seeds(model.config, True, ids.device)
        rows = model.embeddings(tokens, seeds.embeddings)
        model.pooler(tokens.layout.first(rows))
    assert launches.foreign.keys() <= OUTSIDE_THE_LAYERS.keys()
    assert launches.foreign["aten.randint"] == 1


# The launches outside the layers in the backward of a pre-training step, each with its purpose.
HEADS = {
    "aten.ones_like": "the loss's own gradient",
    "aten.nll_loss_backward": "the next-sentence loss, (B, 2)",
    "aten._log_softmax_backward_data": "the next-sentence loss",
    "aten._to_copy": "the next-sentence loss is fp32",
    "aten.div": "the mean over the labels",
    "aten.tanh_backward": "the pooler",
    "aten.masked_fill": "sequences without a token, which the pooler sees as 0",
    "aten.new_zeros": "rows that neither the pooler nor the predictions took",
    "aten.index_add": "rows that the pooler or the predictions took",
    "aten.add": "the last layer feeds both heads; the word table is tied to the decoder",
    "aten.zeros": "gradients of the tables, where no token has the row",
    "aten.sort": "tokens by id, for a sum per id in a fixed order",
}


def test_a_training_step_launches_nothing_else_but_what_has_a_name():
    model = BertForPreTraining(config(1), backend="triton").to(DEVICE, torch.float16).train()
    ids, ends = packed()
    labels = ids.masked_fill(torch.arange(13, device=DEVICE) % 2 == 0, -100)
    related = torch.tensor([0, 1, 1], device=DEVICE)
    out = model(ids, cu_seqlens=ends, max_seqlen=8, labels=labels, next_sentence_label=related)
    with counted() as launches:
        out.loss.backward()
    assert launches.foreign.keys() <= HEADS.keys()
