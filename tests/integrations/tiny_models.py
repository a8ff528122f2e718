"""Small transformers models, and comparisons of accelerated models with stock models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import fastbert
from fastbert import ops
from fastbert.modules import executors
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, run_sides

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTHS = (19, 3, 11, 6)
REASON = "sums over all tokens, in another order"


def config(family: str = "Bert", **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**SIZES | changes)


def model(kind: Any = "BertModel", settings: Any = None, **changes: Any) -> Any:
    """Return a model of class `kind` with random nonzero weights, in eval mode."""
    kind = getattr(transformers, kind) if isinstance(kind, str) else kind
    torch.manual_seed(0)
    made = kind(config(**changes) if settings is None else settings).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> dict[str, Tensor]:
    """Return a random batch of rows with `lengths` tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, 97, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


class Sides(NamedTuple):
    """Three copies of a model: accelerated, stock in float64 (oracle), and stock (yardstick)."""

    fast: Any
    oracle: Any
    stock: Any

    def each(self, change: Callable[[Any], Any]) -> None:
        """Make the same change, with the same random numbers, to all three models."""
        for side in self:
            torch.manual_seed(3)
            change(side)

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Return ``function(model)`` for each model; the stock model's result is a yardstick."""
        return run_sides(function, *self)

    def check(self, given: dict[str, Any], **options: Any) -> None:
        """Check that inference is within tolerance, and that no padding is computed.

        The result must also have the bits of the result of a deep copy.
        """
        with torch.no_grad(), rows_computed() as rows:
            fast = values(self.fast, given, **options)
        with torch.no_grad():
            fresh = values(copy.deepcopy(self.fast), given, **options)
        assert all(torch.equal(fast[name], fresh[name]) for name in fast)
        exist = int(given["attention_mask"].sum())
        assert rows, "ours did not run"
        assert set(rows) == {exist}, rows
        with torch.no_grad():
            oracle = values(self.oracle, given, **options)
            agree(fast, oracle, Yardstick(lambda: values(self.stock, given, **options)))


def sides(made: nn.Module) -> Sides:
    fast = copy.deepcopy(made)
    assert fastbert.accelerate(fast) is fast
    return Sides(fast, copy.deepcopy(made).double(), made)


def agree(
    fast: dict[str, Tensor],
    oracle: dict[str, Tensor],
    stock: dict[str, Tensor] | Yardstick,
    **allowance: Any,
) -> None:
    """Compare the outputs of the three models by the tolerance rule."""
    expected_result = stock.library if isinstance(stock, Yardstick) else stock
    assert fast.keys() == oracle.keys() == expected_result.keys()
    for name in fast:
        assert_close(name, fast[name], oracle[name], stock[name], **allowance)


def values(side: Any, given: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Return the outputs of a model, without hidden states and token logits at padding."""
    mask = given["attention_mask"].bool()
    results = {}
    for name, value in side(**given, **options).items():
        if name == "cross_attentions":
            assert value == ()
            continue
        if name == "attentions":
            value = torch.stack(value).transpose(2, 3)[:, mask]
        elif isinstance(value, tuple):
            value = torch.stack(value)[:, mask]
        elif mask.dim() == 2 and value.shape[:2] == mask.shape:
            value = value[mask]
        results[name] = value
    return results


def gradients(side: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters except key biases.

    The gradient of a key bias is only rounding error, because a softmax does not change if a
    constant is added to all of its logits.
    """
    named = side.named_parameters()
    return {n: p.grad for n, p in named if p.grad is not None and not n.endswith("key.bias")}


@contextlib.contextmanager
def rows_computed() -> Iterator[list[int]]:
    """Record how many rows each layer, or each call of all layers, computes."""
    rows: list[int] = []

    def spy(room: Any, name: str) -> Any:
        real = getattr(room, name)

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            rows.append(x.shape[0])
            return real(x, *args, **kwargs)

        return mock.patch.object(room, name, run)

    with spy(ops, "encoder"), spy(ops, "feed_forward"), spy(executors, "cpu_layer"):
        yield rows
