"""Modules of an HF model that are not stock get the inputs of transformers, ``(B, L, H)``.

Each test changes the accelerated model and the stock models alike. Changes that depend on the
position of a token show whether a module still receives separate sequences.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from stock_families import (
    FAMILIES,
    assert_gradients_close,
    assert_outputs_close,
    build,
    gradients,
    inputs,
    of_each_kind,
    run,
    run_with_gradients,
    total,
)
from tiny_models import Sides, batch, config, model, rows_computed, sides
from torch import Tensor, nn
from torch.nn.utils import prune

import fastbert
from fastbert import BertConfig, BertModel
from fastbert.integrations.accelerate import bound_encoders
from fastbert.integrations.row_wise import is_row_wise
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick

Change = Callable[[nn.Module], None]


def cut(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    """Set the token at position 3 of each sequence to 0, as a forward hook."""
    out = out.clone()
    out[:, 3] = 0
    return out


def by_position(module: nn.Module, given: Any) -> Any:
    """Scale each token of a sequence by its position, as a forward pre-hook."""
    x = given[0]
    return (x * torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)[:, None], *given[1:])


class OfSequence(nn.Linear):
    """A linear layer that adds the mean of its sequence's first two tokens to its result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, :2].mean(1, keepdim=True).sum(-1, keepdim=True)


def linears(side: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the parent, name and module of each linear layer inside the encoder layers."""
    (bound,) = bound_encoders(accelerated(side)).values()
    paths = [path for leaf in bound.leaves if not leaf.embeds for path in leaf.paths]
    names = []
    for path in paths:
        parent, _, name = path.rpartition(".")
        module = side.get_submodule(path)
        if isinstance(module, nn.Linear):
            names.append((side.get_submodule(parent), name, module))
    return names


def accelerated(side: nn.Module) -> Any:
    return fastbert.accelerate(copy.deepcopy(side).float())


def hook_on(number: int) -> Change:
    return lambda side: linears(side)[number][2].register_forward_hook(cut) and None


def hook_before(number: int) -> Change:
    return lambda side: linears(side)[number][2].register_forward_pre_hook(by_position) and None


def another(number: int) -> Change:
    def change(side: nn.Module) -> None:
        linears(side)[number][2].__class__ = OfSequence

    return change


def words(side: Any) -> nn.Embedding:
    return side.get_input_embeddings()


def hook_on_words(side: nn.Module) -> None:
    words(side).register_forward_hook(cut)


def hook_on_embedding(side: nn.Module) -> None:
    getattr(side, "embeddings", words(side)).register_forward_hook(cut)


def max_norm(side: nn.Module) -> None:
    words(side).max_norm = 1.0


def frequency(side: nn.Module) -> None:
    words(side).scale_grad_by_freq = True


def no_padding(side: nn.Module) -> None:
    words(side).padding_idx = None


def other_padding(side: nn.Module) -> None:
    words(side).padding_idx = 7


CHANGES: dict[str, Change] = {
    "a hook on the first linear layer": hook_on(0),
    "a hook on the last linear layer": hook_on(-1),
    "a hook before the second linear layer": hook_before(1),
    "a linear layer of another class": another(-1),
    "a hook on the words": hook_on_words,
    "a hook on the embedding": hook_on_embedding,
    "max_norm": max_norm,
    "scale_grad_by_freq": frequency,
    "no padding_idx": no_padding,
    "another padding_idx": other_padding,
}


@pytest.mark.each_value
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_outputs_and_gradients_of_every_family(family, change, padding) -> None:
    stock = build(family)
    pair = sides(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* got sequences that begin with padding")
        for side in pair:
            CHANGES[change](side)
        given = inputs(padding, family)
        if padding == "none":
            del given["attention_mask"]
        compare(pair, given)
        assert bound_encoders(pair.fast)


def compare(pair: Sides, given: dict[str, Tensor]) -> None:
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    whole = {**given, "attention_mask": mask}

    def result(side: nn.Module) -> Any:
        if "attention_mask" in given:
            return run_with_gradients(side, whole)
        side.zero_grad()
        out = run(side, given).existing(mask)
        total(out).backward()
        return out.detached(), gradients(side)

    fast = result(pair.fast)
    with InFloat64():
        oracle = result(pair.oracle)
    yardstick = Yardstick(lambda: result(pair.stock))
    assert_outputs_close(fast[0], oracle[0], yardstick[0])
    assert_gradients_close(fast[1], oracle[1], yardstick[1])


def test_a_module_that_is_called_sees_what_stock_shows_it() -> None:
    shapes: list[dict[str, Any]] = []
    pair = sides(model())
    for side in pair[::2]:
        seen: dict[str, Any] = {}
        for name, module in side.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("pooler"):
                module.register_forward_hook(
                    lambda m, given, out, name=name, seen=seen: seen.update(
                        {name: (given[0].shape, out.shape)}
                    )
                )
        with torch.no_grad():
            side(**batch())
        shapes.append(seen)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 12


def test_unpadding_follows_the_embedding_that_is_called() -> None:
    pair = sides(model())
    pair.each(hook_on_embedding)
    pair.check(batch())
    pair.each(lambda side: side.embeddings._forward_hooks.clear())
    pair.check(batch())
    assert not bound_encoders(pair.fast)[""].called


def test_padding_is_removed_again_after_the_last_hook() -> None:
    made = fastbert.accelerate(model())
    handle = made.encoder.layer[0].attention.self.query.register_forward_hook(cut)
    seen = []
    for _ in range(2):
        with rows_computed() as rows, torch.no_grad():
            made(**batch())
        seen.append(set(rows))
        handle.remove()
    assert seen == [{4}, {39}], "the first shape is (B, L, H)"


def test_the_noise_of_neftune_has_the_shape_of_stock(tmp_path) -> None:
    made = fastbert.accelerate(model("BertForSequenceClassification"))
    given = batch()
    data = [
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(i % 2)}
        for i, (ids, mask) in enumerate(zip(*given.values(), strict=True))
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), neftune_noise_alpha=5.0, max_steps=2, use_cpu=True,
        per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(made, arguments, train_dataset=data).train()
    assert not words(made)._forward_hooks


def quantized(side: nn.Module) -> nn.Module:
    kinds = {nn.Linear}
    return torch.ao.quantization.quantize_dynamic(side, kinds, torch.qint8, inplace=True)


@pytest.mark.parametrize("family", ["bert", "modernbert", "nomic_bert"])
def test_dynamic_quantization_sees_the_padding_of_stock(family) -> None:
    """Dynamic quantization is as exact as in stock, because its scale includes padded rows too."""
    stock = build(family)
    fast = fastbert.accelerate(copy.deepcopy(stock))
    given = inputs("right", family)
    exists = given["attention_mask"].bool()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exact = stock(**given).last_hidden_state[exists]
        outs = [side(**given).last_hidden_state[exists] for side in map(quantized, (fast, stock))]
    errors = [(out - exact).square().mean().sqrt() for out in outs]
    assert 0.0 < errors[0] <= 1.5 * errors[1]


# Tests of the table of modules that compute each row separately


def parametrized(linear: nn.Linear) -> nn.Module:
    nn.utils.parametrizations.weight_norm(linear)
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    return prune.random_unstructured(linear, "weight", amount=0.3)


def old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear)


ROW_WISE: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "parametrized": parametrized,
    "pruned": pruned,
    "weight norm": old_weight_norm,
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_modules_need_no_padding(name) -> None:
    def change(side: nn.Module) -> None:
        ROW_WISE[name](side.encoder.layer[1].intermediate.dense)  # type: ignore[union-attr, operator, index]

    pair = sides(model())
    pair.each(change)
    with torch.no_grad(), rows_computed() as rows:
        fast = pair.fast(**batch()).last_hidden_state
        stock = pair.stock(**batch()).last_hidden_state
    mask = batch()["attention_mask"].bool()
    torch.testing.assert_close(fast[mask], stock[mask])
    assert set(rows) == {39}


def test_modules_that_are_not_row_wise() -> None:
    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(cut)
    own = nn.Linear(3, 3)
    own.forward = lambda x: x  # type: ignore[method-assign]
    quantized_linear = quantized(nn.Sequential(nn.Linear(3, 3)))[0]  # type: ignore[index]
    for module in (hooked, own, OfSequence(3, 3), quantized_linear, nn.Identity()):
        assert not is_row_wise(module), module
    assert is_row_wise(nn.Linear(3, 3))


# Adapters

peft = pytest.importorskip("peft", reason="needs peft: pip install 'fastbert[test]'")


def test_a_batch_with_one_adapter_per_sequence() -> None:
    def add(side: Any) -> Any:
        torch.manual_seed(4)
        settings = peft.LoraConfig(target_modules=["query", "dense"], init_lora_weights=False)
        made = peft.get_peft_model(side, settings, adapter_name="one")
        made.add_adapter("two", settings)
        return made.eval()

    names = ["one", "two", "__base__", "two"]
    fast, stock = (add(side) for side in sides(model())[::2])
    stock.load_state_dict(fast.state_dict())
    with torch.no_grad():
        outs = [side(**batch(), adapter_names=names).last_hidden_state for side in (fast, stock)]
    mask = batch()["attention_mask"].bool()
    torch.testing.assert_close(outs[0][mask], outs[1][mask])


@pytest.mark.parametrize("target", ["Wqkv", "Wo", "Wi", "all-linear"])
def test_lora_on_modernbert(target) -> None:
    stock = build("modernbert")
    fast = fastbert.accelerate(copy.deepcopy(stock))
    given = inputs("right", "modernbert")
    outs = []
    for side in (fast, stock):
        torch.manual_seed(4)
        settings = peft.LoraConfig(
            target_modules=target if target == "all-linear" else [target], init_lora_weights=False
        )
        made = peft.get_peft_model(side, settings).eval()
        out = made(**given).last_hidden_state[given["attention_mask"].bool()]
        out.square().sum().backward()
        grads = {n: p.grad for n, p in made.named_parameters() if p.requires_grad}
        outs.append((out, grads))
    torch.testing.assert_close(outs[0][0], outs[1][0])
    for name, gradient in outs[1][1].items():
        torch.testing.assert_close(outs[0][1][name], gradient, rtol=1e-3, atol=2e-3, msg=name)


def test_lora_on_the_projection_of_our_own_model() -> None:
    made = BertModel(BertConfig.preset("tiny", vocab_size=97)).eval()
    before = made(batch()["input_ids"]).last_hidden_state
    adapted = peft.get_peft_model(made, peft.LoraConfig(target_modules=["qkv"])).eval()
    torch.testing.assert_close(adapted(batch()["input_ids"]).last_hidden_state, before)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(batch()["input_ids"]).last_hidden_state, before)


def test_other_changes_of_a_projection_of_our_own_model() -> None:
    made = BertModel(BertConfig.preset("tiny", vocab_size=97)).eval()
    ids = batch()["input_ids"]
    before = made(ids).last_hidden_state
    qkv = made.encoder.layer[0].attention.self.qkv
    seen = []
    handle = qkv.register_forward_hook(lambda m, given, out: seen.append(out.shape))
    torch.testing.assert_close(made(ids).last_hidden_state, before)
    handle.remove()
    prune.identity(qkv, "weight")
    torch.testing.assert_close(made(ids).last_hidden_state, before)
    assert [len(shape) for shape in seen] == [2]


def test_the_first_padding_row_of_positions_has_no_gradient() -> None:
    for family in ("Roberta", "XLMRoberta", "Camembert", "MPNet"):
        settings = config(family, pad_token_id=1)
        made = model(f"{family}Model", settings)
        ids = batch()["input_ids"].clamp(min=1)
        grads = []
        for side in sides(made)[::2]:
            side(input_ids=ids).last_hidden_state.sum().backward()
            grads.append(side.embeddings.position_embeddings.weight.grad)
        assert (ids == 1).any()
        assert not grads[0][1].any(), family
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["modernbert", "nomic_bert"])
def test_rotary_frequencies_that_were_rounded_stay_rounded(family) -> None:
    stock = build(family, max_position_embeddings=400)
    stock.bfloat16().float()
    pair = sides(stock)
    given = inputs("right", family, length=300)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        exists = given["attention_mask"].bool()
        outs = [side(**given).last_hidden_state[exists] for side in (pair.fast, pair.stock)]
    torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_a_write_into_a_buffer_is_seen(name) -> None:
    pair = sides(model())
    with torch.no_grad():
        pair.fast(**batch())
    pair.each(lambda side: getattr(side.embeddings, name)[0, 2:].fill_(1))
    pair.check(batch())
    assert list(bound_encoders(pair.fast)[""].called) == ["embeddings"]
