"""The launches that the ahead-of-time check compiles: representative calls of every Triton kernel.

All tensors are on the device meta. Each function of `LAUNCHES` yields the launches of one kernel
file, with sizes, dtypes and options of BERT-like models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastbert.activations import ACTIVATIONS
from fastbert.kernels import (
    attention,
    attention_backward,
    attention_short,
    cross_entropy,
    cross_entropy_backward,
    embedding,
    feed_forward,
    feed_forward_backward,
    layer_norm,
    reduction,
    relative_attention,
    relative_attention_backward,
    rms_norm,
    rotary,
    splade,
    splade_backward,
    tiles,
)
from fastbert.kernels.attention_bias import allocate_bias_sums
from fastbert.kernels.attention_problem import allocate_rows, canonical, problem_of
from fastbert.kernels.attention_statistics import allocate_statistics
from fastbert.kernels.attention_weights import weights_launch
from fastbert.kernels.launch import Launch
from fastbert.kernels.relative_tables import allocate_sums
from fastbert.kernels.relative_terms import relative_inputs, relative_problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, HEADS = 8, 12
VOCABULARY = 30522

# The columns are dtype, head dim, whether packed, and options. Each kind of option occurs at least
# once.
ATTENTION: tuple[tuple[torch.dtype, int, bool, dict[str, Any]], ...] = (
    (BF16, 64, True, {}),
    (BF16, 64, False, {}),
    (FP16, 64, True, {}),
    (BF16, 32, True, {}),
    (BF16, 128, True, {}),
    (FP32, 64, False, {}),
    (BF16, 64, True, {"window": (64, 64)}),
    (FP16, 64, True, {"dropout_p": 0.1}),
    (BF16, 64, False, {"mask": "keys", "dropout_p": 0.1}),
    (BF16, 64, False, {"mask": "keys", "bias": True}),
    (BF16, 32, True, {"window": (64, 64)}),
    (BF16, 80, True, {"causal": True}),
    (BF16, 128, False, {"mask": "pairs", "dropout_p": 0.1}),
    (BF16, 256, False, {"window": (128, 128)}),
    (FP32, 64, True, {"dropout_p": 0.1}),
    (FP32, 256, False, {"bias": True, "causal": True}),
)

# The columns are dtype, head dim, longest sequence, whether packed, and options.
ATTENTION_SHORT: tuple[tuple[torch.dtype, int, int, bool, dict[str, Any]], ...] = (
    (BF16, 64, 64, True, {}),
    (FP16, 64, 128, True, {}),
    (BF16, 64, 128, True, {"dropout_p": 0.1}),
    (BF16, 32, 128, True, {}),
    (BF16, 64, 64, False, {"mask": "keys", "dropout_p": 0.1}),
    (FP16, 64, 128, True, {"dropout_p": 0.1}),
    (BF16, 64, 128, True, {}),
    (BF16, 64, 128, False, {}),
    (BF16, 64, 128, False, {"dropout_p": 0.1}),
    (BF16, 64, 128, False, {"mask": "keys", "dropout_p": 0.1}),
    (BF16, 32, 128, True, {"window": (64, 64)}),
    (BF16, 64, 256, True, {}),
    (BF16, 32, 256, False, {}),
    (BF16, 64, 512, True, {}),
)

# The columns are dtype, head dim, whether packed, the tables as in ``cases.py``, whether there are
# segments, and options as in `ATTENTION`.
RELATIVE_ATTENTION: tuple[tuple[torch.dtype, int, bool, str, bool, dict[str, Any]], ...] = (
    (BF16, 64, True, "kq", False, {}),
    (FP16, 64, False, "kb", True, {"mask": "keys", "dropout_p": 0.1}),
    (BF16, 64, True, "b", False, {}),
    (BF16, 64, False, "kqb", True, {"mask": "pairs", "dropout_p": 0.1}),
    (BF16, 32, True, "kq", False, {}),
    (BF16, 128, False, "kqb", True, {"mask": "pairs", "dropout_p": 0.1}),
    (BF16, 256, False, "kq", False, {"mask": "keys"}),
    (FP32, 64, False, "kq", False, {"mask": "keys", "dropout_p": 0.1}),
    (FP32, 64, True, "kqb", True, {"dropout_p": 0.1}),
)

# The columns are number of rows, dtype and activation.
FEED_FORWARD = (
    (4096, BF16, "gelu"),
    (4096, BF16, "geglu"),
    (4096, FP16, "gelu_tanh"),
    (4096, BF16, "relu"),
    (4096, BF16, "silu"),
    (4096, BF16, "swiglu"),
    (128, BF16, "gelu"),
    (16, BF16, "gelu"),
    (16, BF16, "geglu"),
    (4096, FP32, "gelu"),
    (4096, FP32, "swiglu"),
)


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention_inputs(
    dtype: torch.dtype, head_dim: int, length: int, is_packed: bool, options: dict[str, Any]
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Return q, k and v, the log-sum-exp, and the other arguments of `attention_forward`.

    The options have the form of the options in `ATTENTION`.
    """
    options = {"scale": 0.125, "seed": _empty(torch.int64, 1), **options}
    # q, k and v are slices of one fused projection, as in the model.
    heads = list(_empty(dtype, BATCH * length, 3, HEADS, head_dim).unbind(1))
    if is_packed:
        lse = _empty(FP32, HEADS, BATCH * length)
        options["cu_seqlens_q"] = _empty(torch.int32, BATCH + 1)
        options["max_seqlen_q"] = options["max_seqlen_k"] = length
    else:
        heads = [x.view(BATCH, length, HEADS, head_dim).transpose(1, 2) for x in heads]
        lse = _empty(FP32, BATCH, HEADS, length)
    pairs = (BATCH, HEADS, length, length)
    if mask := options.pop("mask", None):
        rows = 1 if mask == "keys" else length
        options["mask"] = _empty(torch.bool, BATCH, 1, rows, length).expand(pairs)
    if options.pop("bias", False):
        options["bias"] = _empty(dtype, 1, HEADS, length, length).expand(pairs)
    return heads, lse, options


def _attention() -> Iterator[Launch]:
    for dtype, head_dim, is_packed, wanted in ATTENTION:
        (q, k, v), lse, options = _attention_inputs(dtype, head_dim, 512, is_packed, wanted)
        tensors, numbers = canonical(q, k, v, **options)
        problem = problem_of(*tensors, numbers)
        yield attention.general_forward_launch(problem, allocate_rows(q, is_packed), lse)
        dbias = sums = None
        if (bias := options.get("bias")) is not None:
            dbias = _empty(dtype, 1, *bias.shape[1:])
            sums = allocate_bias_sums(q, bias, dbias, numbers)
        gradients = (allocate_rows(x, is_packed) for x in (q, k, v))
        statistics = allocate_statistics(problem.arguments["SCALING"], lse)
        yield from attention_backward.backward_launches(
            problem, q, q, lse, *gradients, statistics, numbers, dbias, sums
        )
        if wanted.get("mask") == "keys":
            yield weights_launch(problem, lse, _empty(dtype, BATCH, HEADS, 512, 512))


def _attention_short() -> Iterator[Launch]:
    for dtype, head_dim, length, is_packed, wanted in ATTENTION_SHORT:
        (q, k, v), lse, options = _attention_inputs(dtype, head_dim, length, is_packed, wanted)
        tensors, numbers = canonical(q, k, v, **options)
        problem = problem_of(*tensors, numbers)
        out, dq, dk, dv = (allocate_rows(x, is_packed) for x in (q, q, k, v))
        shape = ("forward", length, head_dim, dtype, tiles.target_of(q))
        if tiles.short_attention_obstacle(*shape) is None:
            yield attention_short.short_forward_launch(problem, out, lse)
        if attention_short.serves(problem, "backward", None):
            yield attention_short.short_backward_launch(problem, out, out, lse, dq, dk, dv)


def _projection(dtype: torch.dtype, depth: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return tensors for a cross entropy: (hidden, weight, bias, labels), row order, statistics."""
    given = (
        _empty(dtype, 4096, depth),
        _empty(dtype, VOCABULARY, depth),
        _empty(dtype, VOCABULARY),
        _empty(torch.int64, 4096),
    )
    return given, _empty(torch.int32, 4097), _empty(FP32, 2, 4096)


def _cross_entropy() -> Iterator[Launch]:
    for dtype, depth in ((BF16, 768), (FP32, 1024)):
        given, order, statistics = _projection(dtype, depth)
        partials = _empty(FP32, 2, cross_entropy.Projection(*given).splits, 4096)
        own = losses = statistics[0]
        launches = cross_entropy.forward_launches(
            *given, order, partials, own, statistics, losses, losses[:1], -100, True
        )
        # Only the second launch depends on the dtype.
        yield from launches if dtype == BF16 else launches[1:2]


def _cross_entropy_backward() -> Iterator[Launch]:
    for dtype, depth in ((BF16, 768), (FP32, 1024)):
        given, order, statistics = _projection(dtype, depth)
        hidden, weight, bias, _ = given
        columns = cross_entropy_backward.chunk_columns(cross_entropy.Projection(*given))
        dlogits, partials = _empty(dtype, 4096, columns), _empty(FP32, 32, columns)
        sums = _empty(FP32, *hidden.shape)
        launches = cross_entropy_backward.backward_launches(
            statistics[0], *given, statistics, order,
            dlogits, partials, sums, hidden, weight, bias, False,
        )  # fmt: skip
        # These are the launches of the second chunk, which is neither the first nor the last.
        dlogits_launch, dbias_launch, dweight_launch, dhidden_launch = launches[4:8]
        if dtype == BF16:
            yield dbias_launch
        yield from (dlogits_launch, dweight_launch, dhidden_launch)


def _embedding() -> Iterator[Launch]:
    for dtype, columns, complete in (
        (BF16, 1024, True),
        # This launch has the word table alone, and a norm without a bias.
        (BF16, 768, False),
        (FP32, 8192, True),
    ):
        sizes = (VOCABULARY, 2, 512) if complete else (VOCABULARY, None, None)
        tables = [None if rows is None else _empty(dtype, rows, columns) for rows in sizes]
        indices = [None if table is None else _empty(torch.int64, 4096) for table in tables]
        y, row = _empty(dtype, 4096, columns), _empty(FP32, columns)
        bias = row if complete else None
        statistic, seed = _empty(FP32, 4096), _empty(torch.int64, 1)
        partials = _empty(FP32, 2, 396, columns)
        yield embedding.forward_launch(
            *indices, *tables, row, bias, seed, y, statistic, statistic, 0.1, 1e-12
        )
        yield embedding.backward_launch(
            y, *indices, *tables, row, statistic, statistic, seed, y, partials, complete, 0.1
        )
        entries = (3 if complete else 1) * 4096
        keys, order = _empty(torch.int32, entries), _empty(torch.int64, entries)
        yield from embedding.table_launches(y, keys, order, partials, *tables)
        yield embedding.keys_launch(*indices, *tables, keys, 0)


def _feed_forward() -> Iterator[Launch]:
    for rows, dtype, name in FEED_FORWARD:
        activation = ACTIVATIONS[name]
        x, a = _empty(dtype, rows, 768), _empty(dtype, rows, 3072)
        h = _empty(dtype, rows, 6144) if activation.gated else a
        weight = _empty(dtype, h.shape[1], 768)
        saved = h if rows == 4096 else None
        yield feed_forward.linear_activation_launch(x, weight, weight[:, 0], a, saved, activation)
        if _without_product(rows, dtype, name):
            yield feed_forward.activation_launch(h, a, activation)


def _feed_forward_backward() -> Iterator[Launch]:
    for rows, dtype, name in FEED_FORWARD:
        activation = ACTIVATIONS[name]
        dy, a = _empty(dtype, rows, 768), _empty(dtype, rows, 3072)
        h = _empty(dtype, rows, 6144) if activation.gated else a
        weight, partials = _empty(dtype, 768, 3072), _empty(FP32, 64, h.shape[1])
        yield feed_forward_backward.linear_activation_gradient_launch(
            dy, weight, h, h, a, partials, activation
        )
        if _without_product(rows, dtype, name):
            yield feed_forward_backward.activation_gradient_launch(a, h, h, a, partials, activation)


def _without_product(rows: int, dtype: torch.dtype, name: str) -> bool:
    """Return whether the kernel of the activation alone is compiled for a row of `FEED_FORWARD`."""
    return name in ("gelu", "geglu") and rows == 4096 and dtype == BF16


def _layer_norm() -> Iterator[Launch]:
    for dtype, columns, has_bias in (
        (FP16, 384, True),
        # Rows of 768 columns use the same binary.
        (BF16, 1024, True),
        (BF16, 1024, False),
        (FP32, 1024, True),
        (BF16, 4096, True),
        (FP32, 8192, True),
    ):
        x, row = _empty(dtype, 512, columns), _empty(FP32, columns)
        statistic, seed = _empty(FP32, 512), _empty(torch.int64, 1)
        partials = _empty(FP32, 3, 396, columns)
        bias = row if has_bias else None
        yield layer_norm.forward_launch(
            x, row, bias, x, row, seed, x, statistic, statistic, 0.1, 1e-12
        )
        yield layer_norm.backward_launch(
            x, x, row, statistic, statistic, x, row, seed, x, x, partials, has_bias, 0.1
        )


def _reduction() -> Iterator[Launch]:
    for dtype in (BF16, FP32):
        x, partials = _empty(dtype, 4096, 2304), _empty(FP32, 1, 32, 2304)
        yield reduction.partial_sums_launch(x, partials[0])
        yield reduction.sum_partials_launch(partials, x[0])


def _relative_attention() -> Iterator[Launch]:
    for dtype, head_dim, is_packed, letters, has_segments, wanted in RELATIVE_ATTENTION:
        length, positions = 512, 1023
        (q, k, v), _, options = _attention_inputs(dtype, head_dim, length, is_packed, wanted)
        table = _empty(dtype, positions, HEADS, head_dim)
        tables = {
            "position_keys": table if "k" in letters else None,
            "position_queries": table if "q" in letters else None,
            "position_bias": table[:, :, 0].contiguous() if "b" in letters else None,
        }
        if has_segments:
            segments = _empty(torch.int64, *((BATCH * length,) if is_packed else (BATCH, length)))
            options |= {"q_segments": segments, "k_segments": segments}
            options["segment_scores"] = _empty(dtype, *q.shape[:-1])
        index = _empty(torch.int32, 2 * length - 1)
        inputs, numbers = relative_inputs(q, k, v, index, **tables, **options)
        problem = relative_problem(inputs, numbers)
        yield relative_attention.forward_launch(problem, allocate_rows(q, is_packed))
        if not is_packed:
            weights = _empty(dtype, BATCH, HEADS, length, length)
            yield relative_attention.weights_launch(problem, weights)
        gradients = [allocate_rows(x, is_packed) for x in (q, k, v)]
        statistics = relative_attention_backward.allocate_statistics(problem)
        yield from relative_attention_backward.backward_launches(
            problem, q, *gradients, inputs.segment_scores, statistics,
            tuple(tables.values()), allocate_sums(problem),
        )  # fmt: skip


def _rms_norm() -> Iterator[Launch]:
    for dtype, columns in ((BF16, 768), (FP32, 8192)):
        x, row, rstd = _empty(dtype, 512, columns), _empty(FP32, columns), _empty(FP32, 512)
        yield rms_norm.forward_launch(x, row, x, x, rstd, 1e-6)
        yield rms_norm.backward_launch(x, x, row, rstd, x, x, _empty(FP32, 396, columns))


def _rotary() -> Iterator[Launch]:
    for dtype, head_dim in ((BF16, 64), (FP16, 96), (FP32, 256)):
        x, angles = _empty(dtype, 512, 36, head_dim), _empty(FP32, 512, head_dim // 2)
        for name in ("rotary_forward", "rotary_backward"):
            yield rotary.rotary_launch(x, angles, angles, x, name, 24)


def _splade_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return hidden, weight, bias, cu_seqlens, y, logits and rows."""
    results = (_empty(kind, BATCH, VOCABULARY) for kind in (dtype, FP32, torch.int32))
    hidden, weight = _empty(dtype, 4096, 768), _empty(dtype, VOCABULARY, 768)
    return hidden, weight, _empty(dtype, VOCABULARY), _empty(torch.int32, BATCH + 1), *results


def _splade() -> Iterator[Launch]:
    for dtype, saves in ((BF16, False), (BF16, True), (FP32, True)):
        *given, y, logits, rows = _splade_inputs(dtype)
        yield splade.forward_launch(*given, y, *((logits, rows) if saves else (None, None)))


def _splade_backward() -> Iterator[Launch]:
    for dtype in (BF16, FP32):
        hidden, weight, bias, ends, dy, logits, rows = _splade_inputs(dtype)
        head = splade_backward.Head(hidden, weight, ends)
        tiles_of_tokens = _empty(torch.int32, splade_backward.TILE_FIELDS, head.tiles)
        dweight, lists, dhidden = splade_backward.backward_launches(
            dy, hidden, weight, ends, logits, rows, rows, tiles_of_tokens, hidden, weight, bias
        )
        # The lists do not depend on the dtype.
        yield from (dweight, lists, dhidden) if dtype == BF16 else (dweight, dhidden)


# A key is the stem of a kernel file. Its value is a function that yields the file's launches, for
# the architecture `kernels.tiles.compiled_target`.
LAUNCHES: dict[str, Callable[[], Iterator[Launch]]] = {
    "attention": _attention,
    "attention_short": _attention_short,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "embedding": _embedding,
    "feed_forward": _feed_forward,
    "feed_forward_backward": _feed_forward_backward,
    "layer_norm": _layer_norm,
    "reduction": _reduction,
    "relative_attention": _relative_attention,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "splade": _splade,
    "splade_backward": _splade_backward,
}


def all_launches() -> Iterator[Launch]:
    """Yield the launches of all kernel files."""
    for launches in LAUNCHES.values():
        yield from launches()
