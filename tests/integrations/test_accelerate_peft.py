"""PEFT adapters work if they are added before ``accelerate`` or after it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_accelerate_training import check_step, examples, step, trainer
from tiny_models import LENGTHS, REASON, Sides, agree, batch, model, rows_computed, sides, values
from torch import nn

import fastbert
from fastbert.integrations.accelerate import bound_encoders
from fastbert.testing.yardstick import Yardstick

peft = pytest.importorskip("peft", reason="needs peft: pip install 'fastbert[test]'")

ALL = ["query", "key", "value", "dense"]


def lora(targets: Any = ("query", "value"), **changes: Any) -> Any:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
    settings |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    return peft.LoraConfig(target_modules=targets, **settings | changes)


def wrapped(made: nn.Module, settings: Any) -> Any:
    """Add adapters with random weights, because new adapters of PEFT change no output."""
    made = peft.get_peft_model(made, settings)
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return made


def adapted(settings: Any, when: str = "before") -> Sides:
    made = model("BertForSequenceClassification")
    if when == "before":
        return sides(wrapped(made, settings))
    pair = sides(made)
    with torch.no_grad():
        pair.fast(**batch())
    return Sides(*(wrapped(side, settings) for side in pair))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("targets", [["query", "value"], ALL, "all-linear"], ids=str)
def test_lora(targets, when) -> None:
    pair = adapted(lora(targets), when)
    assert len(bound_encoders(pair.fast)) == 1
    trained = {n for n, p in pair.fast.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "classifier" in name for name in trained)
    if targets == ["query", "value"]:
        pair.check(batch())
        pair.each(lambda side: side.train())
        check_step(pair)
    else:
        # With an adapter on every linear layer, fastbert calls each linear layer separately.
        with torch.no_grad():
            agree(*pair.run(lambda side: values(side, batch())))

        # The gradients of the low-rank factors of the key have few elements and nearly cancel to 0,
        # so all gradients are compared as one vector.
        def joined(side: Any) -> dict[str, torch.Tensor]:
            return {"gradient": torch.cat([x.flatten() for x in step(side).values()])}

        agree(*pair.run(joined), factor=3.0, reason=REASON)
    step(pair.fast)
    assert {n for n, p in pair.fast.named_parameters() if p.grad is not None} == trained


def test_padding_is_not_computed_with_adapters_on_every_linear() -> None:
    pair = adapted(lora("all-linear"))
    rows = []
    adapter = peft.tuners.lora.layer.Linear
    real = adapter.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(x.shape[:-1])
        return real(self, x, *args, **kwargs)

    with mock.patch.object(adapter, "forward", forward):
        pair.fast(**batch())
    # Two layers, which have six linear layers each, run before the pooler of the head.
    assert rows[:12] == [(sum(LENGTHS),)] * 12


def test_disabled_and_merged_and_unmerged_adapters() -> None:
    pair, plain = adapted(lora()), sides(model("BertForSequenceClassification"))
    with torch.no_grad():
        adapted_logits = pair.fast(**batch()).logits
        with pair.fast.disable_adapter():
            torch.testing.assert_close(pair.fast(**batch()).logits, plain.stock(**batch()).logits)
        pair.check(batch())
        pair.fast.merge_adapter()
        torch.testing.assert_close(pair.fast(**batch()).logits, adapted_logits)
        pair.fast.unmerge_adapter()
        pair.check(batch())
        merged = pair.fast.merge_and_unload()
        with rows_computed() as rows:
            torch.testing.assert_close(merged(**batch()).logits, adapted_logits)
    assert rows == [sum(LENGTHS)], "all layers are one call again"
    assert not any("lora" in name for name in merged.state_dict())


def test_a_second_adapter() -> None:
    pair = adapted(lora())
    first = pair.stock(**batch()).logits

    def add(side: Any) -> None:
        torch.manual_seed(11)
        side.add_adapter("other", lora(["key"], init_lora_weights=False))
        side.set_adapter("other")

    pair.each(add)
    for side in pair:
        for name, parameter in side.named_parameters():
            if "other" in name:
                parameter.data = pair.stock.get_parameter(name).data.to(parameter.dtype)
    pair.check(batch())
    assert not torch.equal(pair.stock(**batch()).logits, first)
    pair.each(lambda side: side.set_adapter("default"))
    pair.check(batch())


def test_dropout_of_the_adapter_is_on_in_training_alone() -> None:
    made = adapted(lora(lora_dropout=0.5)).fast
    made.train()
    assert not torch.equal(made(**batch()).logits, made(**batch()).logits)
    made.eval()
    assert torch.equal(made(**batch()).logits, made(**batch()).logits)


def test_the_adapter_is_saved_and_loaded(tmp_path) -> None:
    pair = adapted(lora(ALL), "after")
    pair.fast.save_pretrained(tmp_path / "fast")
    pair.stock.save_pretrained(tmp_path / "stock")
    names = [peft.utils.save_and_load.load_peft_weights(tmp_path / n) for n in ("fast", "stock")]
    assert names[0].keys() == names[1].keys()
    assert all(torch.equal(names[0][n], t) for n, t in names[1].items())
    base = fastbert.accelerate(model("BertForSequenceClassification"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "fast").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch()).logits, pair.fast(**batch()).logits)


@pytest.mark.parametrize(
    "settings",
    [
        lambda: peft.IA3Config(
            task_type="SEQ_CLS",
            target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"],
        ),
        lambda: lora(use_dora=True),
        lambda: lora(["word_embeddings", "query"]),
        lambda: lora(["query"], modules_to_save=["classifier", "pooler"]),
        lambda: lora(["query"], bias="all"),
        lambda: lora(["query"], layers_to_transform=[1]),
    ],
    ids=["ia3", "dora", "embeddings", "pooler", "biases", "one layer"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_other_adapters(settings, when) -> None:
    pair = adapted(settings(), when)
    with torch.no_grad():
        agree(*pair.run(lambda side: values(side, batch())))
    pair.each(lambda side: side.train())
    agree(*pair.run(step), factor=3.0, reason=REASON)


def test_an_adapter_that_transformers_itself_adds() -> None:
    pair = sides(model("BertForSequenceClassification"))

    def add(side: Any) -> None:
        side.add_adapter(lora(modules_to_save=None))
        torch.manual_seed(9)
        with torch.no_grad():
            for name, parameter in side.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape))

    before = pair.stock(**batch()).logits
    pair.each(add)
    pair.check(batch())
    assert not torch.equal(pair.stock(**batch()).logits, before)
    pair.each(lambda side: side.disable_adapters())
    pair.check(batch())
    assert torch.equal(pair.stock(**batch()).logits, before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_prompt_tuning(when) -> None:
    settings = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    pair = adapted(settings, when)
    embedding = pair.stock.prompt_encoder.default.embedding.weight.data
    for side in pair:
        side.prompt_encoder.default.embedding.weight.data = embedding.to(side.dtype).clone()
    with torch.no_grad(), rows_computed() as rows:
        fast = values(pair.fast, batch())
        oracle = values(pair.oracle, batch())
        agree(fast, oracle, Yardstick(lambda: values(pair.stock, batch())))
    assert set(rows) == {sum(LENGTHS) + 4 * 4}
    agree(*pair.run(step), factor=3.0, reason=REASON)


def test_prefix_tuning_is_refused_with_the_reason() -> None:
    settings = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    pair = adapted(settings)
    with pytest.raises(ValueError, match=r"^past_key_values: got a value, allowed: None"):
        pair.fast(**batch())


def test_checkpointing_reaches_the_adapters() -> None:
    pair = adapted(lora())
    pair.each(lambda side: side.train().activation_checkpointing_enable())
    check_step(pair)


def test_restore_under_adapters() -> None:
    pair = adapted(lora(), "after")
    state = {name: t.clone() for name, t in pair.fast.state_dict().items()}
    fastbert.restore(pair.fast)
    with rows_computed() as rows, torch.no_grad():
        assert torch.equal(pair.fast(**batch()).logits, pair.stock(**batch()).logits)
    assert rows == []
    after = pair.fast.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], t) for name, t in state.items())


def test_a_trainer_trains_adapters_as_without(tmp_path) -> None:
    pair, data, curves = adapted(lora()), examples(32, False), []
    for side in pair:
        seen: list[Any] = []
        side.register_forward_hook(lambda m, i, out, seen=seen: seen.append(out.loss.detach()))
        done = trainer(side, tmp_path, data, optim="sgd", learning_rate=0.1)
        done.train()
        curves.append({"loss": torch.stack(seen)})
    agree(*curves, factor=3.0, reason="rounding grows from step to step")
    assert curves[0]["loss"][-8:].mean() < curves[0]["loss"][:8].mean()
