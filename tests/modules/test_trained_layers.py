"""In training, a layer runs as one autograd function, with the bits of its separate operations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert import BertConfig, BertForPreTraining
from fastbert.modules import executors
from fastbert.modules.encoder import BertEncoder
from fastbert.ops import backend as backends

pytestmark = pytest.mark.skipif(
    backends.EXTENSION is None, reason="the layers run in fastbert._C, which is not built"
)
CONFIG = BertConfig.preset("tiny", vocab_size=61)
LENGTHS = {"padded": (9, 5, 12, 1), "uniform": (7, 7, 7)}


def model_of(dropout_p, **options):
    torch.manual_seed(1)
    return BertForPreTraining(
        dataclasses.replace(
            CONFIG,
            hidden_dropout_prob=dropout_p,
            attention_probs_dropout_prob=dropout_p,
            **options,
        )
    ).train()


def inputs_of(lengths):
    torch.manual_seed(2)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(5, 61, mask.shape)
    labels = torch.where(mask & (torch.rand(mask.shape) < 0.3), ids, -100)
    nsp = torch.arange(len(lengths)) % 2
    given = {"input_ids": ids, "attention_mask": mask.long()}
    return given | {"labels": labels, "next_sentence_label": nsp}


def step(model, inputs, dtype=torch.float32):
    """Return the loss and all gradients; each call draws the same dropout masks.

    If `dtype` is not fp32, the step runs under autocast to `dtype`.
    """
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


@pytest.fixture
def runs(monkeypatch):
    """Return a list that collects the settings of each layer that runs as one function."""
    settings_of_calls, run = [], executors.cpu_layer

    def spy(*arguments):
        settings_of_calls.append(arguments[-1])
        return run(*arguments)

    monkeypatch.setattr(executors, "cpu_layer", spy)
    return settings_of_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "gelu_new", "swish"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_bits_are_those_of_the_operations(
    lengths, dropout_p, hidden_act, dtype, runs, monkeypatch
):
    model, inputs = model_of(dropout_p, hidden_act=hidden_act), inputs_of(lengths)
    loss, gradients = step(model, inputs, dtype)
    actual = [(settings.dropouts, settings.dtype) for settings in runs]
    assert actual == 2 * [((dropout_p,) * 3, dtype)]
    plan = BertEncoder.plan
    monkeypatch.setattr(BertEncoder, "plan", lambda *given: plan(*given)._replace(run=None))
    expected_loss, expected = step(model, inputs, dtype)
    assert len(runs) == 2
    assert torch.equal(loss, expected_loss)
    assert [name for name in expected if not torch.equal(gradients[name], expected[name])] == []


def with_forward_hook(model):
    model.bert.encoder.layer[0].attention.output.dense.register_forward_hook(lambda *_: None)


def with_backward_hook(model):
    model.bert.encoder.layer[1].output.register_full_backward_hook(lambda *_: None)


def frozen(model):
    model.bert.encoder.layer[0].output.dense.bias.requires_grad_(False)


def with_adapter(model):
    class Adapted(nn.Linear):
        pass

    dense = Adapted(CONFIG.hidden_size, CONFIG.hidden_size)
    model.bert.encoder.layer[1].attention.output.dense = dense


def of_the_reference(model):
    model.bert.encoder.layer[0].attention.self.set_backend("reference")


@pytest.mark.parametrize(
    "change", [with_forward_hook, with_backward_hook, frozen, with_adapter, of_the_reference]
)
def test_other_layers_run_operation_by_operation(change, runs):
    model = model_of(0.0)
    change(model)
    step(model, inputs_of(LENGTHS["padded"]))
    assert runs == []


def test_parameters_in_another_dtype_run_operation_by_operation(runs):
    step(model_of(0.0).bfloat16(), inputs_of(LENGTHS["padded"]))
    step(model_of(0.0).bfloat16(), inputs_of(LENGTHS["padded"]), torch.bfloat16)
    assert runs == []


def test_checkpointing_computes_each_layer_again_with_the_same_bits(runs):
    model, inputs = model_of(0.1), inputs_of(LENGTHS["padded"])
    loss, gradients = step(model, inputs)
    model.bert.encoder.gradient_checkpointing = True
    again, gradients_again = step(model, inputs)
    assert len(runs) == 2 + 4
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def test_a_profiler_sees_every_operation(runs):
    with torch.profiler.profile() as profile:
        step(model_of(0.0), inputs_of(LENGTHS["padded"]))
    assert runs == []
    assert any(event.key == "fastbert::feed_forward" for event in profile.key_averages())


def test_an_operation_per_layer_frees_what_the_backward_read():
    model, inputs = model_of(0.0), inputs_of(LENGTHS["padded"])
    loss = model(**inputs).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# Tests of layers of other families, and of HF models, which have separate q, k and v weights.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


def modernbert(dropout_p, **biases):
    return transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **SIZES, pad_token_id=0, local_attention=6, attention_dropout=dropout_p, **biases
        )
    )


def modernbert_with_biases(dropout_p):
    return modernbert(dropout_p, attention_bias=True, mlp_bias=True, norm_bias=True)


def nomicbert(dropout_p):
    return transformers.NomicBertModel(
        transformers.NomicBertConfig(
            **SIZES, hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p
        )
    )


def bert(dropout_p):
    return transformers.BertModel(
        transformers.BertConfig(
            **SIZES, hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("family", [bert, nomicbert, modernbert, modernbert_with_biases])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_layers_of_hosts_compute_what_the_operations_compute(
    lengths, family, dropout_p, dtype, runs, monkeypatch
):
    torch.manual_seed(1)
    model = fastbert.accelerate(family(dropout_p)).train()
    inputs = {name: inputs_of(lengths)[name] for name in ("input_ids", "attention_mask")}

    def step():
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            states = model(**inputs, output_hidden_states=True).hidden_states
        sum(state.float().square().mean() for state in states).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return states[-1].detach(), {name: gradient.clone() for name, gradient in gradients.items()}

    rows, gradients = step()
    # The function for a whole layer does not support dropout with norms before attention.
    serves = family in (bert, nomicbert) or dropout_p == 0.0
    assert len(runs) == (3 if serves else 0)
    plan = BertEncoder.plan
    monkeypatch.setattr(BertEncoder, "plan", lambda *given: plan(*given)._replace(run=None))
    expected_rows, expected = step()
    assert len(runs) == (3 if serves else 0)
    assert torch.equal(rows, expected_rows)
    assert gradients.keys() == expected.keys()
    # For NomicBERT, the separate operations join both weights of the gate, which reorders the sums.
    joins = family is nomicbert
    for name, gradient in gradients.items():
        if joins:
            largest = float(expected[name].abs().max())
            few = 2e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=few * largest)
        else:
            assert torch.equal(gradient, expected[name]), name
