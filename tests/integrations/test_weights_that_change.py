"""After any kind of write to the weights, the next call uses the new weights.

The result must have the bits of the result of a deep copy of the model.
"""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor, nn

import fastbert
from fastbert import modules
from fastbert.config import BertConfig
from fastbert.ops import backend as backends

pytest.importorskip("transformers")
if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

import transformers

pytestmark = pytest.mark.each_value

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,  # so that every change of a weight changes the logits
}
# A low learning rate, as in a warm-up, changes few bf16 weights in a step.
SMALL_RATE = 5e-6


def accelerated() -> nn.Module:
    kind = transformers.BertForSequenceClassification
    return fastbert.accelerate(kind(transformers.BertConfig(**SIZES)))


def native() -> nn.Module:
    return modules.BertForSequenceClassification(BertConfig(**SIZES))


KINDS = {"accelerated": accelerated, "native": native}
DTYPES = (torch.bfloat16, torch.float32)


def made(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().to(dtype).eval()


def batch(rows: int = 40) -> dict[str, Tensor]:
    ids = torch.randint(1, 97, (2, rows // 2), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": torch.tensor([0, 1])}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


def is_what_a_deep_copy_says(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    return torch.equal(logits(model, inputs), logits(copy.deepcopy(model), inputs))


# Steps


class Offloaded(torch.optim.Optimizer):
    """An optimizer with fp32 master weights that it writes back through ``data``.

    Optimizers of libraries that offload or shard weights do the same.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.masters = [p.detach().float().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            if p.grad is not None:
                master.sub_(p.grad.float().sign(), alpha=self.param_groups[0]["lr"])
                p.data.copy_(master)


class EightBit(torch.optim.Optimizer):
    """An optimizer with int8 momentum that writes to the memory address of the weights.

    Libraries of 8-bit optimizers do the same in C.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            codes, scale = self.state[p].get("momentum", (torch.zeros_like(p.grad).char(), 0.0))
            momentum = 0.9 * scale * codes.float() + p.grad.float()
            scale = float(momentum.abs().max()) / 127.0 or 1.0
            codes = (momentum / scale).round().char()
            self.state[p]["momentum"] = (codes, scale)
            new = p.detach() - self.param_groups[0]["lr"] * codes.to(p.dtype).sign()
            ctypes.memmove(p.data_ptr(), new.data_ptr(), new.nbytes)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    **{
        f"{kind.__name__} {way}": lambda p, lr, kind=kind, way=way: kind(p, lr=lr, **{way: True})
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
        for way in ("fused", "foreach")
    },
    **{
        f"{kind.__name__} plain": lambda p, lr, kind=kind: kind(p, lr=lr, foreach=False)
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
    },
    "8 bit": EightBit,
    "offloaded": Offloaded,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_an_optimizer_is_seen(kind, dtype, optimizer) -> None:
    model, inputs = made(kind, dtype), batch()
    step = OPTIMIZERS[optimizer](model.parameters(), lr=SMALL_RATE)
    first = logits(model, inputs)
    for _ in range(4):
        model.train()(**inputs).loss.backward()
        step.step()
        step.zero_grad()
        assert is_what_a_deep_copy_says(model, inputs)
    if dtype == torch.float32:
        assert not torch.equal(logits(model, inputs), first), "no step changed anything"


@pytest.mark.parametrize("optimizer", ["AdamW fused", "AdamW foreach", "AdamW plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_evaluation_mode_is_seen(kind, dtype, optimizer) -> None:
    """The next call sees an optimizer step, even if the model always stays in eval mode."""
    model, inputs = made(kind, dtype), batch()
    step = OPTIMIZERS[optimizer](model.parameters(), lr=SMALL_RATE)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step.step()
        assert is_what_a_deep_copy_says(model, inputs)


# Tests of averaged weights, and of weights that are swapped during training


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    step = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.train()(**inputs).loss.backward()
    step.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_of_the_weights_is_seen(kind, dtype) -> None:
    model, inputs = made(kind, dtype), batch()
    average = copy.deepcopy(model)
    for _ in range(4):
        trained(model, inputs)
        logits(average, inputs)  # This call caches the old weights.
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.99).add_(now.data, alpha=0.01)
        assert is_what_a_deep_copy_says(average, inputs)


@pytest.mark.parametrize("how", ["copied", "exchanged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_swapped_for_an_evaluation_are_seen(kind, dtype, how) -> None:
    model, inputs = made(kind, dtype), batch()
    shadow = [p.detach().clone() for p in model.parameters()]
    trained(model, inputs)
    for _ in range(2):  # The second exchange undoes the first exchange.
        logits(model, inputs)
        for parameter, other in zip(model.parameters(), shadow, strict=True):
            kept = parameter.detach().clone()
            if how == "copied":
                parameter.data.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, other.data = other.data, parameter.data
        assert is_what_a_deep_copy_says(model, inputs)


# Tests of any write to any parameter


def matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weight matrices of the encoder layers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embeddings" not in name and ".layer." in name:
            yield parameter


def zero_a_row(w: Tensor) -> None:
    w[w.shape[0] // 3].zero_()


def zero_a_column(w: Tensor) -> None:
    w[:, w.shape[1] // 3].zero_()


def prune(w: Tensor) -> None:
    w.masked_fill_(torch.rand(w.shape) < 0.05, 0.0)


def change_three_percent(w: Tensor) -> None:
    places = torch.randperm(w.numel())[: w.numel() * 3 // 100]
    w.view(-1)[places] += 1.0


def clamp(w: Tensor) -> None:
    bound = 2.0 * float(w.float().std())
    w.clamp_(-bound, bound)


def negate_a_column(w: Tensor) -> None:
    w[:, -1].neg_()


def move_the_first(w: Tensor) -> None:
    w[0, 0] += 1.0


def move_the_last(w: Tensor) -> None:
    w[-1, -1] += 1.0


def add_to_a_row(w: Tensor) -> None:
    w[-1] += torch.randn(w.shape[1])


def exchange_rows(w: Tensor) -> None:
    w[:8] = w[:8].flip(0)


def through_the_address(w: Tensor) -> None:
    new = w.neg()
    ctypes.memmove(w.data_ptr(), new.data_ptr(), new.nbytes)


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "a row set to zero": zero_a_row,
    "a row moved": add_to_a_row,
    "rows exchanged": exchange_rows,
    "a column set to zero": zero_a_column,
    "a column negated": negate_a_column,
    "the first element": move_the_first,
    "the last element": move_the_last,
    "3 % of the elements": change_three_percent,
    "5 % pruned": prune,
    "clamped": clamp,
    "written through the address": through_the_address,
}
# Ways to get a tensor that shares a parameter's memory. PyTorch's version counter of the parameter
# counts only the writes to the detached tensor.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda parameter: parameter.data,
    "detached": lambda parameter: parameter.detach(),
}


def changed_everywhere(
    model: nn.Module, inputs: dict[str, Tensor], change: Callable[[Tensor], None], way: str = "data"
) -> None:
    """Check that the next call sees the ``change`` of each matrix, and then its reversal."""
    before = logits(model, inputs)
    for parameter in matrices(model):
        kept = parameter.detach().clone()
        change(WAYS[way](parameter))
        assert is_what_a_deep_copy_says(model, inputs), tuple(parameter.shape)
        if parameter.dtype == torch.float32:
            assert not torch.equal(logits(model, inputs), before), tuple(parameter.shape)
        WAYS[way](parameter).copy_(kept)
        assert torch.equal(logits(model, inputs), before), tuple(parameter.shape)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_matrix_is_seen_at_once(kind, dtype, way, change) -> None:
    changed_everywhere(made(kind, dtype), batch(), CHANGES[change], way)


# `test_a_write_to_a_matrix_is_seen_at_once` makes every change, and the next two tests make some.
SOME = ("the first element", "the last element", "rows exchanged", "a column negated")
some_changes = pytest.mark.parametrize(
    "change", [change if change in SOME else long_case(change) for change in CHANGES]
)


@some_changes
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_is_seen_by_a_call_with_many_rows(kind, change) -> None:
    changed_everywhere(made(kind, torch.bfloat16), batch(1024), CHANGES[change])


@some_changes
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_is_seen_by_a_call_under_autocast(kind, change) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model, inputs = made(kind, torch.float32), batch()
        for parameter in matrices(model):
            logits(model, inputs)
            CHANGES[change](parameter.data)
            assert is_what_a_deep_copy_says(model, inputs), tuple(parameter.shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_element_of_any_parameter_is_seen(kind, trains, dtype, way) -> None:
    model, inputs = made(kind, dtype), batch()
    if trains:
        trained(model, inputs)
    for name, parameter in model.named_parameters():
        logits(model, inputs)
        WAYS[way](parameter).view(-1)[-1] += 1.0
        assert is_what_a_deep_copy_says(model, inputs), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_inference_tensors_is_seen(kind) -> None:
    inputs = batch()
    with torch.inference_mode():
        model = made(kind, torch.bfloat16)
        for weight in [p for p in model.parameters() if p.dim() == 2]:
            logits(model, inputs)
            assert weight.is_inference()
            weight[-1, -1] += 1.0
            assert torch.equal(logits(model, inputs), logits(copy.deepcopy(model), inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_shared_memory_is_seen(kind) -> None:
    """The next call sees a write to shared memory, which another process could also make."""
    model = made(kind, torch.bfloat16).share_memory()
    changed_everywhere(model, batch(), move_the_last)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_that_is_loaded_is_seen(kind, assign) -> None:
    """The next call sees a loaded state dict, even if its tensors reuse freed addresses."""
    model, inputs = made(kind, torch.bfloat16), batch()
    for seed in range(6):
        logits(model, inputs)
        torch.manual_seed(seed)
        state = {name: torch.randn_like(t) * 0.1 for name, t in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        del state
        assert is_what_a_deep_copy_says(model, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_and_a_pickle_keep_nothing(kind) -> None:
    model, inputs = made(kind, torch.bfloat16), batch()
    expected = logits(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert list(other.state_dict()) == list(model.state_dict())
        assert torch.equal(logits(other, inputs), expected)
