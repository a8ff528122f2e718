"""A step of generation in one call computes what the modules of the decoder compute."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fastbert.modules.transformer import Transformer, TransformerConfig
from fastbert.modules.transformer.decoder_step import DecoderStep
from fastbert.modules.transformer.one_call import one_call
from fastbert.modules.transformer.slots import FIRST_POSITIONS, SlotCache
from fastbert.testing.compare import assert_close

SIZES = {
    "vocab_size": 50, "d_model": 48, "encoder_layers": 1, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 56, "max_position_embeddings": 90, "pad_token_id": 0,
}  # fmt: skip


def small(dtype=torch.float32, **changes):
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return model.to(dtype)


def sources():
    ids = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[1, 4:] = 0
    return ids, ids != 0


def logits_of(model, beams=2, steps=FIRST_POSITIONS + 3):
    """Return the logits of each step, with beams that are chosen anew and a source that leaves."""
    generator = torch.Generator().manual_seed(7)
    ids, mask = sources()
    with torch.no_grad():
        source = model.encode(ids, mask)
        step = DecoderStep(
            model.decoder_embeddings, model.decoder, model.head, source.rows, source.layout
        )
        found, count, wide = [], 3, 1
        for number in range(steps):
            tokens = torch.randint(1, 50, (count, wide), generator=generator)
            found.append(step(tokens))
            if number == 5:
                step.cache.keep(torch.tensor([0, 2]))
                count = 2
            if number != steps - 1:
                step.cache.reorder(torch.randint(wide, (count, beams), generator=generator))
                wide = beams
    return step, torch.cat(found)


@pytest.mark.parametrize(
    "changes", [{}, {"normalize_before": True}, {"activation_function": "swish"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(dtype, changes):
    model = small(dtype, **changes)
    step, ours = logits_of(model)
    assert isinstance(step.cache, SlotCache)
    assert step.cache.stored.shape[4] == 2 * FIRST_POSITIONS
    model.decoder.layer[1].register_forward_hook(lambda *_: None)
    step, by_modules = logits_of(model)
    assert not isinstance(step.cache, SlotCache)
    exact = small(torch.float64, **changes)
    exact.load_state_dict(model.state_dict())
    _, expected = logits_of(exact)
    assert_close("logits", ours, expected, by_modules)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


def replaced(path, make):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.decoder.get_submodule(parent), name, make(model.decoder.get_submodule(path)))

    return change


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


def own_linear(linear):
    made = OwnLinear(linear.in_features, linear.out_features)
    made.load_state_dict(linear.state_dict())
    return made.eval()


def doubled(model):
    linear = model.decoder.layer[1].intermediate.dense
    parametrize.register_parametrization(linear, "weight", Doubled())


CHANGES = {
    "layer.1 has forward hooks": lambda m: m.decoder.layer[1].register_forward_hook(
        lambda module, given, result: (result[0] * 1.5, *result[1:])
    ),
    "layer.0.attention.self has a forward of its own": lambda m: setattr(
        m.decoder.layer[0].attention.self,
        "forward",
        lambda rows, attention: (rows, rows, None),
    ),
    "layer.2.output.dense is a .*OwnLinear": replaced("layer.2.output.dense", own_linear),
    "layer.1.intermediate.dense is a .*Parametrized": doubled,
    "the layers differ in heads": lambda m: [
        setattr(norm, "eps", 0.5)
        for norm in m.decoder.layer[1].modules()
        if type(norm).__name__ == "LayerNorm"
    ],
    "parameters are torch.bfloat16, torch.float32": lambda m: m.decoder.layer[0].output.dense.to(
        torch.bfloat16
    ),
    "is served by reference": lambda m: m.set_backend("reference"),
}  # fmt: skip


@pytest.mark.parametrize("reason", CHANGES)
def test_a_deviation_is_computed_by_the_modules(reason):
    """A change runs the modules, whose results have the change, and the reason names it."""
    plain = small()
    _, before = logits_of(plain, steps=3)
    changed = small()
    CHANGES[reason](changed)
    found = one_call(changed.decoder, "cpu", torch.float32)
    assert isinstance(found, str)
    assert re.search(reason, found), found
    choice = changed.backends("cpu")["decoder"]
    assert choice.reason == f"layer by layer: {found}"
    if "bfloat16" in reason:
        return
    step, after = logits_of(changed, steps=3)
    assert not isinstance(step.cache, SlotCache)
    assert torch.allclose(before, after, atol=1e-4) == ("reference" in reason)


def test_autocast_training_and_other_devices_are_reasons():
    model = small()
    assert model.backends("cpu")["decoder"].backend == "cpu"
    assert one_call(model.decoder, "meta", torch.float32) == "the rows are on meta"
    assert one_call(model.decoder, "cpu", torch.float64) == "the rows are torch.float64"
    with torch.autocast("cpu", torch.bfloat16):
        assert one_call(model.decoder, "cpu", torch.float32) == "autocast is active"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert one_call(model.decoder, "cpu", torch.float32) == "there is a hook for every module"
    finally:
        handle.remove()
    model.decoder.layer[2].train()
    assert one_call(model.decoder, "cpu", torch.float32) == "a layer is in training mode"


def test_a_write_to_a_weight_is_seen_in_the_next_call():
    model = small()
    ids, mask = sources()
    before = model.generate(ids, mask, max_length=12, num_beams=1)
    with torch.no_grad():
        for layer in model.decoder.layer:
            layer.output.dense.weight.mul_(-3.0)
    after = model.generate(ids, mask, max_length=12, num_beams=1)
    fresh = small()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh.generate(ids, mask, max_length=12, num_beams=1))
    assert not torch.equal(after, before)
