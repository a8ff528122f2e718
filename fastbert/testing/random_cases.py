"""Seeded random cases of every operation and its options, with shapes that nobody would choose.

The case ``random-SEED-INDEX`` of an operation is always the same, so its name reproduces it. The
sizes are small, so that Triton's interpreter runs a case in a fraction of a second. Sizes at the
edges of tiles and vectors are likelier than other sizes. In half of the cases, the interpreter uses
the tiles of a GPU.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from fastbert.activations import ACTIVATIONS, APPROXIMATIONS
from fastbert.testing.cases import OPS, Case

# At these sizes a tile, a vector or a loop begins or ends.
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
HEAD_DIMS = (1, 8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 192, 256)
COLUMNS = (1, 59, 111, 128, 384, 768, 1023, 1024)
# With these limits, a case takes a fraction of a second in the interpreter. LARGEST limits the
# number of elements of the tensors. In a case with the small tiles of a GPU, LARGEST_PAIRS limits
# the number of query-key pairs, and LARGEST_ROWS the number of rows.
LARGEST = 2**15
LARGEST_PAIRS = 2**12
LARGEST_ROWS = 8
# A case of attention with queries and keys has at least this many free logits over all heads (see
# `free_logits`). With fewer free logits, the error of the yardstick (the reference in the tested
# dtype) can be unusually small, and a right result would fail, even if it has many elements.
FEWEST_LOGITS = 128
# In a case with labels, either every row has a label, or the expected number of rows with a label
# is at least this number. All gradients of a row share the error of its log-sum-exp, so a single
# row is a sample of a single number.
FEWEST_LABELLED = 4

Options = tuple[tuple[Any, ...], dict[str, Any]]


class Pick:
    """Random choices of sizes and options.

    Args:
        text: Seed of the choices.
    """

    def __init__(self, text: str) -> None:
        """Seed the generator, and choose whether the case uses the tiles of a GPU."""
        # A text as seed gives the same choices for every machine, Python version and hash seed.
        self.random = random.Random(text)
        self.gpu_tiles = self.chance(0.5)

    def chance(self, p: float) -> bool:
        """Return True with probability `p`."""
        return self.random.random() < p

    def one(self, of: Sequence[Any]) -> Any:
        """Return one of the elements of a sequence."""
        return self.random.choice(of)

    def size(self, largest: int, edges: Sequence[int] = EDGES) -> int:
        """Return a size from 1 to `largest`; with probability 0.6 or more, it is one of `edges`."""
        if self.chance(0.6):
            return self.one([edge for edge in edges if edge <= largest])
        return self.random.randint(1, largest)

    def lengths(self, sequences: int, longest: int) -> tuple[int, ...]:
        """Return random lengths from 0 to `longest`; a length is 0 with probability 0.15."""
        return tuple(0 if self.chance(0.15) else self.size(longest) for _ in range(sequences))

    def dropout(self) -> dict[str, float]:
        """Return a dict with a dropout probability, or an empty dict."""
        return {"dropout_p": self.one((0.1, 0.1, 0.5, 0.9, 1.0))} if self.chance(0.35) else {}

    def only(self, p: float, **option: Any) -> dict[str, Any]:
        """Return a dict with the option with probability `p`, otherwise an empty dict."""
        return option if self.chance(p) else {}


def _pairs(pick: Pick, head_dim: int) -> dict[str, Any]:
    """Choose the options that every form of attention takes.

    Logits stay within a few units. With larger logits, the error of fp32 depends on the order in
    which a product is summed. The interpreter sums in one chain and torch in several chains, so the
    interpreter's RMS error is 1.3 times that of torch at head dim 64 and 1.6 times at 192. Separate
    tests cover huge logits.
    """
    options = {
        **pick.only(0.25, causal=True),
        **pick.only(0.3, scale=pick.one((1.0, 0.25, -1.0, 0.0)) * head_dim**-0.5),
        **pick.dropout(),
    }
    if pick.chance(0.3):
        sides = (-1, 0, 1, 5, 17, 40)
        options["window"] = pick.one((pick.one(sides[1:]), (pick.one(sides), pick.one(sides))))
    if pick.chance(0.5):
        options["mask"] = pick.one(("padding", "padding", "rows", "k", "bq", "qk", "hk", "bhqk"))
    if pick.chance(0.3):
        # The forms "h" and "bq" are left out, because a number that is added to a whole row of
        # logits changes nothing.
        options["bias"] = pick.one(("hqk", "bhqk", "qk", "bk", "hk"))
        options["bias_gradient"] = pick.chance(0.6)
    return options


def _head_dim(pick: Pick) -> int:
    return pick.size(256, HEAD_DIMS) if pick.chance(0.3) else pick.size(128, HEAD_DIMS)


def free_logits(queries: int, keys: int, causal: bool = False, window: Any = None) -> int:
    """Count the free logits of one head: the logits whose gradients determine the other gradients.

    A row of n visible logits has n − 1 free logits, because the gradients of a row sum to 0.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        causal: As in `ops.attention`.
        window: As in `ops.attention`.

    Returns:
        The number of free logits.

    Examples:
        >>> from fastbert.testing.random_cases import free_logits
        >>> free_logits(3, 3, causal=True)
        3
    """
    left, right = (window, window) if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    free = 0
    for place in range(keys - queries, keys):
        low = max(0, place - left) if left >= 0 else 0
        high = min(keys, place + right + 1) if right >= 0 else keys
        free += max(0, high - low - 1)
    return free


def _batch(pick: Pick) -> tuple[int, int, int, int]:
    """Return random numbers of sequences and heads, a random head dim, and the longest length.

    With this length for all sequences, the case stays within ``LARGEST`` and ``LARGEST_PAIRS``.
    """
    sequences, heads = pick.one(((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)))
    head_dim = _head_dim(pick)
    longest = min(130, LARGEST // (sequences * heads * head_dim))
    if pick.gpu_tiles:
        # Above a head dim of 64, the tiles of fp32 have a quarter of the size.
        pairs = LARGEST_PAIRS // (sequences * heads * (1 if head_dim <= 64 else 4))
        longest = min(longest, int(pairs**0.5))
    return sequences, heads, head_dim, longest


def _until_free(draw: Callable[[], tuple[Any, int]]) -> Any:
    """Call `draw` until its choice has at least ``FEWEST_LOGITS`` free logits; return the choice.

    `draw` returns a choice and the number of its free logits (see `free_logits`).
    """
    while True:
        drawn, free = draw()
        if free >= FEWEST_LOGITS:
            return drawn


def _attention(pick: Pick) -> Options:
    def draw() -> tuple[Options, int]:
        batch, heads, head_dim, longest = _batch(pick)
        queries, keys = pick.size(longest), pick.size(longest)
        queries = keys if pick.chance(0.4) else queries
        options = _pairs(pick, head_dim)
        visible = {name: options[name] for name in ("causal", "window") if name in options}
        options["layout"] = pick.one(("sliced", "sliced", "transposed", "expanded", "offset"))
        options |= pick.only(0.2, logits=4.0 if head_dim <= 64 else 1.0)
        free = batch * heads * free_logits(queries, keys, **visible)
        return ((batch, heads, queries, keys, head_dim), options), free

    (batch, heads, queries, keys, head_dim), options = _until_free(draw)
    if pick.chance(0.02):
        queries, keys = pick.one(((0, keys), (queries, 0), (0, 0)))
    return (batch, heads, queries, keys, head_dim), options


def _attention_varlen(pick: Pick) -> Options:
    def draw() -> tuple[Options, int]:
        sequences, heads, head_dim, longest = _batch(pick)
        options = _pairs(pick, head_dim)
        visible = {name: options[name] for name in ("causal", "window") if name in options}
        lengths = key_lengths = pick.lengths(sequences, longest)
        if pick.chance(0.3):
            options["key_lengths"] = key_lengths = pick.lengths(sequences, longest)
        pairs = zip(lengths, key_lengths, strict=True)
        free = heads * sum(free_logits(queries, keys, **visible) for queries, keys in pairs)
        slack = pick.size(40) if pick.chance(0.3) else 0
        return ((lengths, heads, head_dim, slack), options), free

    return _until_free(draw)


def _attention_qkvpacked(pick: Pick) -> Options:
    while True:
        shape, options = _attention_varlen(pick)
        if "key_lengths" not in options:
            return shape, {**options, **pick.only(0.4, dense=True)}


def _relative_attention(pick: Pick) -> Options:
    def draw() -> tuple[Options, int]:
        batch, heads, head_dim, longest = _batch(pick)
        queries, keys = pick.size(longest), pick.size(longest)
        queries = keys if pick.chance(0.6) else queries
        # With one row, every key of a query has the same term, which changes no result.
        positions = 1 + pick.size(80)
        options = {
            "tables": pick.one(("k", "q", "b", "kq", "kb", "qb", "kqb", "kqb")),
            **pick.only(0.3, segments=True),
            **pick.only(0.3, scale=pick.one((0.5, 0.25, -0.5)) * head_dim**-0.5),
            **pick.only(0.5, mask=pick.one(("padding", "rows", "k", "bq", "qk", "bhqk"))),
            **pick.dropout(),
        }
        if pick.chance(0.5):
            options |= {"packed": True, **pick.only(0.3, slack=pick.size(20))}
        # The first of packed sequences has the greatest length.
        sequences = 1 if "packed" in options else batch
        free = sequences * heads * free_logits(queries, keys)
        return ((batch, heads, queries, keys, head_dim, positions), options), free

    return _until_free(draw)


def _rows(pick: Pick, largest: int = 40) -> int:
    return pick.size(LARGEST_ROWS if pick.gpu_tiles else largest)


def _matrix(pick: Pick) -> tuple[int, int]:
    columns = pick.size(1200, COLUMNS)
    return _rows(pick, max(1, min(40, LARGEST // columns))), columns


def _layer_norm(pick: Pick) -> Options:
    return _matrix(pick), {
        "residual": pick.chance(0.5),
        "x_bias": pick.chance(0.5),
        **pick.dropout(),
        **pick.only(0.3, mean=pick.one((1.0, 100.0))),
        **pick.only(0.3, bias=False),
    }


def _rms_norm(pick: Pick) -> Options:
    return _matrix(pick), {"residual": pick.chance(0.5), **pick.only(0.3, eps=1e-3)}


def _rotary(pick: Pick) -> Options:
    total = pick.size(40, (1, 3, 12, 36))
    head_dim = 2 * pick.size(150, (1, 8, 16, 32, 40, 48, 64, 128))
    tokens = _rows(pick, max(1, min(40, LARGEST // (total * head_dim))))
    heads = pick.one((0, total, 2 * total // 3, pick.random.randint(0, total)))
    return (tokens, total, head_dim, heads), pick.only(0.5, strided=True)


def _product(pick: Pick) -> tuple[int, int, int]:
    return pick.size(130), pick.size(200), pick.size(200)


def _fused_product(pick: Pick) -> tuple[int, int, int]:
    """Choose the sizes of a product with an activation.

    The CUDA C++ kernels multiply only by weights whose sizes are multiples of 8 (see
    `fastbert.ops.fused_products`), so more than half of the cases have such sizes.
    """
    rows, columns, inner = _product(pick)
    if pick.chance(0.6):
        columns, inner = (8 * -(-size // 8) for size in (columns, inner))
    return rows, columns, inner


def _linear(pick: Pick) -> Options:
    return _product(pick), {"bias": pick.chance(0.7)}


def _linear_gelu(pick: Pick) -> Options:
    return _fused_product(pick), {
        "bias": pick.chance(0.7),
        "approximate": pick.one(tuple(APPROXIMATIONS)),
    }


def _feed_forward(pick: Pick) -> Options:
    return _fused_product(pick), {
        "bias": pick.chance(0.7),
        "activation": pick.one(tuple(ACTIVATIONS)),
        **pick.only(0.4, recompute=True),
    }


def _embedding(pick: Pick) -> Options:
    shape = (_rows(pick), pick.size(300), pick.size(400, COLUMNS))
    return shape, {
        **pick.only(0.4, padding_idx=0),
        **pick.dropout(),
        **pick.only(0.3, types=False),
        **pick.only(0.3, positions=False),
        **pick.only(0.3, bias=False),
    }


def _linear_cross_entropy(pick: Pick) -> Options:
    tokens, hidden, vocabulary = pick.size(130), pick.size(100), pick.size(300)
    labelled = pick.one((0.0, 0.15, 0.5, 0.9, 1.0))
    return (tokens, hidden, vocabulary), {
        "labelled": 1.0 if 0.0 < labelled * tokens < FEWEST_LABELLED else labelled,
        "bias": pick.chance(0.7),
        "reduction": pick.one(("mean", "sum", "none")),
    }


def _splade(pick: Pick) -> Options:
    lengths = pick.lengths(1 + pick.size(6), pick.size(40))
    slack = pick.size(20) if pick.chance(0.3) else 0
    shape = (lengths, pick.size(100), pick.size(300), slack)
    return shape, {"bias": pick.chance(0.7), **pick.only(0.3, shift=-2.0)}


GENERATORS: dict[str, Callable[[Pick], Options]] = {
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
# Attention has many options, so it gets six of fifteen cases.
TURNS = (*OPS, "attention", "attention_varlen")


def random_case(op: str, index: int, seed: int = 0) -> Case:
    """Return the case ``random-SEED-INDEX`` of an operation.

    Args:
        op: Name of the operation, one of ``OPS``.
        index: Number of the case.
        seed: Seed of the case.

    Returns:
        The case, which depends only on the arguments.
    """
    pick = Pick(f"{op}/{seed}/{index}")
    shape, options = GENERATORS[op](pick)
    return Case(op, f"random-{seed}-{index}", shape, options, gpu_tiles=pick.gpu_tiles)


def random_cases(n: int, seed: int = 0, op: str | None = None) -> list[Case]:
    """Return random cases of all operations in turn, or of one operation.

    Args:
        n: Number of cases.
        seed: Seed of the cases.
        op: The only operation; None takes the operations in the order of ``TURNS``.

    Returns:
        The cases with the indices 0 to ``n - 1``.
    """
    turns = TURNS if op is None else (op,)
    return [random_case(turns[i % len(turns)], i, seed) for i in range(n)]


def named(name: str, op: str | None) -> Case:
    """Return the random case that has the name `name`.

    Args:
        name: The name, ``random-SEED-INDEX``.
        op: Name of the operation.

    Returns:
        The case.

    Raises:
        ValueError: If `op` is None, or if `name` has another form.

    Examples:
        >>> import torch
        >>> from fastbert.testing.random_cases import named
        >>> named("random-0-5", "linear").command("triton", torch.float32)
        'fastbert check --op linear --case random-0-5 --backend triton --dtype float32'
    """
    match = re.fullmatch(r"random-(\d+)-(\d+)", name)
    if match is None:
        raise ValueError(f"case: got {name!r}, allowed: random-SEED-INDEX")
    if op is None:
        raise ValueError(f"op: got None for {name}, allowed: {', '.join(OPS)}")
    return random_case(op, int(match[2]), int(match[1]))
