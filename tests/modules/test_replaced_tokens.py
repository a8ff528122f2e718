"""The mask decoder and replaced token detection agree with plain float64 code (DeBERTa v3)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbert import BertConfig, BertModel
from fastbert.config import Architecture, RelativePositions
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.models.replaced_tokens import (
    SHARING,
    DebertaForMaskedLM,
    DebertaForReplacedTokenDetection,
    MaskDecoder,
)
from fastbert.parity.gradients import FACTOR, REASON, kinds
from fastbert.reference import deberta as plain
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

MASK, PADDING = 4, 0
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-7,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "model_type": "deberta-v2",
}
SETTINGS = plain.Deberta(heads=4, eps=1e-7, span=8, farthest=64)


def config(layers: int, **changes) -> BertConfig:
    relative = RelativePositions(**{"span": 8, "farthest": 64, "shared": True, **changes})
    architecture = Architecture(
        position_table=False, type_table=False, pooler=False, relative_positions=relative
    )
    return BertConfig(num_hidden_layers=layers, architecture=architecture, **SIZES)


def shaken(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(length: int = 40):
    ids = torch.randint(5, 97, (3, length))
    mask = torch.arange(length) < torch.tensor([[length], [length // 2], [length - 7]])
    picked = (torch.rand(ids.shape) < 0.2) & mask
    picked[:, 1] = True
    labels = ids.masked_fill(~picked, -100)
    ids = ids.masked_fill(picked, MASK).masked_fill(~mask, PADDING)
    return ids, labels, mask


def parameters_of(model, dtype):
    """Return the parameters as leaves, and the same by the names of a state dict."""
    leaves = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}
    named = {}
    for name, leaf in leaves.items():
        if ".qkv." not in name:
            named[name] = leaf
            continue
        for part, chunk in zip(("query", "key", "value"), leaf.chunk(3), strict=True):
            named[name.replace("qkv", part)] = chunk
    return leaves, named


def under(parameters, prefix):
    return {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}


def generated(named, ids, labels, mask, layers, settings=SETTINGS):
    """Return the loss and the logits of a `DebertaForMaskedLM` in plain code."""
    encoder, head = under(named, "encoder."), under(named, "head.")
    words = encoder["embeddings.word_embeddings.weight"]
    states = plain.deberta_states(encoder, F.embedding(ids, words, PADDING), mask, settings)
    positions = named["decoder.position_embeddings.weight"]
    decoded = plain.mask_decoder(encoder, positions, states[-2], layers, mask, settings)
    rows = decoded[labels != -100]
    inner = F.gelu(F.linear(rows, head["transform.dense.weight"], head["transform.dense.bias"]))
    weight, bias = head["transform.LayerNorm.weight"], head["transform.LayerNorm.bias"]
    logits = F.linear(F.layer_norm(inner, (48,), weight, bias, 1e-7), words, head["bias"])
    return F.cross_entropy(logits, labels[labels != -100]), logits


def gradients(leaves):
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(results, gradients_of, reference):
    """Compare results and gradients with `reference(dtype)`, which computes both in plain code."""
    exact, nearby = reference(torch.float64), Yardstick(lambda: reference(torch.float32))
    for name, actual in results.items():
        assert_close(name, actual, exact[name], nearby[name])
    actual = gradients(dict(gradients_of.named_parameters()))
    assert actual.keys() == exact["gradients"].keys()
    for kind, names in kinds(actual).items():

        def joined(side, names=names):
            return torch.cat([side[name].flatten() for name in names])

        sides = each(joined, actual, exact["gradients"], nearby["gradients"])
        assert_close(f"gradient of {kind}", *sides, factor=FACTOR, reason=REASON)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("farthest", [64, None])
def test_the_mask_decoder(shared, farthest):
    torch.manual_seed(0)
    settings = SETTINGS._replace(farthest=farthest)
    model = shaken(DebertaForMaskedLM(config(3, shared=shared, farthest=farthest)))
    ids, labels, mask = batch()
    loss, logits = model(ids, labels, mask)
    loss.backward()

    def reference(dtype):
        leaves, named = parameters_of(model, dtype)
        loss, logits = generated(named, ids, labels, mask, 3, settings)
        loss.backward()
        return {"loss": loss, "logits": logits, "gradients": gradients(leaves)}

    compare({"loss": loss, "logits": logits}, model, reference)


@pytest.mark.parametrize("sharing", SHARING)
def test_replaced_tokens(sharing):
    torch.manual_seed(0)
    model = shaken(
        DebertaForReplacedTokenDetection(config(2), config(3, shared=False), sharing=sharing)
    )
    ids, labels, mask = batch()
    out = model(ids, labels, mask, random=torch.Generator().manual_seed(3))
    out.loss.backward()
    assert torch.equal(out.ids[labels == -100], ids[labels == -100])
    assert torch.equal(out.replaced, (labels != -100) & (out.ids != labels))

    def reference(dtype):
        leaves, named = parameters_of(model, dtype)
        first, _ = generated(under(named, "generator."), ids, labels, mask, 2)
        shared = named["generator.encoder.embeddings.word_embeddings.weight"]
        own = named.get("discriminator.embeddings.word_embeddings.weight", shared)
        embeds = F.embedding(out.ids, own, PADDING)
        if sharing == "gdes":
            embeds = embeds + F.embedding(out.ids, shared.detach())
        states = plain.deberta_states(under(named, "discriminator."), embeds, mask, SETTINGS)
        logits = plain.replaced_token_logits(under(named, "head."), states[-1], SETTINGS)[mask]
        second = F.binary_cross_entropy_with_logits(logits, out.replaced[mask].to(dtype))
        (first + 50.0 * second).backward()
        return {
            "generator_loss": first, "discriminator_loss": second, "logits": logits,
            "gradients": gradients(leaves),
        }  # fmt: skip

    names = ("generator_loss", "discriminator_loss", "logits")
    compare({name: getattr(out, name) for name in names}, model, reference)
    if sharing == "gdes":
        again = model(ids, labels, mask, random=torch.Generator().manual_seed(3))
        model.zero_grad()
        again.discriminator_loss.backward()
        assert model.generator.encoder.embeddings.word_embeddings.weight.grad is None


@pytest.mark.parametrize("sharing", SHARING)
def test_the_discriminator_is_a_model_of_its_own(sharing):
    torch.manual_seed(1)
    model = shaken(DebertaForReplacedTokenDetection(config(2), config(3), sharing=sharing)).eval()
    ids, labels, mask = batch()
    alone = BertModel(config(3)).eval()
    alone.load_state_dict(model.discriminator_state())
    with torch.no_grad():
        out = model(ids, labels, mask)
        encoded = alone.encode(out.ids, mask)
        assert_close("logits", model.head(encoded), out.logits.double(), out.logits)


def test_a_few_steps_lower_the_loss_of_the_generator():
    torch.manual_seed(2)
    model = DebertaForReplacedTokenDetection(config(2), config(2))
    ids, labels, mask = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        out = model(ids, labels, mask)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.generator_loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_packed_sequences_and_padding_on_the_left():
    torch.manual_seed(3)
    model = shaken(DebertaForMaskedLM(config(2))).eval()
    ids = torch.randint(5, 97, (2, 12))
    with torch.no_grad():
        _, whole = model(ids)
        ends = torch.tensor([0, 12, 24], dtype=torch.int32)
        _, packed = model(ids.flatten(), cu_seqlens=ends)
        assert_close("packed", packed, whole.double(), whole)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        _, logits = model(ids, attention_mask=mask)
        # The positions of a sequence count the padding before it.
        labels = torch.full_like(ids, -100)
        labels[1, 7] = 9
        _, one = model(ids, labels, mask)
        assert_close("labelled", one, logits[12 + 2 : 12 + 3].double(), one)


def test_no_label_and_bad_arguments():
    model = DebertaForReplacedTokenDetection(config(2), config(2))
    ids, labels, mask = batch()
    out = model(ids, torch.full_like(labels, -100), mask)
    assert out.generator_loss.item() == 0.0
    assert not out.replaced.any()
    for name, options in (("sharing", {"sharing": "all"}), ("weight", {"weight": -1.0})):
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            DebertaForReplacedTokenDetection(config(2), config(2), **options)
    other = config(2).replace(vocab_size=50)
    with pytest.raises(ValueError, match=r"^discriminator\.vocab_size: got 50, allowed: 97"):
        DebertaForReplacedTokenDetection(config(2), other)
    with pytest.raises(ValueError, match=r"^relative_positions: got None"):
        MaskDecoder(BertConfig.preset("tiny"))
    decoder = MaskDecoder(config(2))
    encoder = BertModel(config(2))
    encoder.encoder.layer[-1] = torch.nn.Identity()
    with pytest.raises(TypeError, match=r"^layer: got Identity, allowed: a layer with relative"):
        decoder(encoder.encoder, torch.zeros(0, 48), BatchLayout(0, 1))
