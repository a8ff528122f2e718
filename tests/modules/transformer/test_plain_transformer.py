"""Both orders of the layer norms and both kinds of positions agree with torch.nn in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastbert.modules.transformer import Transformer, TransformerConfig
from fastbert.testing.compare import compare_all
from fastbert.testing.yardstick import Yardstick

SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 20,
    "dropout": 0.0,
}
REASON = "roundings early in the backward pass are shared by every gradient after them"
KINDS = [(pre_norm, static) for pre_norm in (False, True) for static in (False, True)]
each_kind = pytest.mark.parametrize(("pre_norm", "static"), KINDS)


class Plain(nn.Module):
    """The model of Vaswani et al. 2017 from the layers of torch.nn, on padded batches."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width, pre_norm = config.d_model, config.normalize_before
        options = {
            "dropout": 0.0,
            "activation": "relu",
            "batch_first": True,
            "norm_first": pre_norm,
        }

        def norm():
            return nn.LayerNorm(width) if pre_norm else None

        self.words = nn.Embedding(config.vocab_size, width, padding_idx=0)
        self.positions = nn.ModuleList(
            nn.Embedding(config.max_position_embeddings, width) for _ in range(2)
        )
        heads, inner = config.encoder_attention_heads, config.encoder_ffn_dim
        layer = nn.TransformerEncoderLayer(width, heads, inner, **options)
        self.encoder = nn.TransformerEncoder(
            layer, config.encoder_layers, norm(), enable_nested_tensor=False
        )
        heads, inner = config.decoder_attention_heads, config.decoder_ffn_dim
        layer = nn.TransformerDecoderLayer(width, heads, inner, **options)
        self.decoder = nn.TransformerDecoder(layer, config.decoder_layers, norm())

    def embed(self, ids, table):
        return self.words(ids) * math.sqrt(self.config.d_model) + table.weight[: ids.shape[1]]

    def forward(self, ids, mask, labels):
        inputs = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1)
        inputs = inputs.masked_fill(inputs == -100, 0)
        source = self.encoder(self.embed(ids, self.positions[0]), src_key_padding_mask=~mask.bool())
        later = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool).triu(1)
        target = self.decoder(
            self.embed(inputs, self.positions[1]),
            source,
            tgt_mask=later,
            memory_key_padding_mask=~mask.bool(),
        )
        logits = target @ self.words.weight.t()
        smoothing = self.config.label_smoothing
        return logits, F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
        )

    def load(self, state):
        """Take the tensors of fastbert's state dict, or gradients in its place."""
        named = {"words.weight": state["encoder_embeddings.word_embeddings.weight"]}
        for number, stack in enumerate(("encoder", "decoder")):
            table = state[f"{stack}_embeddings.position_embeddings.weight"]
            named[f"positions.{number}.weight"] = table
            blocks = {"self_attn": "attention"}
            if stack == "decoder":
                blocks["multihead_attn"] = "cross_attention"
            for layer in range(2):
                ours, theirs = f"{stack}.layer.{layer}", f"{stack}.layers.{layer}"
                for kind in ("weight", "bias"):
                    for norm, (block, own) in enumerate(blocks.items(), 1):
                        named[f"{theirs}.{block}.in_proj_{kind}"] = torch.cat(
                            [
                                state[f"{ours}.{own}.self.{p}.{kind}"]
                                for p in ("query", "key", "value")
                            ]
                        )
                        out = state[f"{ours}.{own}.output.dense.{kind}"]
                        named[f"{theirs}.{block}.out_proj.{kind}"] = out
                        normed = state[f"{ours}.{own}.output.LayerNorm.{kind}"]
                        named[f"{theirs}.norm{norm}.{kind}"] = normed
                    named[f"{theirs}.linear1.{kind}"] = state[f"{ours}.intermediate.dense.{kind}"]
                    named[f"{theirs}.linear2.{kind}"] = state[f"{ours}.output.dense.{kind}"]
                    last = f"{theirs}.norm{len(blocks) + 1}.{kind}"
                    named[last] = state[f"{ours}.output.LayerNorm.{kind}"]
            if self.config.normalize_before:
                for kind in ("weight", "bias"):
                    named[f"{stack}.norm.{kind}"] = state[f"{stack}.final_norm.{kind}"]
        self.load_state_dict(named)
        return self


def build(pre_norm, static, **changes):
    torch.manual_seed(0)
    config = TransformerConfig(
        **SIZES | changes, normalize_before=pre_norm, static_position_embeddings=static
    )
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.15 if parameter.ndim == 1 else 0.2
                parameter.add_(scale * torch.randn_like(parameter))
            assert parameter.requires_grad or (static and "position" in name)
    return model


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (5, 14), generator=generator)
    labels = torch.randint(1, 61, (5, 11), generator=generator)
    mask = (torch.arange(14) < torch.tensor([[14], [9], [3], [1], [12]])).long()
    exists = torch.arange(11) < torch.tensor([[4], [11], [1], [7], [9]])
    return ids * mask, mask, labels.masked_fill(~exists, -100)


def plain_results(model, draws):
    model.zero_grad()
    outs = [model(*draw) for draw in draws]
    torch.stack([loss for _, loss in outs]).sum().backward()
    logits = torch.cat([x[d[2] != -100] for (x, _), d in zip(outs, draws, strict=True)])
    losses = torch.stack([loss.detach() for _, loss in outs])
    slopes = {f"d{name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"logits": logits.detach(), "loss": losses, **slopes}


def our_results(model, draws):
    model.zero_grad()
    outs = [model(ids, mask, labels=labels) for ids, mask, labels in draws]
    torch.stack([out.loss for out in outs]).sum().backward()
    logits = torch.cat([o.logits[d[2] != -100] for o, d in zip(outs, draws, strict=True)])
    losses = torch.stack([out.loss.detach() for out in outs])
    holder = copy.deepcopy(model)
    for parameter, held in zip(model.parameters(), holder.parameters(), strict=True):
        held.data = torch.zeros_like(held) if parameter.grad is None else parameter.grad
    slopes = Plain(model.config).load(holder.state_dict()).named_parameters()
    slopes = {f"d{name}": p.detach() for name, p in slopes}
    return {"logits": logits.detach(), "loss": losses, **slopes}


@each_kind
def test_outputs_and_every_gradient(pre_norm, static):
    model, draws = build(pre_norm, static).eval(), [drawn(seed) for seed in range(8)]
    # The layers of torch.nn have fast paths in eval mode only.
    plain = Plain(model.config).load(model.state_dict()).train()
    plain.positions.requires_grad_(not static)
    actual = our_results(model, draws)
    oracle = plain_results(copy.deepcopy(plain).double(), draws)
    assert {name for name in actual.keys() - oracle.keys() if "positions" not in name} == set()
    actual = {name: actual[name] for name in oracle}
    yardstick = Yardstick(lambda: plain_results(plain, draws))
    comparisons = compare_all(actual, oracle, yardstick, factor=3.0, reason=REASON)
    failed = [str(each) for each in comparisons if not each.passed]
    assert not failed, "\n".join(failed)


@each_kind
def test_positions_and_initial_weights(pre_norm, static):
    config = TransformerConfig(
        **SIZES, normalize_before=pre_norm, static_position_embeddings=static
    )
    model = Transformer(config)
    table = model.encoder_embeddings.position_embeddings.weight.detach()
    if static:
        # Vaswani et al. 2017, section 3.5, with the sines first.
        angles = [[t / 10000 ** (2 * k / 32) for k in range(16)] for t in range(20)]
        expected = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
        assert torch.equal(table, torch.tensor(expected, dtype=torch.float64).float())
    else:
        assert 0.015 < float(table.std()) < 0.025
    weight = model.decoder.layer[1].cross_attention.self.kv.weight.detach()
    assert 0.015 < float(weight.std()) < 0.025
    assert not model.head.decoder.weight[0].any()
    norms = [m for m in model.modules() if type(m).__name__ == "LayerNorm"]
    assert len(norms) == 2 * 2 + 2 * 3 + 2 * pre_norm


@pytest.mark.parametrize("num_beams", [1, 4])
@each_kind
def test_generation_computes_what_the_decoder_computes(pre_norm, static, num_beams):
    """In float64, each token is among the best ones of the whole decoder, or the best one."""
    model = build(pre_norm, static, encoder_layers=1).double().eval()
    ids, mask, _ = drawn(3)
    got = model.generate(ids, mask, max_length=12, num_beams=num_beams)
    logits = model(ids, mask, decoder_input_ids=got[:, :-1]).logits
    tokens = got[:, 1:]
    counted = (tokens == 1).cumsum(1).cumsum(1) <= 1
    ranks = (logits > logits.gather(2, tokens.unsqueeze(2))).sum(2)
    assert (ranks[counted] < num_beams * 2).all()
    if num_beams == 1:
        assert not ranks[counted].any()


def test_a_pre_norm_model_is_reopened(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = build(True, False).eval()
    model.save_pretrained(tmp_path)
    again = Transformer.from_pretrained(tmp_path)
    assert again.config == model.config
    ids, mask, labels = drawn(0)
    expected = model(ids, mask, labels=labels)
    assert torch.equal(again(ids, mask, labels=labels).logits, expected.logits)
    with pytest.raises(ValueError, match="fastbert_transformer"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_the_encoder_runs_as_one_call():
    for pre_norm in (False, True):
        model = build(pre_norm, True).eval()
        with torch.no_grad():
            choices = model.backends()
        if choices["attention"].backend == "cpu":
            assert choices["encoder"].reason == "all layers in one call"
    with pytest.raises(ValueError, match="backend: got 'gpu'"):
        Transformer(model.config, backend="gpu")
    model.set_backend("reference")
    assert model.backend == model.backends("cpu")["linear"].backend == "reference"
