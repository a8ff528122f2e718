"""A small random XLNet of transformers, its calls, and comparisons with float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fastbert.parity.gradients import FACTOR, REASON, kinds
from fastbert.testing.compare import assert_close
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick, each

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layer": 2,
    "n_head": 4,
    "d_inner": 80,
    "dropout": 0.0,
    "mem_len": 12,
}
LENGTH, ROWS, PREDICTED = 20, 3, 4
# Name of a call → its arguments besides the ids.
CALLS = ("plain", "types", "right", "left", "middle", "memory", "permuted", "two streams", "mapped")


def build(head: str = "LMHeadModel", seed: int = 0, **changes: Any) -> Any:
    """Return a model of transformers with random nonzero weights, in eval mode."""
    torch.manual_seed(seed)
    config = transformers.XLNetConfig(**SIZES | changes)
    model = getattr(transformers, f"XLNet{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids(seed: int = 1, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, SIZES["vocab_size"], (rows, length), generator=generator)


def arguments(call: str, seed: int = 2, rows: int = ROWS, length: int = LENGTH) -> dict[str, Any]:
    """Return the arguments of a call besides the ids; see `CALLS`."""
    torch.manual_seed(seed)
    exists = torch.ones(rows, length, dtype=torch.long)
    given: dict[str, Any] = {}
    if call in ("types", "right", "memory", "two streams"):
        given["token_type_ids"] = torch.randint(0, 3, (rows, length))
    if call in ("right", "two streams"):
        exists[1:, length - 7 :] = 0
        given |= {"attention_mask": exists, "use_mems": False}
    if call == "left":
        exists[1:, :6] = 0
        given["input_mask"] = 1.0 - exists
        given["use_mems"] = False
    if call == "middle":
        exists[1:, 5:8] = 0
        given |= {"attention_mask": exists, "use_mems": False}
    if call == "memory":
        exists[1:, length - 7 :] = 0
        given |= {"attention_mask": exists, "use_mems": True}
    if call in ("permuted", "two streams"):
        given["perm_mask"] = (torch.rand(rows, length, length) < 0.5).float()
        # A query that sees no key has another gradient in transformers; see the test of such rows.
        given["perm_mask"][:, :, 0] = 0.0
        given["perm_mask"][:, 0, 1] = 0.0
    if call in ("two streams", "mapped"):
        mapping = torch.zeros(rows, PREDICTED, length)
        for row in mapping:
            row[torch.arange(PREDICTED), torch.randperm(length - 8)[:PREDICTED]] = 1.0
        given["target_mapping"] = mapping
    return given


def real(given: dict[str, Any], rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return the mask of the rows of the result that are tokens."""
    if "target_mapping" in given:
        return torch.ones(rows, given["target_mapping"].shape[1], dtype=torch.bool)
    return tokens(given, rows, length)


def tokens(given: dict[str, Any], rows: int = ROWS, length: int = LENGTH) -> Tensor:
    if "input_mask" in given:
        return given["input_mask"] == 0
    return given.get("attention_mask", torch.ones(rows, length)).bool()


def call(model: nn.Module, given: dict[str, Any]) -> Any:
    """Call a model; a float64 model of transformers computes everything in float64."""
    dtype = next(model.parameters()).dtype
    given = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    if dtype != torch.float64:
        return model(**given)
    with InFloat64():
        return model(**given)


def results(model: nn.Module, given: dict[str, Any], backward: bool = True) -> dict[str, Any]:
    """Return the outputs at tokens, and the gradients of a random sum of the first output."""
    model.zero_grad()
    given = given | {"output_hidden_states": True, "output_attentions": True}
    out = call(model, given)
    exists, of_rows = tokens(given), real(given)
    first = out.logits if "logits" in out else out.last_hidden_state
    found: dict[str, Any] = {"first": first[of_rows] if first.dim() == 3 else first}
    states = [s[exists] if s.shape[1] == exists.shape[1] else s for s in out.hidden_states]
    found["states"] = torch.cat([s.flatten() for s in states])
    pairs = [w for layer in out.attentions for w in (layer if type(layer) is tuple else (layer,))]
    found["weights"] = torch.stack(pairs).transpose(2, 3)[:, exists]
    if out.mems is not None:
        found["mems"] = torch.stack(list(out.mems))
    if getattr(out, "loss", None) is not None:
        found["loss"] = out.loss
    if backward:
        torch.manual_seed(5)
        loss = (found["first"] * torch.randn(found["first"].shape).to(found["first"])).sum()
        if "loss" in found:
            loss = loss + found["loss"]
        loss.backward()
        found["gradients"] = {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in found.items()}


def compare(actual: dict[str, Any], stock: Any, given: dict[str, Any]) -> None:
    """Compare results with those of the stock model, in float64 and in its own dtype."""
    backward = "gradients" in actual
    exact = results(copy.deepcopy(stock).double(), given, backward)
    nearby = Yardstick(lambda: results(stock, given, backward))
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        if name != "gradients":
            assert_close(name, value, exact[name], nearby[name])
    if not backward:
        return
    gradients = actual["gradients"]
    assert gradients.keys() == exact["gradients"].keys()
    for kind, names in kinds(gradients).items():

        def joined(side: dict[str, Tensor], names: list[str] = names) -> Tensor:
            return torch.cat([side[name].flatten() for name in names])

        sides = each(joined, gradients, exact["gradients"], nearby["gradients"])
        assert_close(f"gradient of {kind}", *sides, factor=FACTOR, reason=REASON)
