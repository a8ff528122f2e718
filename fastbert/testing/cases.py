"""The registry of operation cases: shapes, options, seeded inputs, FLOPs and bytes.

A case is data: it can be run by the tests on every backend and dtype, by ``fastbert check``, and by
the benchmarks, and ``Case.command`` reproduces one from the command line.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OPS = (
    "attention",
    "attention_varlen",
    "layer_norm",
    "linear_gelu",
    "feed_forward",
    "embedding",
    "linear_cross_entropy",
)
# The row of the backend table that serves each public function.
TABLE_OF = {op: op for op in OPS} | {"attention_varlen": "attention"}


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call: positional, by keyword, and the names of those that get
    gradients.
    """

    positional: dict[str, Any]
    keyword: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()

    def items(self) -> Iterator[tuple[str, Any]]:
        yield from self.positional.items()
        yield from self.keyword.items()

    def map(self, change: Callable[[str, Any], Any]) -> Inputs:
        return Inputs(
            {name: change(name, value) for name, value in self.positional.items()},
            {name: change(name, value) for name, value in self.keyword.items()},
            self.gradients,
        )


@dataclass(frozen=True)
class Case:
    """One operation at one shape with one set of options."""

    op: str
    name: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        """Seeded inputs rounded to ``dtype``; the same values on every device and backend."""
        salt = zlib.crc32(f"{self.op}/{self.name}/{seed}".encode())
        draw = Draw(torch.Generator().manual_seed(salt), dtype)
        inputs = _BUILDERS[self.op](draw, *self.shape, **self.options)
        return inputs.map(lambda _, v: v.to(device) if isinstance(v, Tensor) else v)

    def command(self, backend: str, dtype: torch.dtype) -> str:
        name = str(dtype).removeprefix("torch.")
        return (
            f"fastbert check --op {self.op} --case {self.name} --backend {backend} --dtype {name}"
        )

    def flops(self) -> int:
        """Floating-point operations of the forward pass, multiply and add counted as two."""
        return _FLOPS[self.op](*self.shape)

    def bytes(self, dtype: torch.dtype) -> int:
        """Fewest bytes the forward pass moves: every input read once, the result written once."""
        return _ELEMENTS[self.op](*self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Draw:
    """Random values from one generator, in one dtype."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def seed(self) -> Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (1,), generator=self.generator)

    def lengths(self, batch: int, longest: int, shortest: int = 0) -> Tensor:
        lengths = torch.randint(shortest, longest + 1, (batch,), generator=self.generator)
        lengths[0] = longest
        return lengths


def _dropout(draw: Draw, dropout_p: float) -> dict[str, Any]:
    return {"dropout_p": dropout_p, "dropout_seed": draw.seed()} if dropout_p else {}


def _attention(
    draw, batch, heads, queries, keys, head_dim, *, mask=None, bias=False, dropout_p=0.0,
    logits=1.0, **options,
):  # fmt: skip
    q = draw.normal(batch, heads, queries, head_dim, scale=logits)
    # Slices of one fused projection, as the model passes them.
    kv = draw.normal(batch, keys, 2, heads, head_dim).permute(2, 0, 3, 1, 4)
    keyword: dict[str, Any] = {**options, **_dropout(draw, dropout_p)}
    if mask == "padding":
        lengths = draw.lengths(batch, keys)
        keyword["mask"] = torch.arange(keys) < lengths[:, None]
    elif mask == "rows":
        keyword["mask"] = draw.integers(4, batch, 1, queries, keys) > 0
        keyword["mask"][..., 0, :] = False
    gradients = ("q", "k", "v")
    if bias:
        keyword["bias"] = draw.normal(1, heads, queries, keys)
    return Inputs({"q": q, "k": kv[0], "v": kv[1]}, keyword, gradients)


def _attention_varlen(draw, lengths, heads, head_dim, slack=0, *, dropout_p=0.0, **options):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = int(cu_seqlens[-1]) + slack
    qkv = draw.normal(total, 3, heads, head_dim)
    positional = {
        "q": qkv[:, 0],
        "k": qkv[:, 1],
        "v": qkv[:, 2],
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max(lengths, default=0),
        "max_seqlen_k": max(lengths, default=0),
    }
    return Inputs(positional, {**options, **_dropout(draw, dropout_p)}, ("q", "k", "v"))


def _layer_norm(
    draw, rows, columns, *, residual=True, x_bias=True, dropout_p=0.0, mean=0.0, constant=False
):
    x = draw.normal(rows, columns)
    if mean:
        x = (x.float() + mean).to(draw.dtype)
    if constant:
        x[: rows // 2] = 1.0
    positional = {"x": x, "weight": draw.normal(columns) + 1, "bias": draw.normal(columns)}
    keyword: dict[str, Any] = {"eps": 1e-12 if not constant else 1e-5, **_dropout(draw, dropout_p)}
    if residual:
        keyword["residual"] = draw.normal(rows, columns)
    if x_bias:
        keyword["x_bias"] = draw.normal(columns)
    gradients = ("x", "weight", "bias", *(n for n in ("residual", "x_bias") if n in keyword))
    return Inputs(positional, keyword, gradients)


def _linear_gelu(draw, rows, inner, outer, *, bias=True, **options):
    positional = {
        "x": draw.normal(rows, inner),
        "weight": draw.normal(outer, inner, scale=inner**-0.5),
        "bias": draw.normal(outer) if bias else None,
    }
    return Inputs(positional, options, ("x", "weight", "bias") if bias else ("x", "weight"))


def _feed_forward(draw, rows, hidden, inner, *, bias=True, **options):
    positional = {
        "x": draw.normal(rows, hidden),
        "w1": draw.normal(inner, hidden, scale=hidden**-0.5),
        "b1": draw.normal(inner) if bias else None,
        "w2": draw.normal(hidden, inner, scale=inner**-0.5),
        "b2": draw.normal(hidden) if bias else None,
    }
    return Inputs(positional, options, tuple(n for n, v in positional.items() if v is not None))


def _embedding(draw, tokens, vocabulary, hidden, *, padding_idx=None, dropout_p=0.0):
    positional = {
        "ids": draw.integers(vocabulary, tokens),
        "token_types": draw.integers(2, tokens),
        "positions": torch.arange(tokens) % 512,
        "word_table": draw.normal(vocabulary, hidden),
        "type_table": draw.normal(2, hidden),
        "position_table": draw.normal(512, hidden),
        "weight": draw.normal(hidden) + 1,
        "bias": draw.normal(hidden),
    }
    keyword = {"padding_idx": padding_idx, **_dropout(draw, dropout_p)}
    return Inputs(positional, keyword, tuple(positional)[3:])


def _linear_cross_entropy(draw, tokens, hidden, vocabulary, *, labelled=0.15, bias=True, **options):
    labels = draw.integers(vocabulary, tokens)
    ignored = torch.rand(tokens, generator=draw.generator) >= labelled
    positional = {
        "hidden": draw.normal(tokens, hidden),
        "weight": draw.normal(vocabulary, hidden, scale=hidden**-0.5),
        "bias": draw.normal(vocabulary) if bias else None,
        "labels": labels.masked_fill(ignored, -100),
    }
    return Inputs(positional, options, ("hidden", "weight", *(("bias",) if bias else ())))


_BUILDERS: dict[str, Callable[..., Inputs]] = {
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "layer_norm": _layer_norm,
    "linear_gelu": _linear_gelu,
    "feed_forward": _feed_forward,
    "embedding": _embedding,
    "linear_cross_entropy": _linear_cross_entropy,
}

_FLOPS: dict[str, Callable[..., int]] = {
    "attention": lambda b, h, lq, lk, d: 4 * b * h * lq * lk * d,
    "attention_varlen": lambda lengths, h, d, slack=0: 4 * h * d * sum(n * n for n in lengths),
    "layer_norm": lambda rows, columns: 8 * rows * columns,
    "linear_gelu": lambda rows, inner, outer: 2 * rows * inner * outer,
    "feed_forward": lambda rows, hidden, inner: 4 * rows * hidden * inner,
    "embedding": lambda tokens, vocabulary, hidden: 10 * tokens * hidden,
    "linear_cross_entropy": lambda tokens, hidden, vocabulary: 2 * tokens * hidden * vocabulary,
}

_ELEMENTS: dict[str, Callable[..., int]] = {
    "attention": lambda b, h, lq, lk, d: 2 * b * h * (lq + lk) * d,
    "attention_varlen": lambda lengths, h, d, slack=0: 4 * sum(lengths) * h * d,
    "layer_norm": lambda rows, columns: 3 * rows * columns,
    "linear_gelu": lambda rows, inner, outer: rows * inner + inner * outer + rows * outer,
    "feed_forward": lambda rows, hidden, inner: 2 * rows * hidden + 2 * hidden * inner,
    "embedding": lambda tokens, vocabulary, hidden: 4 * tokens * hidden,
    "linear_cross_entropy": lambda tokens, hidden, vocabulary: (
        tokens * hidden + vocabulary * hidden
    ),
}


def _cases() -> Iterator[Case]:
    def case(op: str, name: str, *shape: Any, quick: bool = False, **options: Any) -> Case:
        return Case(op, name, shape, options, quick)

    yield case("attention", "plain", 2, 3, 33, 33, 64, quick=True)
    yield case("attention", "padding", 3, 2, 40, 40, 32, mask="padding", quick=True)
    yield case("attention", "rows", 2, 2, 19, 35, 16, mask="rows")
    yield case("attention", "dropout", 2, 2, 37, 37, 64, mask="padding", dropout_p=0.1, quick=True)
    yield case("attention", "bias", 2, 2, 24, 29, 40, bias=True, mask="padding")
    yield case("attention", "causal", 2, 2, 30, 41, 32, causal=True)
    yield case("attention", "window", 1, 2, 70, 70, 59, window=(9, 5))
    yield case("attention", "large_logits", 1, 2, 33, 65, 64, logits=4.0)
    yield case("attention", "one_query", 2, 2, 1, 97, 80)
    yield case("attention", "wide_head", 1, 1, 17, 17, 128)
    yield case("attention_varlen", "spread", (33, 1, 17, 40), 2, 64, quick=True)
    yield case("attention_varlen", "empty_sequences", (0, 9, 0, 21, 0), 2, 32)
    yield case("attention_varlen", "slack", (12, 20), 2, 40, 7)
    yield case("attention_varlen", "dropout", (25, 14), 2, 64, dropout_p=0.1)
    yield case("attention_varlen", "window", (50, 31), 1, 16, window=(6, 6))
    yield case("attention_varlen", "one_token", (1,), 2, 111)
    yield case("layer_norm", "residual", 37, 768, quick=True)
    yield case("layer_norm", "dropout", 29, 768, dropout_p=0.1, quick=True)
    yield case("layer_norm", "plain", 33, 111, residual=False, x_bias=False)
    yield case("layer_norm", "wide", 9, 3584, dropout_p=0.1)
    yield case("layer_norm", "odd", 17, 1023, x_bias=False)
    yield case("layer_norm", "constant", 16, 128, residual=False, x_bias=False, constant=True)
    yield case("linear_gelu", "erf", 70, 96, 130, quick=True)
    yield case("linear_gelu", "tanh", 33, 64, 72, approximate="tanh", quick=True)
    yield case("linear_gelu", "no_bias", 17, 59, 65, bias=False)
    yield case("linear_gelu", "one_row", 1, 128, 96)
    yield case("feed_forward", "erf", 65, 64, 160, quick=True)
    yield case("feed_forward", "tanh", 31, 48, 100, activation="gelu_tanh")
    yield case("feed_forward", "no_bias", 24, 40, 96, bias=False)
    yield case("embedding", "plain", 70, 211, 96, quick=True)
    yield case("embedding", "dropout", 65, 100, 64, dropout_p=0.1, padding_idx=0, quick=True)
    # Enough labelled rows that the worst of their logits is typical, in the yardstick as well.
    yield case("linear_cross_entropy", "mlm", 700, 48, 301, quick=True)
    yield case("linear_cross_entropy", "sum", 130, 32, 197, reduction="sum", labelled=0.9)
    yield case("linear_cross_entropy", "none", 130, 32, 197, reduction="none", labelled=0.8)
    yield case("linear_cross_entropy", "no_label", 40, 32, 97, labelled=0.0, bias=False)


CASES: tuple[Case, ...] = tuple(_cases())


def find(op: str | None = None, name: str | None = None, quick: bool = False) -> list[Case]:
    """The registered cases of ``op`` (all without one) called ``name``; ValueError when there is
    none.
    """
    if op is not None and op not in OPS:
        raise ValueError(f"op: got {op!r}, allowed: {', '.join(OPS)}")
    found = [
        c for c in CASES if op in (None, c.op) and name in (None, c.name) and (c.quick or not quick)
    ]
    if not found:
        names = ", ".join(sorted({c.name for c in CASES if op in (None, c.op)}))
        raise ValueError(f"case: got {name!r}, allowed: {names}")
    return found
