"""Run every launcher on tensors whose rows are more than 2**31 elements apart.

    python tests/kernels/far_tensors.py attention

test_large_offsets.py runs this program. The tensors are in a private memory mapping without
reservation, so only pages that hold rows occupy memory. The results must have the same bits as for
contiguous tensors with equal elements.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

FAR = 2**31
NORESERVE = 0x4000


def spread(x: Tensor, dim: int) -> Tensor:
    """Copy x to a mapping where the last slice along ``dim`` is FAR elements after the first."""
    # The stride is a multiple of 16, as in real tensors.
    stride = FAR // (x.shape[dim] - 1) // 16 * 16 + 16
    strides = list(torch.empty(x.select(dim, 0).shape, device="meta").stride())
    strides.insert(dim, stride)
    elements = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True))
    assert elements > FAR
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    pages = mmap.mmap(-1, elements * x.element_size(), flags=flags)
    return torch.frombuffer(pages, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def flat(results) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [t for part in results if part is not None for t in flat(part)]


def check(name: str, function, tensors: dict[str, Tensor], dims: dict[str, tuple[int, ...]]):
    """Check that spreading each tensor in ``dims`` along its listed dimensions changes no bit."""
    near = [t.clone() for t in flat(function(**tensors))]
    for argument, along in dims.items():
        for dim in along:
            far = spread(tensors[argument], dim)
            got = flat(function(**{**tensors, argument: far}))
            for a, b in zip(near, got, strict=True):
                assert torch.equal(a, b), f"{name}: {argument} spread along {dim}"


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def attention() -> None:
    from fastbert.kernels.attention import attention_backward, attention_forward
    from fastbert.kernels.attention_weights import attention_weights

    def both(q, k, v, dout, bias, **options):
        bias_view = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        dbias = torch.empty(bias.shape, dtype=bias.dtype)
        out, lse = attention_forward(q, k, v, bias=bias_view, scale=0.5, **options)
        gradients = attention_backward(
            dout, q, k, v, out, lse, bias=bias_view, scale=0.5, dbias=dbias, **options
        )
        weights = attention_weights(q, k, lse, bias=bias_view, scale=0.5)
        return out, gradients, dbias, weights

    tensors = {name: half(1, 2, 20, 16) for name in ("q", "k", "v", "dout")}
    rows = dict.fromkeys(tensors, (1, 2))
    bias = half(1, 2, 20, 20)
    check("attention", both, {**tensors, "bias": bias}, {**rows, "bias": (1, 2)})

    def plain(q, k, v, dout, out):
        _, lse = attention_forward(q, k, v, scale=0.5)
        return attention_backward(dout, q, k, v, out, lse, scale=0.5)

    out, lse = attention_forward(*list(tensors.values())[:3], scale=0.5)
    check("attention backward", plain, {**tensors, "out": out}, {"out": (1, 2), "dout": (2,)})

    into = tuple(spread(torch.zeros(1, 2, 20, 16).half(), 2) for _ in range(3))
    given = (tensors["dout"], *list(tensors.values())[:3], out, lse)
    near = attention_backward(*given, scale=0.5)
    for a, b in zip(near, attention_backward(*given, scale=0.5, into=into), strict=True):
        assert torch.equal(a, b), "gradients written far apart"

    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)

    def packed(q, k, v, dout):
        out, lse = attention_forward(q, k, v, scale=0.5, cu_seqlens_q=bounds)
        gradients = attention_backward(dout, q, k, v, out, lse, scale=0.5, cu_seqlens_q=bounds)
        return out, gradients

    tensors = {name: half(20, 2, 16) for name in ("q", "k", "v", "dout")}
    check("packed attention", packed, tensors, dict.fromkeys(tensors, (0, 1)))


def norms() -> None:
    from fastbert.kernels.embedding import embedding_backward, embedding_forward
    from fastbert.kernels.layer_norm import layer_norm_backward, layer_norm_forward
    from fastbert.kernels.reduction import sum_rows
    from fastbert.kernels.rms_norm import rms_norm_backward, rms_norm_forward
    from fastbert.kernels.rotary import rotary_backward, rotary_forward

    ones = torch.ones(64)

    def layer_norm(x, residual, dy):
        y, mean, rstd = layer_norm_forward(x, ones, ones, residual=residual, eps=1e-12)
        return y, layer_norm_backward(dy, x, ones, mean, rstd, residual=residual)

    def rms_norm(x, residual, dy):
        y, rstd = rms_norm_forward(x, ones, residual=residual, eps=1e-6)
        return y, rms_norm_backward(dy, x, ones, rstd, residual=residual)

    angles = torch.rand(9, 32) * 6

    def rotary(x, dy):
        given = {"cos": angles.cos(), "sin": angles.sin(), "heads": 2}
        return rotary_forward(x, **given), rotary_backward(dy, **given)

    tensors = {name: half(9, 3, 64) for name in ("x", "dy")}
    check("rotary", rotary, tensors, dict.fromkeys(tensors, (0, 1, 2)))

    tensors = {name: half(9, 64) for name in ("x", "residual", "dy")}
    rows = {"x": (0,), "residual": (0,), "dy": (0, 1)}
    check("layer_norm", layer_norm, tensors, rows)
    check("rms_norm", rms_norm, tensors, rows)
    check("sum_rows", lambda x: sum_rows(x, x.dtype), {"x": half(9, 64)}, {"x": (0, 1)})

    ids, types, positions = torch.randint(0, 7, (9,)), torch.arange(9) % 2, torch.arange(9)
    ids[0], ids[1] = 6, 0

    def embedding(words, types_table, position_table, dy, ids):
        given = (ids, types, positions), (words, types_table, position_table), ones
        y, mean, rstd = embedding_forward(*given, ones, eps=1e-12)
        return y, embedding_backward(dy, *given, mean, rstd)

    tables = {"words": half(7, 64), "types_table": half(2, 64), "position_table": half(9, 64)}
    dims = {**dict.fromkeys(tables, (0,)), "dy": (0, 1), "ids": (0,)}
    check("embedding", embedding, {**tables, "dy": half(9, 64), "ids": ids}, dims)


def products() -> None:
    from fastbert.kernels.cross_entropy import linear_cross_entropy_forward
    from fastbert.kernels.cross_entropy_backward import linear_cross_entropy_backward
    from fastbert.kernels.feed_forward import activation_forward, linear_gelu_forward
    from fastbert.kernels.feed_forward_backward import activation_backward, feed_forward_backward
    from fastbert.kernels.splade import splade_forward
    from fastbert.kernels.splade_backward import splade_backward

    for activation in ("gelu", "geglu"):
        options = {"activation": activation}

        def linear(x, weight, options=options):
            return linear_gelu_forward(x, weight, None, save=True, path="fused", **options)

        def backward(dy, weight, h, options=options):
            return feed_forward_backward(dy, weight, h, path="fused", **options)

        def elementwise(da, h, options=options):
            return activation_forward(h, **options), activation_backward(da, h, **options)

        width = 32 if activation == "geglu" else 16
        both = (0, 1)
        tensors = {"x": half(9, 24), "weight": half(width, 24)}
        check("linear_gelu", linear, tensors, {"x": both, "weight": both})
        tensors = {"dy": half(9, 24), "weight": half(24, 16), "h": half(9, width)}
        check("feed_forward", backward, tensors, dict.fromkeys(tensors, both))
        tensors = {"da": half(9, 16), "h": half(9, width)}
        check("gelu", elementwise, tensors, dict.fromkeys(tensors, both))

    labels = torch.tensor([3, -100, 0, 12, 5, -100, 7, 1, 10])
    dloss = torch.ones(())

    def cross_entropy(hidden, weight, labels):
        options = {"reduction": "mean"}
        given = hidden, weight, None, labels
        loss, *saved = linear_cross_entropy_forward(*given, ignore_index=-100, **options)
        return loss, linear_cross_entropy_backward(dloss, *given, *saved, **options)

    tensors = {"hidden": half(9, 24), "weight": half(13, 24), "labels": labels}
    dims = {"hidden": (0, 1), "weight": (0, 1), "labels": (0,)}
    check("cross entropy", cross_entropy, tensors, dims)

    ends = torch.tensor([0, 2, 9], dtype=torch.int32)

    def splade(hidden, weight, dy):
        y, logits, rows = splade_forward(hidden, weight, None, ends, save=True)
        return y, splade_backward(dy, hidden, weight, None, ends, logits, rows)

    tensors = {"hidden": half(9, 24), "weight": half(13, 24), "dy": half(2, 13)}
    check("splade", splade, tensors, dict.fromkeys(tensors, (0, 1)))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    {"attention": attention, "norms": norms, "products": products}[sys.argv[1]]()
    print("same")
