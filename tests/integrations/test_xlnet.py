"""XLNet, natively and accelerated, agrees with transformers in float64."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from xlnet_cases import CALLS, LENGTH, ROWS, arguments, build, call, compare, ids, results, tokens

import fastbert
from fastbert.integrations.accelerate import bound_encoders, obstacles
from fastbert.modules.xlnet import XLNetConfig, XLNetLMHeadModel, XLNetModel
from fastbert.testing.compare import assert_close

CONFIGS = {
    "bi": {},
    "clamped": {"clamp_len": 5},
    "short memory": {"mem_len": 4, "reuse_len": 9},
    "whole memory": {"mem_len": None},
}


def native(stock, tmp_path):
    stock.save_pretrained(tmp_path)
    return XLNetLMHeadModel.from_pretrained(tmp_path)


def labelled(given):
    wide = given["target_mapping"].shape[1] if "target_mapping" in given else LENGTH
    labels = ids(7, ROWS, wide)
    labels[0, 1] = -100
    if "attention_mask" in given and "target_mapping" not in given:
        labels[~given["attention_mask"].bool()] = -100
    if "input_mask" in given:
        labels[given["input_mask"] > 0] = -100
    return {"labels": labels}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("side", ["native", "accelerated"])
def test_every_call(name, side, tmp_path):
    stock = build()
    given = {"input_ids": ids(), **arguments(name)}
    given |= labelled(given)
    fast = native(stock, tmp_path) if side == "native" else fastbert.accelerate(build())
    compare(results(fast, given), stock, given)
    if side == "accelerated":
        assert obstacles(fast) == {"transformer": None}


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_and_recurrence(config, tmp_path):
    stock = build(**CONFIGS[config])
    for fast in (native(stock, tmp_path), fastbert.accelerate(build(**CONFIGS[config]))):
        given = {"input_ids": ids(3), **arguments("types")}
        with torch.no_grad():
            mems = {"mems": call(stock, {"input_ids": ids()}).mems}
        compare(results(fast, given | mems), stock, given | mems)
        with torch.no_grad():
            first = call(fast, {"input_ids": ids()}).mems
            second = call(fast, given | {"mems": first})
            again = call(stock, given | mems)
            assert [m.shape for m in second.mems] == [m.shape for m in again.mems]


def test_one_direction(tmp_path):
    stock = build(attn_type="uni")
    given = {"input_ids": ids(), **arguments("types")}
    for fast in (native(stock, tmp_path), fastbert.accelerate(build(attn_type="uni"))):
        compare(results(fast, given), stock, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["right", "memory", "permuted"])
def test_16_bits(name, dtype):
    stock = build().to(dtype)
    given = {"input_ids": ids(), **arguments(name)}
    fast = fastbert.accelerate(build().to(dtype))
    with torch.no_grad():
        compare(results(fast, given, backward=False), stock, given)


def test_a_query_that_sees_nothing_attends_to_all_keys():
    stock, fast = build(), fastbert.accelerate(build())
    given = {"input_ids": ids(), **arguments("two streams")}
    given["target_mapping"][0] = 0.0
    given["target_mapping"][0, 0, 3] = 1.0
    given["perm_mask"][0, 3] = 1.0
    with torch.no_grad():
        compare(results(fast, given, backward=False), stock, given)


HEADS = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnsweringSimple",
    "ForMultipleChoice",
)


@pytest.mark.parametrize("head", HEADS)
def test_the_heads_of_transformers(head):
    stock, fast = build(head), fastbert.accelerate(build(head))
    # A classifier of XLNet reads the last token, so padding is on the left.
    batch = {"input_ids": ids(), **arguments("left")}
    if head == "ForMultipleChoice":
        batch = {k: v[:, None] if k != "use_mems" else v for k, v in batch.items()}
        batch["attention_mask"] = 1.0 - batch.pop("input_mask")
    with torch.no_grad():
        expected, actual = stock(**batch), fast(**batch)
        exact = call(copy.deepcopy(stock).double(), batch)
    assert list(expected.keys()) == list(actual.keys())
    real = tokens(arguments("left"))
    for name in list(expected):
        sides = [getattr(x, name) for x in (actual, exact, expected)]
        if sides[0].shape[:2] == real.shape:
            sides = [side[real] for side in sides]
        assert_close(name, *sides)


def test_generation_is_that_of_transformers():
    stock, fast = build(), fastbert.accelerate(build())
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(stock.generate(ids(), **options), fast.generate(ids(), **options))


def test_save_reopen_copy_pickle_and_restore(tmp_path):
    stock, fast = build(), fastbert.accelerate(build())
    own = native(stock, tmp_path / "a")
    own.save_pretrained(tmp_path / "b")
    again = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "b").eval()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(stock.named_parameters())[name]), name
    without = XLNetModel.from_pretrained(tmp_path / "b")
    without.save_pretrained(tmp_path / "c")
    alone = transformers.XLNetModel.from_pretrained(tmp_path / "c").eval()
    with torch.no_grad():
        expected = stock(ids()).logits
        hidden = stock.transformer(ids()).last_hidden_state
        for other in (own, again, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            torch.testing.assert_close(other(ids()).logits, expected, rtol=1e-4, atol=1e-5)
        for other in (without, alone):
            torch.testing.assert_close(other(ids()).last_hidden_state, hidden, rtol=1e-4, atol=1e-5)
    fastbert.restore(fast)
    assert type(fast.transformer) is transformers.XLNetModel
    assert bound_encoders(fast) == {}


@pytest.mark.parametrize("kind", [XLNetModel, XLNetLMHeadModel])
@pytest.mark.parametrize("name", ["layer.1.rel_attn.q", "word_embedding.weight"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "missing: 1 weights: {name}"),
        (torch.zeros(3, 3), "{name}: got shape (3, 3)"),
        (torch.zeros(3, dtype=torch.int64), "{name}: got "),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(kind, name, value, message, tmp_path):
    native(build(), tmp_path / "a").transformer.save_pretrained(tmp_path)
    if kind is XLNetLMHeadModel:
        native(build(), tmp_path / "a").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    [name] = [key for key in tensors if key.endswith(name)]
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(message.format(name=name))):
        kind.from_pretrained(tmp_path)


def test_a_checkpoint_without_a_head_and_one_with_another_weight_are_refused(tmp_path):
    build().transformer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r": missing: 1 weights: lm_loss\.bias$"):
        XLNetLMHeadModel.from_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "other": torch.zeros(2)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r": not in the model of config\.json: 1 weights: other$"):
        XLNetModel.from_pretrained(tmp_path)


def test_every_write_to_a_weight_is_seen():
    """The projected positions are kept between calls; see ``KeptResult``."""
    stock, fast = build().requires_grad_(False), fastbert.accelerate(build().requires_grad_(False))

    def agree():
        torch.testing.assert_close(fast(ids()).logits, stock(ids()).logits, rtol=1e-4, atol=1e-5)

    agree()
    for change in (
        lambda p: p.mul_(1.5),
        lambda p: p.data.mul_(0.5),
        lambda p: p.data.__setitem__((3, 1, 2), 9.0),
        lambda p: p.detach().numpy().__setitem__((0, 0, 0), 4.0),
        lambda p: setattr(p, "data", p.data.flip(0).contiguous()),
    ):
        for model in (fast, stock):
            change(model.transformer.layer[1].rel_attn.r)
        agree()


def test_a_model_that_deviates_runs_the_code_of_transformers():
    fast = fastbert.accelerate(build())
    expected = fast(ids()).logits
    fast.transformer.layer[1].ff.layer_1.register_forward_hook(lambda module, given, out: out + 1)
    with pytest.warns(UserWarning, match=r"XLNetModel runs its own code, padded: .*layer_1"):
        changed = fast(ids()).logits
    assert not torch.allclose(changed, expected)
    with pytest.raises(ValueError, match=r"^accelerate: bi_data: got True, allowed: False"):
        fastbert.accelerate(build(bi_data=True))
    with pytest.raises(ValueError, match=r"got 'xlnet', allowed: bert, "):
        fastbert.quantize(fastbert.accelerate(build()))


def test_bad_arguments():
    model = XLNetModel(XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=24))
    good = ids(rows=2, length=6) % 50
    for name, given in (
        ("input_ids, inputs_embeds", {}),
        ("input_ids", {"input_ids": good[0]}),
        ("input_ids", {"input_ids": good + 50}),
        ("attention_mask", {"input_ids": good, "attention_mask": torch.ones(2, 5)}),
        ("perm_mask", {"input_ids": good, "perm_mask": torch.ones(2, 6, 5)}),
        ("target_mapping", {"input_ids": good, "target_mapping": torch.ones(2, 6)}),
        ("token_type_ids", {"input_ids": good, "token_type_ids": good[:, :3]}),
        (
            "input_mask",
            {"input_ids": good, "input_mask": good * 0, "attention_mask": good * 0 + 1},
        ),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            model(**given)
    for name, value in (("d_model", 15), ("attn_type", "both"), ("dropout", 2.0), ("n_layer", 0)):
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            XLNetConfig(**{"d_model": 16, "n_head": 2, name: value})
