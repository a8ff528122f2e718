"""Calls of fastbert operations with the samples that torch uses to test its own operators.

python tests/ops/_opinfo.py    # print the number of samples and of left-out samples by operation
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.testing.cases import Inputs


class Call(NamedTuple):
    """A call of a fastbert operation, and a torch function that takes the same arguments.

    Attributes:
        inputs: The arguments of the fastbert operation.
        torch_function: The torch function that computes the expected results in float64.
        refused: Name of the argument that the operation refuses on every backend, or "".
    """

    inputs: Inputs
    torch_function: Callable[..., Tensor]
    refused: str = ""


class LeftOut(ValueError):
    """Raised for a sample that a fastbert operation cannot express; the message says why."""


def calls(op: str) -> Iterator[Call]:
    """Yield calls for torch's samples that `op` can express, also with non-contiguous tensors."""
    for sample in samples(op):
        for given in (sample, sample.noncontiguous()):
            try:
                yield COUNTERPARTS[op][1](given)
            except LeftOut:
                break


def samples(op: str) -> list[Any]:
    """Return torch's samples for the torch operator that corresponds to the operation `op`."""
    # The import is here because it takes seconds.
    from torch.testing._internal.common_methods_invocations import op_db

    inputs = []
    for info in op_db:
        if info.name == COUNTERPARTS[op][0]:
            inputs += info.sample_inputs("cpu", torch.float32, requires_grad=False)
    return inputs


def _call(torch_function: Callable[..., Tensor], refused: str = "", **arguments: Any) -> Call:
    """Return a `Call`; arguments with a leading underscore in the name are keyword arguments."""
    keyword = {name[1:]: value for name, value in arguments.items() if name.startswith("_")}
    positional = {name: value for name, value in arguments.items() if not name.startswith("_")}
    differentiated = tuple(
        name
        for name, value in (positional | keyword).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    )
    return Call(Inputs(positional, keyword, differentiated), torch_function, refused)


def _norm(sample: Any) -> tuple[Tensor, list[Tensor | None], float | None]:
    """Return rows, [weight, bias] and eps, with the normalised dimensions flattened into one."""
    shape, *given = sample.args
    parameters = [None if p is None else p.flatten() for p in (*given, None, None)[:2]]
    if parameters[0] is None:
        parameters[0] = torch.ones(math.prod(shape))
    return sample.input.flatten(-len(shape)), parameters, sample.kwargs.get("eps")


def _layer_norm(sample: Any) -> Call:
    def torch_function(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    x, (weight, bias), eps = _norm(sample)
    eps = 1e-5 if eps is None else eps
    return _call(torch_function, "eps" if eps < 0 else "", x=x, weight=weight, bias=bias, _eps=eps)


def _rms_norm(sample: Any) -> Call:
    def torch_function(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    x, (weight, _), eps = _norm(sample)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _call(torch_function, "eps" if eps < 0 else "", x=x, weight=weight, _eps=eps)


def _linear(sample: Any) -> Call:
    weight, bias = (*sample.args, None)[:2]
    return _call(F.linear, x=sample.input, weight=weight, bias=bias)


def _linear_gelu(sample: Any) -> Call:
    def torch_function(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str
    ) -> Tensor:
        h = F.linear(x, weight, bias)
        return F.relu(h) if approximate == "relu" else F.gelu(h, approximate=approximate)

    weight, bias = (*sample.args, None)[:2]
    approximate = ("none", "tanh", "relu")[weight.shape[1] % 3]
    return _call(torch_function, x=sample.input, weight=weight, bias=bias, _approximate=approximate)


def _feed_forward(sample: Any) -> Call:
    def torch_function(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: None) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    w1, b1 = (*sample.args, None)[:2]
    return _call(torch_function, x=sample.input, w1=w1, b1=b1, w2=w1.flip(0).t(), b2=None)


def _attention(sample: Any) -> Call:
    def torch_function(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, bias: Any = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if bias is None else bias)

    if sample.kwargs.get("dropout_p"):
        raise LeftOut("torch draws another dropout mask")
    if sample.kwargs.get("enable_gqa") and sample.args[0].shape[-3] != sample.input.shape[-3]:
        raise LeftOut("keys and values are shared between heads")
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (sample.input, *sample.args[:2])))
    q, k, v = (
        x.expand(*batch, *x.shape[-2:]).reshape(-1, batch[-1], *x.shape[-2:])
        for x in (sample.input, *sample.args[:2])
    )
    mask = bias = None
    if sample.kwargs.get("is_causal"):
        # With fewer queries than keys, torch aligns the causal mask to the first key, and fastbert
        # to the last key.
        mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
    elif (given := sample.kwargs.get("attn_mask")) is not None:
        # In fastbert, a two-dimensional mask has the shape (batch, keys), so torch's mask is
        # expanded to four dimensions.
        given = given.expand(*[1] * (4 - given.dim()), *given.shape)
        mask, bias = (given, None) if given.dtype == torch.bool else (None, given)
    return _call(torch_function, q=q, k=k, v=v, _mask=mask, _bias=bias)


def _embedding(sample: Any) -> Call:
    def torch_function(
        ids, token_types, positions, words, types, places, weight, bias, *, eps, padding_idx
    ) -> Tensor:
        y = F.embedding(ids, words, padding_idx)
        return F.layer_norm(y, words.shape[1:], weight, bias, eps)

    (ids,), table, options = sample.args, sample.input, dict(sample.kwargs)
    padding_idx = options.pop("padding_idx", None)
    for name, value in options.items():
        if value:
            raise LeftOut(f"the argument {name}")
    row = torch.linspace(-1, 1, table.shape[1])
    return _call(
        torch_function, ids=ids, token_types=None, positions=None, word_table=table,
        type_table=None, position_table=None, weight=row + 2, bias=row, _eps=1e-5,
        _padding_idx=None if padding_idx is None else padding_idx % len(table),
    )  # fmt: skip


def _linear_cross_entropy(sample: Any) -> Call:
    def torch_function(hidden, weight, bias, labels, *, reduction, ignore_index) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=ignore_index)

    weight, labels = sample.args
    options = dict(sample.kwargs)
    bias = options.pop("linear_bias", None)
    options.pop("options", None)
    reduction = options.pop("reduction", "mean")
    ignore_index = options.pop("ignore_index", -100)
    hidden = sample.input
    if labels.is_floating_point():
        raise LeftOut("the targets are probabilities")
    if weight.dim() != 2:
        raise LeftOut("a row has several targets")
    for name, value in options.items():
        if isinstance(value, Tensor) or value:
            raise LeftOut(f"the argument {name}")
    if hidden.dim() == 1:
        hidden, labels = hidden[None], labels[None]
    return _call(
        torch_function, hidden=hidden, weight=weight, bias=bias, labels=labels,
        _reduction=reduction, _ignore_index=ignore_index,
    )  # fmt: skip


# Operation → the name of torch's corresponding operator, and the function that makes a call.
COUNTERPARTS: dict[str, tuple[str, Callable[[Any], Call]]] = {
    "attention": ("nn.functional.scaled_dot_product_attention", _attention),
    "layer_norm": ("nn.functional.layer_norm", _layer_norm),
    "rms_norm": ("nn.functional.rms_norm", _rms_norm),
    "linear": ("nn.functional.linear", _linear),
    "linear_gelu": ("nn.functional.linear", _linear_gelu),
    "feed_forward": ("nn.functional.linear", _feed_forward),
    "embedding": ("nn.functional.embedding", _embedding),
    "linear_cross_entropy": ("nn.functional.linear_cross_entropy", _linear_cross_entropy),
}


def table() -> str:
    """Return a Markdown table with the numbers of samples and of left-out samples by operation."""
    rows = ["| operation | torch's samples | left out |", "|---|---|---|"]
    for op, (_, convert) in COUNTERPARTS.items():
        found_samples, left = samples(op), Counter()
        for sample in found_samples:
            try:
                convert(sample)
            except LeftOut as reason:
                left[str(reason)] += 1
        reasons = ", ".join(f"{count}: {reason}" for reason, count in left.items())
        rows.append(f"| {op} | {len(found_samples)} | {reasons or 'none'} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
