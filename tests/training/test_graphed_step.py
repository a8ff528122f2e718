"""Training steps that replay recorded graphs make the same updates as eager steps.

Without a GPU, a recording is the trace of a step, and a replay repeats the recorded operators on
the recorded memory. A value that Python reads during the recording, such as a learning rate,
therefore stays fixed, as in a CUDA graph.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _trace import StepTrace
from quick_cases import long_case
from rich.console import Console
from torch import Tensor, nn

import fastbert
from fastbert import BertConfig
from fastbert.graphs import static_batch
from fastbert.graphs.buckets import Bucket, Buckets, PaddedBucket
from fastbert.training import pretraining_run
from fastbert.training.graphs import GraphedStep, graphed_step
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain

CONFIG = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=48,
    num_labels=3,
    initializer_range=0.3,
)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BUCKETS = Buckets(max_tokens=64, max_batch=4, max_seqlen=48)
GENERATOR = torch.Generator().manual_seed(1)
CLIP = 0.5
MODELS = {
    "BertForPreTraining": ("labels", "next_sentence_label"),
    "BertForMaskedLM": ("labels",),
    "BertForNextSentencePrediction": ("labels",),
    "BertForSequenceClassification": ("labels",),
    "BertForTokenClassification": ("labels",),
}
# Sequences of these lengths fill their bucket, so an eager step computes with the same shapes.
FULL = (16, 8)


@pytest.fixture(autouse=True)
def no_reads(monkeypatch):
    """Let models skip checks that read values, as on a GPU; on a CPU, the checks would run."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def make(name: str = "BertForPreTraining", **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, **overrides)
    return getattr(fastbert, name)(config, backend="reference").train()


def adamw(model: nn.Module, rate: float = 1e-2) -> torch.optim.AdamW:
    device = next(model.parameters()).device
    groups = [{"params": list(model.parameters()), "initial_lr": rate}]
    lr = torch.tensor(rate, device=device)
    return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=True)


def traced(model: Any, optimizer: Any = None, max_graphs: int = 16, **options: Any) -> GraphedStep:
    optimizer = adamw(model) if optimizer is None else optimizer
    recorder = lambda device: StepTrace(model, optimizer)  # noqa: E731
    return GraphedStep(model, optimizer, BUCKETS, max_graphs, recorder, **options)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def labels_of(model: Any, shape: tuple[int, ...], batch: int) -> dict[str, Tensor]:
    name = type(model).__name__
    if name == "BertForTokenClassification":
        return {"labels": integers(0, 3, *shape)}
    if name in ("BertForPreTraining", "BertForMaskedLM"):
        given = integers(0, 59, *shape).where(integers(0, 3, *shape) == 0, torch.tensor(-100))
        given.view(-1)[0] = 7
        pairs = {"next_sentence_label": integers(0, 2, batch)}
        return {"labels": given} | (pairs if name == "BertForPreTraining" else {})
    return {"labels": integers(0, 2, batch)}


def packed(model: Any, *lengths: int) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(ends[-1])
    return {
        "input_ids": integers(1, 59, total),
        "token_type_ids": integers(0, 2, total),
        "cu_seqlens": ends,
        "max_seqlen": max(lengths),
        **labels_of(model, (total,), len(lengths)),
    }


def padded(model: Any, *lengths: int, length: int | None = None) -> dict[str, Any]:
    shape = (len(lengths), length or max(lengths))
    return {
        "input_ids": integers(1, 59, *shape),
        "attention_mask": (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)).long(),
        **labels_of(model, shape, len(lengths)),
    }


class Eager:
    """Eager training steps with the interface of a `GraphedStep`."""

    def __init__(self, model: Any, schedule: Callable[[int], float] | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = adamw(self.model)
        self.schedule = None if schedule is None else scheduled(self.optimizer, schedule)

    def __call__(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        loss = self.model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return loss.detach(), norm


def scheduled(optimizer: Any, factor: Callable[[int], float]) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def same_weights(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        if tolerance:
            torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: name + text)
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("name", MODELS)
def test_replays_are_eager_steps_bit_for_bit(name):
    """Replays and eager steps have equal bits, with dropout and a learning-rate schedule."""
    model, factor = make(name), lambda step: 1.0 / (1 + step)
    eager, step = Eager(model, factor), traced(model, clip_norm=CLIP)
    schedule = scheduled(step.optimizer, factor)
    for number in range(5):
        batch = packed(model, *FULL)
        torch.manual_seed(number)
        loss, norm = step(**batch)
        schedule.step()
        torch.manual_seed(number)
        expected = eager(batch)
        assert torch.equal(loss, expected[0])
        assert torch.equal(norm, expected[1])
        assert not loss.requires_grad
        same_weights(model, eager.model)
    assert step.recorded == (Bucket(24, 2, 16),)
    recorder = step._cache.recorder
    assert (recorder.ran, recorder.recorded, recorder.replayed) == (1, 1, 4)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        *("BertForPreTraining", "BertForSequenceClassification"),
        *(
            long_case(f"BertFor{name}")
            for name in ("MaskedLM", "NextSentencePrediction", "TokenClassification")
        ),
    ],
)
def test_the_rest_of_a_bucket_changes_nothing(name):
    """In fp64, batches that do not fill their buckets give the same updates as in eager steps."""
    model = make(name, **NO_DROPOUT, classifier_dropout=0.0).double()
    eager, step = Eager(model), traced(model, clip_norm=CLIP)
    for lengths in ((9, 4), (20, 3, 7), (13, 2), (1, 2)):
        for batch in (packed(model, *lengths), padded(model, *lengths, length=21)):
            loss, norm = step(**batch)
            expected = eager(batch)
            torch.testing.assert_close(loss, expected[0], rtol=1e-9, atol=0.0)
            torch.testing.assert_close(norm, expected[1], rtol=1e-9, atol=0.0)
            same_weights(model, eager.model, rtol=1e-6, atol=1e-8)
    assert len(step.recorded) == 2
    assert step._cache.recorder.replayed == 6


def test_a_graph_removes_the_padding_itself(monkeypatch):
    monkeypatch.setattr(static_batch, "is_far", lambda mask: True)
    model = make(**NO_DROPOUT).double()
    eager, step = Eager(model), traced(model, clip_norm=CLIP)
    for lengths in ((9, 4), (2, 8), (0, 3), (10, 10), (1, 1)):
        batch = padded(model, *lengths, length=10)
        if lengths == (0, 3):
            batch["attention_mask"] = torch.tensor([[0] * 10, [1, 0, 1, 0, 0, 0, 0, 0, 1, 0]])
        loss, _ = step(**batch)
        torch.testing.assert_close(loss, eager(batch)[0], rtol=1e-9, atol=0.0)
        same_weights(model, eager.model, rtol=1e-6, atol=1e-8)
    assert step.recorded == (PaddedBucket(2, 16),)
    step(**padded(model, 9, 1, length=40))
    assert step.recorded == (PaddedBucket(2, 16),), "80 places exceed the bucket"


@pytest.mark.every_case
def test_each_replay_draws_other_dropout_masks():
    model = make()
    step = traced(model, adamw(model, rate=0.0))
    batch = packed(model, *FULL)
    losses = [step(**batch).loss.item() for _ in range(6)]
    assert len(set(losses)) == 6
    torch.manual_seed(3)
    one = step(**batch).loss
    kept = one.item()
    torch.manual_seed(4)
    step(**batch)
    assert one.item() == kept, "a result belongs to the caller"
    torch.manual_seed(3)
    assert torch.equal(one, step(**batch).loss)
    assert step._cache.recorder.replayed == 8


def test_every_call_makes_one_update_whatever_its_bucket():
    model = make()
    step = traced(model, max_graphs=2)
    small, middle, large = packed(model, 9, 3), packed(model, 20), packed(model, 30, 9)
    none, general = packed(model, 40, 30), packed(model, 9)
    general = {"input_ids": general["input_ids"][None], "labels": general["labels"][None],
               "next_sentence_label": general["next_sentence_label"],
               "attention_mask": torch.ones(1, 9, 9).tril().bool()}  # fmt: skip
    batches = [small, small, middle, small, none, middle, large, large, small, general]
    for number, batch in enumerate(batches, 1):
        assert step(**batch).gradient_norm is None
        counts = {state["step"].item() for state in step.optimizer.state.values()}
        assert counts == {number}
    assert step.recorded == (Bucket(48, 2, 32),)
    assert step._cache.recorder.recorded == 3
    assert all(p.grad is None for p in model.parameters())


def replace_states(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def set_dropout(model: Any, optimizer: Any) -> None:
    model.bert.encoder.layer[0].output.LayerNorm.dropout_p = 0.7


def move(model: Any, optimizer: Any) -> None:
    for weight in model.parameters():
        weight.data = weight.data * 1.1


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "frozen": lambda m, o: m.bert.embeddings.requires_grad_(False),
    "moved": move,
    "backend": lambda m, o: m.set_backend(None),
    "dropout": set_dropout,
    "decay": lambda m, o: o.param_groups[0].update(weight_decay=0.5),
    "states": replace_states,
    "rate": lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize(
    "change",
    # Each case changes the model, the optimizer, or a value that a recording reads.
    [
        "states",
        *map(long_case, ("frozen", "dropout", "moved", "backend", "decay", "rate")),
    ],
)
def test_a_change_is_recorded_again(change):
    model = make()
    step, batch = traced(model, clip_norm=CLIP), packed(model, *FULL)
    for _ in range(2):
        step(**batch)
    eager = Eager(model)
    eager.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    first = step._cache.recorder
    for weights, optimizer in ((model, step.optimizer), (eager.model, eager.optimizer)):
        CHANGES[change](weights, optimizer)
    for number in range(3):
        torch.manual_seed(number)
        loss, norm = step(**batch)
        torch.manual_seed(number)
        expected = eager(batch)
        assert torch.equal(loss, expected[0])
        assert torch.equal(norm, expected[1])
        same_weights(model, eager.model)
    assert step._cache.recorder is not first
    assert step._cache.recorder.recorded == 1


def test_weights_changed_in_place_are_seen():
    model = make()
    step, batch = traced(model, clip_norm=CLIP), packed(model, *FULL)
    for _ in range(2):
        step(**batch)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    eager = Eager(model)
    torch.manual_seed(0)
    loss = step(**batch).loss
    torch.manual_seed(0)
    assert torch.equal(loss, eager(batch)[0])
    assert step._cache.recorder.replayed == 2


def test_hooks_are_called():
    model = make()
    step, batch = traced(model), packed(model, *FULL)
    seen = []
    for _ in range(2):
        step(**batch)
    weight, optimizer = model.bert.pooler.dense.weight, step.optimizer
    for register in (
        lambda: model.cls.predictions.register_forward_hook(lambda *a: seen.append(1)),
        lambda: model.bert.pooler.register_full_backward_hook(lambda *a: seen.append(1)),
        lambda: weight.register_hook(lambda gradient: seen.append(1)),
        lambda: weight.register_post_accumulate_grad_hook(lambda w: seen.append(1)),
        lambda: optimizer.register_step_post_hook(lambda *a: seen.append(1)),
    ):
        seen.clear()
        handle = register()
        for _ in range(2):
            step(**batch)
        assert len(seen) == 2
        handle.remove()
        replayed = step._cache.recorder.replayed
        step(**batch)
        assert (len(seen), step._cache.recorder.replayed) == (2, replayed + 1)


def test_a_failed_first_step_is_not_recorded():
    """After a failed first step, the next step also runs eagerly, to compile every kernel."""
    model, broken = make(), [True]

    def observe(output: Any, arguments: dict[str, Any]) -> None:
        if broken:
            broken.pop()
            raise MemoryError("observed")

    step, batch = traced(model, observe=observe), packed(model, *FULL)
    with pytest.raises(MemoryError, match="observed"):
        step(**batch)
    step(**batch)
    assert (step._cache.recorder.recorded, step.recorded) == (0, ())
    step(**batch)
    assert step._cache.recorder.recorded == 1


def test_an_observer_adds_in_every_step():
    model, sums = make(), torch.zeros(3)

    def observe(output: Any, batch: dict[str, Any]) -> None:
        wanted = batch["next_sentence_label"]
        sums[0] += output.loss.detach()
        sums[1] += (wanted >= 0).sum()
        sums[2] += (batch["labels"] != -100).sum()

    step = traced(model, observe=observe)
    step._cache.recorder.others.append(sums)
    losses, pairs, labels = 0.0, 0, 0
    for lengths in ((9, 3), (6, 2, 4), (5, 4), (4, 3, 4), (9, 2)):
        batch = packed(model, *lengths)
        losses += step(**batch).loss.item()
        pairs += len(lengths)
        labels += int((batch["labels"] != -100).sum())
    assert step._cache.recorder.replayed == 3
    assert sums.tolist() == [pytest.approx(losses), pairs, labels]


@pytest.mark.every_case
def test_autocast_has_graphs_of_its_own():
    model = make()
    eager, step = Eager(model), traced(model, clip_norm=CLIP)
    for number in range(6):
        batch = packed(model, *FULL)
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
            torch.manual_seed(number)
            loss = step(**batch).loss
            torch.manual_seed(number)
            assert torch.equal(loss, eager(batch)[0])
    assert step._cache.recorder.recorded == 2
    same_weights(model, eager.model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_needs_no_mode_of_the_caller(mode):
    model = make()
    step, batch = traced(model), packed(model, *FULL)
    for _ in range(3):
        before = model.bert.pooler.dense.weight.detach().clone()
        with mode():
            step(**batch)
        assert not torch.equal(before, model.bert.pooler.dense.weight)


# Pre-training


@pytest.mark.every_case
def test_pretraining_with_graphs_logs_the_same(options, documents, monkeypatch):
    """The log is the same as without graphs; a hook makes logged steps run without a graph."""
    steps: list[GraphedStep] = []

    def substitute(model: Any, optimizer: Any, **given: Any) -> GraphedStep:
        buckets = Buckets(given.pop("max_tokens"), given.pop("max_batch"), model.config.max_length)
        recorder = StepTrace(model, optimizer)
        recorder.others.append(given["observe"].__self__.meter._sums)
        steps.append(GraphedStep(model, optimizer, buckets, 16, lambda device: recorder, **given))
        return steps[0]

    monkeypatch.setattr(pretraining_run, "_check_graphs", lambda accelerator: None)
    monkeypatch.setattr(pretraining_run, "graphed_step", substitute)
    logs = []
    for graphs in (False, True):
        given = options(cuda_graphs=graphs, overwrite=True, backend="reference", log_every=4)
        result = pretrain(given, documents=documents, console=Console(quiet=True))
        logs.append(read_log(result.log))
    recorder = steps[0]._cache.recorder
    # Two of the eight steps are logged, and the first step of each bucket runs without a graph.
    assert recorder.replayed >= 3
    assert recorder.replayed + recorder.ran == 8
    for one, other in zip(*logs, strict=True):
        for name in (one.keys() | other.keys()) - {"tokens_per_second", "event"}:
            assert other[name] == pytest.approx(one[name], rel=1e-3), name


def test_graphs_need_one_process_on_a_gpu(options, documents):
    with pytest.raises(ValueError, match=r"cuda_graphs: got True with 1 process.* on cpu, allowed"):
        pretrain(options(cuda_graphs=True), documents=documents)
    with pytest.raises(ValueError, match="cuda_graphs and gradient_checkpointing: got True, allow"):
        options(cuda_graphs=True, gradient_checkpointing=True)


# Errors


def wrong_rate(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (wrong_rate, "a learning rate of 0.001 in group 0, allowed: a tensor on cpu"),
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True), "AdamW .* not capturable"),
        (lambda m: torch.optim.SGD(m.parameters()), "SGD .* not capturable, allowed: capturable"),
    ],
)
def test_an_optimizer_that_a_graph_cannot_contain(optimizer, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        traced(model, optimizer(model))


def test_errors_of_the_wrapper_name_what_is_allowed():
    model = make()
    with pytest.raises(
        TypeError, match="model: got BertModel of fastbert, allowed: BertForPreTraining, "
    ):
        graphed_step(model.bert, adamw(model))
    with pytest.raises(TypeError, match="optimizer: got LambdaLR, allowed: a torch"):
        graphed_step(model, scheduled(adamw(model), float))
    with pytest.raises(ValueError, match="clip_norm: got 0, allowed: None or a number > 0"):
        graphed_step(model, adamw(model), clip_norm=0)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="graphed_step: got a model on cpu, allowed: a CUDA"):
            graphed_step(model, adamw(model))


def test_errors_of_a_batch_name_the_argument(monkeypatch):
    monkeypatch.undo()
    model = make()
    step, batch = traced(model), packed(model, 9, 3)
    for changes, message in (
        ({"inputs_embeds": torch.zeros(12, 32)}, "batch: got inputs_embeds, allowed: input_ids, "),
        ({"labels": None}, "labels: got None, allowed: the labels"),
        ({"labels": batch["labels"] + 60}, "labels: got .*, allowed: 0 <= labels < 60"),
        ({"next_sentence_label": torch.tensor([1])}, r"next_sentence_label: got shape \(1,\), "),
        ({"input_ids": batch["input_ids"] + 60}, "input_ids: got "),
    ):
        with pytest.raises(ValueError, match=message):
            step(**batch | changes)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="autocast: got fl"):
        step(**batch)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing: got True, allowed: False"):
        step(**batch)
    model.gradient_checkpointing_disable()
    model.bert.pooler.dense.bias.grad = torch.zeros(32)
    with pytest.raises(ValueError, match=r"dense\.bias\.grad: got a tensor, allowed: None"):
        step(**batch)
    model.eval()
    with pytest.raises(RuntimeError, match="graphed_step: got a model in eval mode, allowed: mod"):
        step(**batch)
    assert step._cache.recorder.ran == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForSequenceClassification"])
def test_cuda_graphs_train(monkeypatch, name, mixed):
    """On a GPU, replays have the losses of eager steps if both use the same dropout seeds."""
    monkeypatch.undo()
    model = make(name, initializer_range=0.1).to("cuda")
    model.set_backend(None)
    eager, optimizer = Eager(model, lambda step: 1.0 / (1 + step)), adamw(model)
    step = graphed_step(model, optimizer, clip_norm=CLIP, max_tokens=64, max_batch=4)
    schedule = scheduled(optimizer, lambda step: 1.0 / (1 + step))
    for number in range(12):
        make_batch = (packed, padded)[number // 2 % 2]
        batch = make_batch(model, *FULL)
        there = {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in batch.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            torch.manual_seed(number)
            loss, norm = step(**(there if number % 2 else batch))
            torch.manual_seed(number)
            expected = eager(there)
        schedule.step()
        rtol = 2e-2 if mixed else 1e-3
        torch.testing.assert_close(loss, expected[0], rtol=rtol, atol=rtol)
        torch.testing.assert_close(norm, expected[1], rtol=10 * rtol, atol=rtol)
    assert len(step.recorded) == 2
    rate = optimizer.param_groups[0]["lr"]
    rate.zero_()
    losses = {step(**batch).loss.item() for _ in range(4)}
    assert len(losses) == 4, "every replay draws other dropout masks"
