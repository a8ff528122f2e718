"""Small models of transformers and how an accelerated one is judged beside them."""

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
    """One with random weights, none of them zero, in inference."""
    kind = getattr(transformers, kind) if isinstance(kind, str) else kind
    torch.manual_seed(0)
    made = kind(config(**changes) if settings is None else settings).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> dict[str, Tensor]:
    """Padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, 97, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


class Sides(NamedTuple):
    """One model three times. ``fast`` is accelerated; in float64, and as it is, it is stock."""

    fast: Any
    oracle: Any
    stock: Any

    def each(self, change: Callable[[Any], Any]) -> None:
        """Does the same to all three, with the same random numbers."""
        for side in self:
            torch.manual_seed(3)
            change(side)

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function`` of each; of stock, a yardstick."""
        return run_sides(function, *self)

    def check(self, given: dict[str, Any], **options: Any) -> None:
        """Inference agrees by the rule, ours did not compute any padding, and it has the bits of a
        deep copy, which keeps no copies of weights."""
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
    """Outputs of the three sides."""
    found = stock.library if isinstance(stock, Yardstick) else stock
    assert fast.keys() == oracle.keys() == found.keys()
    for name in fast:
        assert_close(name, fast[name], oracle[name], stock[name], **allowance)


def values(side: Any, given: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """What a model returns, without the padding of hidden states and logits of tokens."""
    mask = given["attention_mask"].bool()
    found = {}
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
        found[name] = value
    return found


def gradients(side: nn.Module) -> dict[str, Tensor]:
    """Without those of key biases, which are 0 but for rounding: softmax sees no shift."""
    named = side.named_parameters()
    return {n: p.grad for n, p in named if p.grad is not None and not n.endswith("key.bias")}


@contextlib.contextmanager
def rows_computed() -> Iterator[list[int]]:
    """How many rows each layer of ours computed, or all of them in one call."""
    rows: list[int] = []

    def spy(name: str) -> Any:
        real = getattr(ops, name)

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            rows.append(x.shape[0])
            return real(x, *args, **kwargs)

        return mock.patch.object(ops, name, run)

    with spy("encoder"), spy("feed_forward"):
        yield rows
