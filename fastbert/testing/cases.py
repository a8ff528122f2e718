"""The registry of operation cases: shapes, options, seeded inputs, FLOPs and bytes.

A case is data. The tests run it on every backend and dtype, and ``fastbert check`` and the
benchmarks run it too. `Case.command` gives the command line that runs a case again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastbert.activations import ACTIVATIONS
from fastbert.ops.backend import dtype_name

OPS = (
    "attention",
    "attention_varlen",
    "attention_qkvpacked",
    "relative_attention",
    "layer_norm",
    "rms_norm",
    "rotary",
    "linear",
    "linear_gelu",
    "feed_forward",
    "embedding",
    "linear_cross_entropy",
    "splade",
)
# Name of a public function → name of the table of its backends.
TABLE_OF = {op: op for op in OPS} | {
    "attention_varlen": "attention",
    "attention_qkvpacked": "attention",
}

# The name of a random case begins with this text.
RANDOM = "random-"


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call.

    Args:
        positional: The positional arguments in order, by name.
        keyword: The keyword arguments.
        gradients: The names of the arguments whose gradients are computed.
    """

    positional: dict[str, Any]
    keyword: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of every argument, the positional arguments first."""
        yield from self.positional.items()
        yield from self.keyword.items()

    def map(self, change: Callable[[str, Any], Any]) -> Inputs:
        """Return the inputs with ``change(name, value)`` instead of every value."""
        return Inputs(
            {name: change(name, value) for name, value in self.positional.items()},
            {name: change(name, value) for name, value in self.keyword.items()},
            self.gradients,
        )


@dataclass(frozen=True)
class Case:
    """One operation at one shape with one set of options.

    Args:
        op: Name of a function of ``fastbert.ops``, one of ``OPS``.
        name: Name of the case, unique among the cases of the operation.
        shape: Sizes, as the operation's builder of inputs takes them.
        options: Options of the builder of inputs, and keyword arguments of the operation, by name.
        quick: Whether the case belongs to the quick selection, which has a few cases per operation.
        gpu_tiles: Whether Triton's interpreter runs the case with the tiles of a GPU.

    Examples:
        >>> import torch
        >>> from fastbert.testing.selection import find
        >>> (case,) = find("linear", "bias")
        >>> case.inputs(torch.float32).positional["weight"].shape
        torch.Size([130, 96])
        >>> case.flops()
        1747200
    """

    op: str
    name: str
    shape: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    # By default, the interpreter uses larger tiles than a GPU, because larger tiles take less time
    # in the interpreter.
    gpu_tiles: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the case is a random case, not a registered case."""
        return self.name.startswith(RANDOM)

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        """Draw the inputs of the case.

        Args:
            dtype: Dtype to which the floating inputs are rounded.
            device: Device of the inputs. The values are the same on every device.
            seed: Seed of the values.

        Returns:
            The inputs.
        """
        salt = zlib.crc32(f"{self.op}/{self.name}/{seed}".encode())
        draw = Draw(torch.Generator().manual_seed(salt), dtype)
        inputs = _BUILDERS[self.op](draw, *self.shape, **self.options)
        return inputs.map(lambda _, v: _moved(v, device))

    def command(self, backend: str, dtype: torch.dtype, seed: int = 0) -> str:
        """Return the command line that runs the case again, with the inputs of `seed`."""
        command = f"fastbert check --op {self.op} --case {self.name}"
        seeded = f" --seed {seed}" if seed else ""
        return f"{command} --backend {backend} --dtype {dtype_name(dtype)}{seeded}"

    def flops(self) -> int:
        """Return the number of floating-point operations of the forward pass.

        A multiplication with an addition counts as two operations.
        """
        return _FLOPS[self.op](*self.shape)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the fewest bytes that the forward pass moves.

        Every activation and every weight matrix is read or written once. Masks, attention biases,
        parameter vectors and indices are not counted.
        """
        return _ELEMENTS[self.op](*self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Draw:
    """Random values from one generator, in one dtype."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal values of standard deviation `scale`, rounded to the dtype."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw int64 values from 0 to ``high - 1``."""
        return torch.randint(0, high, shape, generator=self.generator)

    def seed(self) -> Tensor:
        """Draw a dropout seed, int64 of shape ``(1,)``."""
        return torch.randint(-(2**63), 2**63 - 1, (1,), generator=self.generator)

    def lengths(self, batch: int, longest: int, shortest: int = 0) -> Tensor:
        """Draw the lengths of `batch` sequences; the first sequence has the length `longest`."""
        lengths = torch.randint(shortest, longest + 1, (batch,), generator=self.generator)
        lengths[0] = longest
        return lengths


def _moved(value: Any, device: str) -> Any:
    """Return an argument whose tensor, or tuple of tensors, is on the device."""
    if isinstance(value, tuple):
        return tuple(_moved(element, device) for element in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _present(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments that are not None."""
    return tuple(name for name, value in arguments.items() if value is not None)


def _dropout(draw: Draw, dropout_p: float) -> dict[str, Any]:
    return {"dropout_p": dropout_p, "dropout_seed": draw.seed()} if dropout_p else {}


def _broadcast(form: str, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the shape of a mask or bias whose size is 1 in the dimensions that `form` leaves out.

    For example, the form "bqk" leaves out the heads and gives ``(B, 1, Lq, Lk)``.
    """
    return tuple(size if name in form else 1 for name, size in zip("bhqk", sizes, strict=True))


def _pairs(draw, sizes, mask, bias, dropout_p) -> dict[str, Any]:
    """Draw the keyword arguments mask, bias and dropout of attention.

    Args:
        draw: Source of the values.
        sizes: Sizes ``(B, H, Lq, Lk)`` of the logits.
        mask: None, "padding" for a mask of shape ``(B, Lk)``, "rows" for a mask with which the
            first query attends to no key, or a form of `_broadcast`.
        bias: False for no bias, True for the form "hqk", or another form of `_broadcast`.
        dropout_p: Probability of dropout.
    """
    keyword = _dropout(draw, dropout_p)
    batch, _, _, keys = sizes
    if mask == "padding":
        keyword["mask"] = torch.arange(keys) < draw.lengths(batch, keys)[:, None]
    elif mask == "rows":
        keyword["mask"] = draw.integers(4, *_broadcast("bqk", sizes)) > 0
        keyword["mask"][..., :1, :] = False
    elif mask is not None:
        keyword["mask"] = draw.integers(4, *_broadcast(mask, sizes)) > 0
    if bias:
        keyword["bias"] = draw.normal(*_broadcast("hqk" if bias is True else bias, sizes))
    return keyword


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor of shape ``(B, H, L, D)`` with the memory layout that `layout` names.

    "transposed" swaps the strides of the last two dimensions. "expanded" shares the values of the
    first head among all heads. "offset" moves the tensor by one element, so that its address is
    aligned to one element only. Any other layout leaves the tensor unchanged.
    """
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[:, :1].expand(x.shape)
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def _attention(
    draw, batch, heads, queries, keys, head_dim, *, mask=None, bias=False, bias_gradient=False,
    dropout_p=0.0, logits=1.0, layout="sliced", **options,
):  # fmt: skip
    q = draw.normal(batch, heads, queries, head_dim, scale=logits)
    # Keys and values are slices of one fused projection, as in the model.
    k, v = draw.normal(batch, keys, 2, heads, head_dim).permute(2, 0, 3, 1, 4)
    keyword = _pairs(draw, (batch, heads, queries, keys), mask, bias, dropout_p)
    positional = {
        "q": q if layout == "expanded" else _laid_out(q, layout),
        "k": _laid_out(k, layout),
        "v": _laid_out(v, layout),
    }
    gradients = ("q", "k", "v", *(("bias",) if bias_gradient else ()))
    return Inputs(positional, {**options, **keyword}, gradients)


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _attention_varlen(
    draw, lengths, heads, head_dim, slack=0, *, key_lengths=None, mask=None, bias=False,
    bias_gradient=False, dropout_p=0.0, **options,
):  # fmt: skip
    if key_lengths is None:
        key_lengths = lengths
        q, k, v = draw.normal(sum(lengths) + slack, 3, heads, head_dim).unbind(1)
    else:
        q = draw.normal(sum(lengths) + slack, heads, head_dim)
        k, v = draw.normal(sum(key_lengths) + slack, 2, heads, head_dim).unbind(1)
    longest = (max(lengths, default=0), max(key_lengths, default=0))
    positional = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": _cumulative(lengths),
        "cu_seqlens_k": _cumulative(key_lengths),
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
    }
    keyword = _pairs(draw, (len(lengths), heads, *longest), mask, bias, dropout_p)
    gradients = ("q", "k", "v", *(("bias",) if bias_gradient else ()))
    return Inputs(positional, {**options, **keyword}, gradients)


def _attention_qkvpacked(
    draw, lengths, heads, head_dim, slack=0, *, dense=False, mask=None, bias=False,
    bias_gradient=False, dropout_p=0.0, **options,
):  # fmt: skip
    longest = max(lengths, default=0)
    if dense:
        positional = {"qkv": draw.normal(len(lengths), longest, 3, heads, head_dim)}
    else:
        qkv = draw.normal(sum(lengths) + slack, 3, heads, head_dim)
        positional = {"qkv": qkv, "cu_seqlens": _cumulative(lengths), "max_seqlen": longest}
    keyword = _pairs(draw, (len(lengths), heads, longest, longest), mask, bias, dropout_p)
    gradients = ("qkv", *(("bias",) if bias_gradient else ()))
    return Inputs(positional, {**options, **keyword}, gradients)


def _falling(count: int, longest: int) -> tuple[int, ...]:
    """Return `count` lengths that fall from `longest` to 0 in equal steps, up to rounding."""
    return tuple(longest - longest * i // max(count - 1, 1) for i in range(count))


def _relative_attention(
    draw, batch, heads, queries, keys, head_dim, positions, *, tables="kqb", segments=False,
    packed=False, slack=0, mask=None, dropout_p=0.0, **options,
):  # fmt: skip
    """Draw the inputs of attention with relative positions.

    The letters k, q and b of `tables` stand for position_keys, position_queries and position_bias.
    Packed sequences have at most `queries` queries and `keys` keys, and then `slack` more rows. The
    lengths do not depend on the seed, because the results of several seeds are stacked.
    """
    shapes: dict[str, tuple[int, ...]] = {"q": (batch, heads, queries, head_dim)}
    shapes |= dict.fromkeys("kv", (batch, heads, keys, head_dim))
    keyword = _pairs(draw, (batch, heads, queries, keys), mask, False, dropout_p)
    of_queries: tuple[int, ...] = (batch, queries)
    of_keys: tuple[int, ...] = (batch, keys)
    of_scores: tuple[int, ...] = (batch, heads, queries)
    if packed:
        lengths = _falling(batch, queries)
        # The sequence with the fewest queries has the second most keys.
        key_lengths = (keys, *_falling(batch, keys)[:0:-1]) if queries != keys else lengths
        keyword["cu_seqlens_q"] = _cumulative(lengths)
        keyword["cu_seqlens_k"] = _cumulative(key_lengths)
        of_queries, of_keys = (sum(lengths) + slack,), (sum(key_lengths) + slack,)
        of_scores = (*of_queries, heads)
        rows = {"q": of_queries, "k": of_keys, "v": of_keys}
        shapes = {name: (*rows[name], heads, head_dim) for name in "qkv"}
    # The index has more distances than the sequences.
    distances = 2 * (max(queries, keys, 1) + 2) - 1
    positional = {name: draw.normal(*shape) for name, shape in shapes.items()}
    positional["index"] = draw.integers(positions, distances).int()
    terms: dict[str, Any] = {}
    if "k" in tables:
        terms["position_keys"] = draw.normal(positions, heads, head_dim, scale=0.5)
    if "q" in tables:
        terms["position_queries"] = draw.normal(positions, heads, head_dim, scale=0.5)
    if "b" in tables:
        # The scale of the logits applies to the bias, too.
        terms["position_bias"] = draw.normal(positions, heads, scale=head_dim**0.5)
    if segments:
        terms["segment_scores"] = draw.normal(*of_scores, scale=head_dim**0.5)
        keyword["segments"] = (draw.integers(2, *of_queries), draw.integers(2, *of_keys))
    gradients = ("q", "k", "v", *terms)
    return Inputs(positional, {**options, **keyword, **terms}, gradients)


def _layer_norm(
    draw, rows, columns, *, bias=True, residual=True, x_bias=True, dropout_p=0.0, mean=0.0,
    constant=False,
):  # fmt: skip
    x = draw.normal(rows, columns)
    if mean:
        x = (x.float() + mean).to(draw.dtype)
    if constant:
        x[: rows // 2] = 1.0
    positional = {
        "x": x,
        "weight": draw.normal(columns) + 1,
        "bias": draw.normal(columns) if bias else None,
    }
    keyword: dict[str, Any] = {"eps": 1e-12 if not constant else 1e-5, **_dropout(draw, dropout_p)}
    if residual:
        keyword["residual"] = draw.normal(rows, columns)
    if x_bias:
        keyword["x_bias"] = draw.normal(columns)
    gradients = (*_present(positional), *(n for n in ("residual", "x_bias") if n in keyword))
    return Inputs(positional, keyword, gradients)


def _rms_norm(draw, rows, columns, *, residual=True, **options):
    positional = {"x": draw.normal(rows, columns), "weight": draw.normal(columns) + 1}
    if residual:
        options["residual"] = draw.normal(rows, columns)
    gradients = ("x", "weight", *(("residual",) if residual else ()))
    return Inputs(positional, options, gradients)


def _rotary(draw, tokens, total, head_dim, heads, *, strided=False):
    if strided:
        x = draw.normal(tokens, total + 3, head_dim + 5)[:, 2 : 2 + total, 1 : 1 + head_dim]
    else:
        x = draw.normal(tokens, total, head_dim)
    angles = torch.rand(tokens, head_dim // 2, generator=draw.generator) * 2 * torch.pi
    return Inputs({"x": x, "cos": angles.cos(), "sin": angles.sin()}, {"heads": heads}, ("x",))


def _linear_gelu(draw, rows, inner, outer, *, bias=True, **options):
    positional = {
        "x": draw.normal(rows, inner),
        "weight": draw.normal(outer, inner, scale=inner**-0.5),
        "bias": draw.normal(outer) if bias else None,
    }
    return Inputs(positional, options, ("x", "weight", "bias") if bias else ("x", "weight"))


def _linear(draw, rows, inner, outer, *, bias=True):
    return _linear_gelu(draw, rows, inner, outer, bias=bias)


def _feed_forward(draw, rows, hidden, inner, *, bias=True, **options):
    gated = ACTIVATIONS[options.get("activation", "gelu")].gated
    first = 2 * inner if gated else inner
    positional = {
        "x": draw.normal(rows, hidden),
        "w1": draw.normal(first, hidden, scale=hidden**-0.5),
        "b1": draw.normal(first) if bias else None,
        "w2": draw.normal(hidden, inner, scale=inner**-0.5),
        "b2": draw.normal(hidden) if bias else None,
    }
    return Inputs(positional, options, _present(positional))


def _embedding(
    draw, tokens, vocabulary, hidden, *, types=True, positions=True, bias=True, padding_idx=None,
    dropout_p=0.0,
):  # fmt: skip
    indices = {
        "ids": draw.integers(vocabulary, tokens),
        "token_types": draw.integers(2, tokens) if types else None,
        "positions": torch.arange(tokens) % 512 if positions else None,
    }
    parameters = {
        "word_table": draw.normal(vocabulary, hidden),
        "type_table": draw.normal(2, hidden) if types else None,
        "position_table": draw.normal(512, hidden) if positions else None,
        "weight": draw.normal(hidden) + 1,
        "bias": draw.normal(hidden) if bias else None,
    }
    keyword = {"padding_idx": padding_idx, **_dropout(draw, dropout_p)}
    return Inputs(indices | parameters, keyword, _present(parameters))


def _linear_cross_entropy(
    draw, tokens, hidden, vocabulary, *, labelled=0.15, bias=True, logits=1.0, narrow=False,
    **options,
):  # fmt: skip
    labels = draw.integers(vocabulary, tokens)
    ignored = torch.rand(tokens, generator=draw.generator) >= labelled
    labels = labels.masked_fill(ignored, options.get("ignore_index", -100))
    positional = {
        "hidden": draw.normal(tokens, hidden, scale=logits),
        "weight": draw.normal(vocabulary, hidden, scale=hidden**-0.5),
        "bias": draw.normal(vocabulary) if bias else None,
        "labels": labels.int() if narrow else labels,
    }
    return Inputs(positional, options, ("hidden", "weight", *(("bias",) if bias else ())))


def _splade(draw, lengths, hidden, vocabulary, slack=0, *, bias=True, shift=0.0):
    positional = {
        "hidden": draw.normal(sum(lengths) + slack, hidden),
        "weight": draw.normal(vocabulary, hidden, scale=hidden**-0.5),
        "bias": draw.normal(vocabulary) + shift if bias else None,
    }
    return Inputs(positional, {"cu_seqlens": _cumulative(lengths)}, _present(positional))


_BUILDERS: dict[str, Callable[..., Inputs]] = {
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "attention_qkvpacked": _attention_qkvpacked,
    "relative_attention": _relative_attention,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "linear": _linear,
    "linear_gelu": _linear_gelu,
    "feed_forward": _feed_forward,
    "embedding": _embedding,
    "linear_cross_entropy": _linear_cross_entropy,
    "splade": _splade,
}

_FLOPS: dict[str, Callable[..., int]] = {
    "attention": lambda b, h, lq, lk, d: 4 * b * h * lq * lk * d,
    "attention_varlen": lambda lengths, h, d, slack=0: 4 * h * d * sum(n * n for n in lengths),
    "attention_qkvpacked": lambda lengths, h, d, slack=0: 4 * h * d * sum(n * n for n in lengths),
    # Every query and every key is multiplied by the rows of a table.
    "relative_attention": lambda b, h, lq, lk, d, p: (
        4 * b * h * lq * lk * d + 2 * b * h * (lq + lk) * p * d
    ),
    "layer_norm": lambda rows, columns: 8 * rows * columns,
    "rms_norm": lambda rows, columns: 5 * rows * columns,
    "rotary": lambda tokens, total, head_dim, heads: 3 * tokens * heads * head_dim,
    "linear": lambda rows, inner, outer: 2 * rows * inner * outer,
    "linear_gelu": lambda rows, inner, outer: 2 * rows * inner * outer,
    "feed_forward": lambda rows, hidden, inner: 4 * rows * hidden * inner,
    "embedding": lambda tokens, vocabulary, hidden: 10 * tokens * hidden,
    "linear_cross_entropy": lambda tokens, hidden, vocabulary: 2 * tokens * hidden * vocabulary,
    "splade": lambda lengths, hidden, vocabulary, slack=0: 2 * sum(lengths) * hidden * vocabulary,
}

_ELEMENTS: dict[str, Callable[..., int]] = {
    "attention": lambda b, h, lq, lk, d: 2 * b * h * (lq + lk) * d,
    "attention_varlen": lambda lengths, h, d, slack=0: 4 * sum(lengths) * h * d,
    "attention_qkvpacked": lambda lengths, h, d, slack=0: 4 * sum(lengths) * h * d,
    "relative_attention": lambda b, h, lq, lk, d, p: 2 * h * (b * (lq + lk) + p) * d,
    "layer_norm": lambda rows, columns: 3 * rows * columns,
    "rms_norm": lambda rows, columns: 3 * rows * columns,
    "rotary": lambda tokens, total, head_dim, heads: (2 * total + 1) * tokens * head_dim,
    "linear": lambda rows, inner, outer: rows * inner + inner * outer + rows * outer,
    "linear_gelu": lambda rows, inner, outer: rows * inner + inner * outer + rows * outer,
    "feed_forward": lambda rows, hidden, inner: 2 * rows * hidden + 2 * hidden * inner,
    "embedding": lambda tokens, vocabulary, hidden: 4 * tokens * hidden,
    "linear_cross_entropy": lambda tokens, hidden, vocabulary: (
        tokens * hidden + vocabulary * hidden
    ),
    "splade": lambda lengths, hidden, vocabulary, slack=0: (
        sum(lengths) * hidden + vocabulary * hidden + len(lengths) * vocabulary
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
    yield case("attention", "bias_gradient", 2, 2, 33, 40, 64, bias="hqk", bias_gradient=True)
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
    yield case("attention_qkvpacked", "packed", (33, 0, 1, 40), 2, 64, 5, quick=True)
    yield case("attention_qkvpacked", "dense", (37, 37), 2, 40, dense=True, dropout_p=0.1)
    # The shape of this operation ends with the number of rows of the tables.
    yield case("relative_attention", "deberta", 2, 2, 37, 37, 64, 30, tables="kq", mask="padding",
               quick=True)  # fmt: skip
    yield case("relative_attention", "xlnet", 2, 3, 33, 33, 32, 65, tables="kb", segments=True)
    yield case("relative_attention", "t5", 2, 2, 40, 40, 64, 12, tables="b", quick=True, scale=0.2)
    yield case("relative_attention", "packed", 4, 2, 37, 37, 64, 20, packed=True, slack=5,
               segments=True, quick=True)  # fmt: skip
    yield case("relative_attention", "cross", 3, 2, 21, 70, 40, 33, packed=True, mask="rows")
    yield case("relative_attention", "keys", 1, 2, 150, 150, 59, 40, tables="k", dropout_p=0.1)
    yield case("relative_attention", "queries", 2, 2, 70, 31, 80, 9, tables="q", mask="rows")
    yield case("layer_norm", "residual", 37, 768, quick=True)
    yield case("layer_norm", "dropout", 29, 768, dropout_p=0.1, quick=True)
    yield case("layer_norm", "plain", 33, 111, residual=False, x_bias=False)
    yield case("layer_norm", "wide", 9, 3584, dropout_p=0.1)
    yield case("layer_norm", "odd", 17, 1023, x_bias=False)
    yield case("layer_norm", "constant", 16, 128, residual=False, x_bias=False, constant=True)
    yield case("layer_norm", "no_bias", 33, 384, bias=False, x_bias=False, quick=True)
    yield case("layer_norm", "no_bias_dropout", 21, 203, bias=False, dropout_p=0.1)
    yield case("rms_norm", "residual", 37, 768, quick=True)
    yield case("rms_norm", "plain", 33, 111, residual=False, eps=1e-5)
    yield case("rms_norm", "wide", 9, 3584)
    # The shape of a rotary case is tokens, heads, head dim, and heads that are rotated.
    yield case("rotary", "fused_projection", 37, 9, 64, 6, quick=True)
    yield case("rotary", "strided", 33, 5, 96, 3, strided=True)
    yield case("rotary", "one_token", 1, 6, 64, 4)
    yield case("rotary", "no_token", 0, 6, 64, 4)
    yield case("rotary", "one_pair", 65, 3, 2, 2)
    yield case("rotary", "odd_half", 19, 6, 54, 4, strided=True)
    yield case("rotary", "narrow_heads", 41, 12, 16, 8)
    yield case("rotary", "wide_heads", 7, 3, 256, 2)
    yield case("rotary", "wider_heads", 5, 2, 514, 1)
    yield case("rotary", "no_head", 11, 3, 32, 0)
    yield case("rotary", "every_head", 13, 20, 80, 20)
    yield case("linear", "bias", 70, 96, 130, quick=True)
    yield case("linear", "no_bias", 17, 59, 65, bias=False)
    yield case("linear_gelu", "erf", 70, 96, 130, quick=True)
    yield case("linear_gelu", "tanh", 33, 64, 72, approximate="tanh", quick=True)
    yield case("linear_gelu", "no_bias", 17, 59, 65, bias=False)
    yield case("linear_gelu", "one_row", 1, 128, 96)
    yield case("feed_forward", "erf", 65, 64, 160, quick=True)
    yield case("feed_forward", "tanh", 31, 48, 100, activation="gelu_tanh")
    yield case("feed_forward", "no_bias", 24, 40, 96, bias=False)
    yield case("feed_forward", "relu", 33, 40, 72, activation="relu")
    yield case("feed_forward", "silu", 33, 40, 72, activation="silu")
    yield case("feed_forward", "geglu", 37, 64, 104, activation="geglu")
    yield case("feed_forward", "geglu_tanh", 31, 40, 72, activation="geglu_tanh")
    yield case("feed_forward", "swiglu", 29, 48, 67, activation="swiglu", bias=False)
    yield case("feed_forward", "recompute", 34, 56, 90, recompute=True)
    yield case("feed_forward", "recompute_geglu", 34, 56, 66, activation="geglu", recompute=True)
    yield case("embedding", "plain", 70, 211, 96, quick=True)
    yield case("embedding", "dropout", 65, 100, 64, dropout_p=0.1, padding_idx=0, quick=True)
    absent = {"types": False, "positions": False, "bias": False}
    yield case("embedding", "words", 70, 211, 96, quick=True, **absent)
    yield case("embedding", "no_types", 65, 100, 111, types=False, dropout_p=0.1, padding_idx=0)
    yield case("embedding", "no_positions", 40, 59, 64, positions=False, bias=False)
    # The case "mlm" has so many labelled rows that the largest error of a logit hardly depends on
    # luck, both in the tested result and in the yardstick (the reference in the tested dtype).
    yield case("linear_cross_entropy", "mlm", 700, 48, 301, quick=True)
    yield case("linear_cross_entropy", "sum", 130, 32, 197, reduction="sum", labelled=0.9)
    yield case("linear_cross_entropy", "none", 130, 32, 197, reduction="none", labelled=0.8)
    yield case("linear_cross_entropy", "no_label", 40, 32, 97, labelled=0.0, bias=False)
    yield case("linear_cross_entropy", "odd", 201, 33, 1030, labelled=0.4, reduction="none")
    yield case("linear_cross_entropy", "large_logits", 140, 64, 260, labelled=0.9, logits=30.0)
    yield case("linear_cross_entropy", "int32", 150, 48, 130, ignore_index=7, narrow=True)
    # The shape of a case of splade is the lengths, the columns, the classes and the rows after the
    # last sequence.
    yield case("splade", "spread", (33, 1, 17, 140), 48, 301, quick=True)
    yield case("splade", "empty_sequences", (0, 9, 0, 0, 21, 0), 33, 197)
    yield case("splade", "slack", (12, 20), 40, 260, 7, bias=False)
    yield case("splade", "few_positive", (25, 40, 3), 64, 130, shift=-2.0)


CASES: tuple[Case, ...] = tuple(_cases())
