"""Accelerated models have right gradients in training loops, the Trainer, and two processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from _without_gradient import WithoutGradient
from quick_cases import long_case
from tiny_models import (
    LENGTHS,
    REASON,
    Sides,
    agree,
    batch,
    config,
    gradients,
    model,
    rows_computed,
    sides,
)
from torch import Tensor, nn

import fastbert
from fastbert.data import (
    PackedCollatorForSequenceClassification,
    PackedCollatorForTokenClassification,
)
from fastbert.modules import executors
from fastbert.modules import layer as layers
from fastbert.testing.yardstick import Yardstick, each

LABELS = torch.tensor([0, 1, 1, 0])


def step(side: nn.Module, **given: Any) -> dict[str, Tensor]:
    """Return the loss of one step, and the gradients of all parameters."""
    side.zero_grad()
    loss = side(**batch(), labels=LABELS, **given).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(side)


def check_step(pair: Sides) -> None:
    with rows_computed() as rows:
        fast = step(pair.fast)
    assert set(rows) == {sum(LENGTHS)}
    oracle, stock = step(pair.oracle), Yardstick(lambda: step(pair.stock))
    agree(fast, oracle, stock, factor=3.0, reason=REASON)


@pytest.fixture
def pair() -> Sides:
    made = sides(model("BertForSequenceClassification"))
    made.each(lambda side: side.train())
    return made


def test_gradients(pair) -> None:
    check_step(pair)
    assert {n for n, p in pair.fast.named_parameters() if p.grad is None} == set()


@pytest.mark.parametrize("kind", ["BertModel", "NomicBertModel", "ModernBertModel"])
@pytest.mark.parametrize("without", ["one output", "all outputs"])
def test_an_output_whose_gradient_is_none(kind, without) -> None:
    """A None gradient of an output counts as 0; if all are None, no parameter gets a gradient."""

    real = batch()["attention_mask"].bool()

    def slopes(side: nn.Module) -> dict[str, Tensor]:
        side.zero_grad()
        out = side.train()(**batch(), output_hidden_states=without == "one output")
        used = WithoutGradient.apply(out.last_hidden_state).sum()
        if without == "one output":
            used = used + out.hidden_states[1][real].square().sum()
        used.backward()
        return {n: p.grad for n, p in side.named_parameters() if p.grad is not None}

    pair = sides(model(kind, config(kind.removesuffix("Model"))))
    result = pair.run(slopes)
    assert bool(result[0]) == (without == "one output")
    agree(*result, factor=3.0, reason=REASON)


@pytest.mark.parametrize(
    "frozen",
    ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1.attention.self.key", "bert"],
)
def test_what_is_frozen_has_no_gradient(pair, frozen) -> None:
    pair.each(lambda side: side.get_submodule(frozen).requires_grad_(False))
    check_step(pair)
    none = {n for n, p in pair.fast.named_parameters() if p.grad is None}
    assert none == {n for n, _ in pair.fast.named_parameters() if n.startswith(frozen)}


def test_only_one_bias_is_trained(pair) -> None:
    def freeze(side: Any) -> None:
        side.requires_grad_(False)
        side.bert.encoder.layer[0].attention.self.value.bias.requires_grad_(True)

    pair.each(freeze)
    check_step(pair)
    assert sum(p.grad is not None for p in pair.fast.parameters()) == 1


def test_tied_weights_get_both_gradients() -> None:
    pair = sides(model("BertForMaskedLM"))
    labels = batch(seed=2)["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)

    def slopes(side: nn.Module) -> dict[str, Tensor]:
        side.zero_grad()
        side.train()(**batch(), labels=labels).loss.backward()
        return gradients(side)

    result = pair.run(slopes)
    assert "bert.embeddings.word_embeddings.weight" in result[0]
    agree(*result, factor=3.0, reason=REASON)


def test_a_model_frozen_altogether_keeps_no_graph(pair) -> None:
    pair.each(lambda side: side.requires_grad_(False))
    pair.check(batch())
    assert not pair.fast(**batch()).logits.requires_grad


def test_gradients_of_embeddings_given_from_outside(pair) -> None:
    pair.each(lambda side: side.requires_grad_(False))
    given = batch()
    words = torch.randn(4, 19, 48)

    def slope(side: Any) -> dict[str, Tensor | None]:
        embeds = words.to(side.dtype).clone().requires_grad_(True)
        side(inputs_embeds=embeds, attention_mask=given["attention_mask"]).logits.sum().backward()
        return {"embeds": embeds.grad}

    result = pair.run(slope)
    agree(*result, factor=3.0, reason=REASON)
    assert not result[0]["embeds"][given["attention_mask"] == 0].any()


def test_inference_mode(pair) -> None:
    with torch.inference_mode():
        pair.check(batch())
    check_step(pair)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        sides(model()).check(batch())


def test_training_between_two_inferences(pair) -> None:
    pair.each(lambda side: side.eval())
    for _ in range(2):
        pair.check(batch())
        for side in pair:
            optimizer = torch.optim.SGD(side.parameters(), 0.1)
            side.train()
            step(side)
            optimizer.step()
            side.eval()


def test_autocast(pair) -> None:
    """Under autocast, errors are within tolerance; stock autocast's errors set the tolerance."""

    def run(side: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=side is not pair.oracle):
            return step(side)

    result = pair.run(run)
    dtypes = ({name: x.dtype for name, x in s.items()} for s in (result[0], result[2].library))
    assert next(dtypes) == next(dtypes)
    # The errors of a few bf16 sums depend on chance, so all sums are compared as one vector.
    whole = each(lambda s: {"all": torch.cat([x.flatten() for x in s.values()])}, *result)
    agree(*whole, factor=3.0, reason=REASON)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        outs = [side.eval().bert(**batch()).last_hidden_state for side in pair[::2]]
    assert outs[0].dtype == outs[1].dtype


# Gradient checkpointing


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """Return a list with one entry for each forward pass of a fastbert layer in training."""
    seen: list[int] = []
    for room, name in ((layers.BertLayer, "forward"), (executors, "cpu_layer")):
        real = getattr(room, name)

        def forward(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            seen.append(1)
            return real(*args, **kwargs)

        monkeypatch.setattr(room, name, forward)
    return seen


@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointed_layers_are_computed_twice(forwards, when) -> None:
    made = model("BertForSequenceClassification")
    if when == "before":
        made.activation_checkpointing_enable()
    pair = sides(made)
    pair.each(lambda side: side.train())
    if when == "after":
        pair.each(lambda side: side.activation_checkpointing_enable())
    check_step(pair)
    assert len(forwards) == 4
    forwards.clear()
    pair.fast.eval()
    pair.fast(**batch())
    assert len(forwards) == 2
    forwards.clear()
    pair.fast.train().activation_checkpointing_disable()
    step(pair.fast)
    assert len(forwards) == 2


def test_checkpointing_repeats_the_dropout() -> None:
    made = model("BertForSequenceClassification", hidden_dropout_prob=0.3)
    made = fastbert.accelerate(made).train()
    made.enable_input_require_grads()  # transformers also does this for checkpointing.
    runs = []
    for enable in (False, True):
        made.bert.encoder.layer[0].gradient_checkpointing = enable
        torch.manual_seed(5)
        runs.append(step(made))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_checkpointing_of_frozen_weights_reaches_what_is_trained() -> None:
    pair = sides(model("BertForSequenceClassification"))

    def prepare(side: Any) -> None:
        side.train().requires_grad_(False)
        side.bert.encoder.layer[0].output.dense.weight.requires_grad_(True)
        side.activation_checkpointing_enable()

    pair.each(prepare)
    check_step(pair)


# The Trainer


def examples(count: int, per_token: bool, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(3, 20, (), generator=generator))
        ids = torch.randint(5, 97, (length,), generator=generator)
        labels = (ids % 2).tolist() if per_token else int(ids[0] % 2)
        made.append({"input_ids": ids.tolist(), "labels": labels})
    return made


def pad(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(f["input_ids"]) for f in features)
    made = batch(tuple(len(f["input_ids"]) for f in features))
    rows = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
    labels = [f["labels"] for f in features]
    if isinstance(labels[0], list):
        labels = [each + [-100] * (longest - len(each)) for each in labels]
    return made | {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}


def trainer(made: nn.Module, folder: Any, data: Any, collator: Any = pad, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 50,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    arguments = transformers.TrainingArguments(**settings | changes)
    return transformers.Trainer(
        made, arguments, data_collator=collator, train_dataset=data, eval_dataset=data[:10]
    )


def losses(done: Any) -> Tensor:
    return torch.tensor([row["loss"] for row in done.state.log_history if "loss" in row])


class Recorded:
    """Record a model's losses with all digits, because the Trainer rounds them in its log."""

    def __init__(self, made: nn.Module) -> None:
        self.losses: list[Tensor] = []
        made.register_forward_hook(lambda m, i, out: self.losses.append(out.loss.detach()))


RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "padded": ("BertForSequenceClassification", pad, {}),
    "checkpointed": ("BertForSequenceClassification", pad, {"activation_checkpointing": True}),
    "packed": (
        "BertForSequenceClassification",
        PackedCollatorForSequenceClassification(layout="transformers"),
        {},
    ),
    "packed tokens": (
        "BertForTokenClassification",
        PackedCollatorForTokenClassification(layout="transformers"),
        {},
    ),
}


@pytest.mark.parametrize("name", [name if name == "packed" else long_case(name) for name in RUNS])
def test_fifty_steps_of_a_trainer_follow_the_stock_loss(tmp_path, name) -> None:
    kind, collator, changes = RUNS[name]
    pair = sides(model(kind))
    data = examples(48, "Token" in kind)
    curves = []
    for side in pair:
        recorded = Recorded(side)
        collate = collator if side is pair.fast else pad
        # The optimizer is SGD. Adam divides by the size of a gradient, and so magnifies the
        # rounding errors of small gradients.
        with rows_computed() as rows:
            done = trainer(
                side, tmp_path, data, collate, optim="sgd", learning_rate=0.05, **changes
            )
            done.train()
        assert bool(rows) == (side is pair.fast)
        assert done.state.global_step == 50
        curves.append({"loss": torch.stack(recorded.losses)})
    agree(*curves, factor=3.0, reason="rounding grows from step to step")
    start, end = curves[0]["loss"][:8].mean(), curves[0]["loss"][-8:].mean()
    assert end < start
    state = {n: t.clone() for n, t in pair.fast.state_dict().items()}
    fastbert.restore(pair.fast)
    after = pair.fast.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[n], t) for n, t in state.items())


def test_a_trainer_with_adam_learns_and_saves_and_evaluates(tmp_path) -> None:
    made, data = model("BertForSequenceClassification"), examples(24, False)
    fastbert.accelerate(made)
    done = trainer(
        made,
        tmp_path,
        data,
        max_steps=6,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
    )
    assert done.label_names == ["labels"]
    done.train()
    assert len(losses(done)) == 6
    metrics = done.evaluate()
    assert metrics["eval_loss"] > 0.0
    predicted = done.predict(data[:10])
    assert predicted.predictions.shape == (10, 2)
    made.eval()
    with torch.no_grad():
        parts = [pad(data[:8]), pad(data[8:10])]
        expected = torch.cat([made(**part).logits for part in parts])
        plain = fastbert.restore(copy.deepcopy(made))
        stock = torch.cat([plain(**part).logits for part in parts])
    assert torch.equal(torch.from_numpy(predicted.predictions), expected)
    torch.testing.assert_close(expected, stock)
    saved = sorted(tmp_path.glob("checkpoint-*/model.safetensors"))
    assert len(saved) == 2
    loaded = type(plain).from_pretrained(done.state.best_model_checkpoint).eval()
    assert type(loaded.bert) is transformers.BertModel
    assert all(torch.equal(t, plain.state_dict()[n]) for n, t in loaded.state_dict().items())


def test_unused_columns_and_packed_batches_pass_through_a_trainer(tmp_path) -> None:
    made = fastbert.accelerate(model("BertForTokenClassification"))
    data = examples(12, True)
    collator = PackedCollatorForTokenClassification(layout="transformers")
    done = trainer(made, tmp_path, data, collator, max_steps=2, per_device_eval_batch_size=4)
    done.train()
    assert done.evaluate()["eval_loss"] > 0.0


# Two processes

SCRIPT = """
import copy
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, sys.argv[1])
import fastbert
from tiny_models import batch, gradients, model

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
for checkpointed in (False, True):
    results = []
    for fast in (False, True):
        made = model("BertModel").train()
        if fast:
            fastbert.accelerate(made)
        if checkpointed:
            made.activation_checkpointing_enable()
        # last_hidden_state alone: the pooler gets no gradient.
        whole = DistributedDataParallel(made, find_unused_parameters=True)
        for _ in range(2):
            made.zero_grad()
            given = batch(((9, 4), (5, 7, 2))[rank], rank)
            states = whole(**given).last_hidden_state * given["attention_mask"][..., None]
            states.square().sum().backward()
        assert made.pooler.dense.weight.grad is None or not made.pooler.dense.weight.grad.any()
        results.append({n: g for n, g in gradients(made).items() if "pooler" not in n})
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-4, atol=1e-4)
    total = torch.stack([g.double().sum() for g in results[1].values()])
    both = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(both, total)
    assert torch.equal(both[0], both[1])
    print("same gradients", rank, checkpointed, flush=True)
    del whole
dist.barrier()
dist.destroy_process_group()
# Without the end of Python, which a thread of gloo that still releases tensors would abort.
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.every_case
def test_two_processes_with_an_unused_pooler(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(script), os.path.dirname(__file__)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same gradients") == 4
