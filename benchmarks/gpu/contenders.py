"""The contenders of fastbert: each backend that serves a case, and forced variants of kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.match import Contender
from fastbert import ops
from fastbert.bench import operations, peers
from fastbert.bench.attention_peers import Prepared, leaves, of_function
from fastbert.bench.limits import BACKWARD, FORWARD
from fastbert.ops import backend as backends
from fastbert.testing.cases import Case, Inputs

OURS = "fastbert "
ATTENTION_PATHS = ("short", "general")
GEMM_PATHS = ("fused", "library")


def compiler(device: str, mode: str | None = None) -> Callable[..., Any]:
    """Return ``torch.compile`` for fixed shapes; without a GPU, it only traces."""
    options: dict[str, Any] = {"dynamic": False}
    options |= {"mode": mode} if device == "cuda" else {"backend": "eager"}
    return functools.partial(torch.compile, **options)


def served(case: Case, dtype: torch.dtype, device: str) -> list[str]:
    """Return the backends that serve a case; the reference only if no other backend does."""
    names = operations.served(case, dtype, device)
    return [name for name in names if name != "reference"] or ["reference"]


def ours(case: Case, dtype: torch.dtype, device: str) -> list[Contender]:
    """Return a contender per backend; the name of the default backend ends with a star."""
    chosen = operations.chosen_backend(case, dtype, device)
    return [
        Contender(
            f"{OURS}{name}{'*' if name == chosen else ''}",
            functools.partial(of_function, getattr(ops, case.op), backend=name),
            ours=True,
        )
        for name in served(case, dtype, device)
    ]


def torch_peer(op: str, change: Callable[[Any], Any] | None = None) -> Callable[[Inputs], Prepared]:
    """Return a function that prepares stock PyTorch's ``op``, which ``change`` may compile."""
    function = peers.OPS[op]
    if change is not None:
        function = change(function)
    return lambda inputs: of_function(function, operations.without_seed(inputs))


def stock(op: str, device: str) -> list[Contender]:
    """Return eager and compiled PyTorch as contenders."""
    return [
        Contender("torch eager", torch_peer(op)),
        Contender("torch.compile", torch_peer(op, compiler(device))),
    ]


def runs_triton(device: str) -> bool:
    return device == "cuda" and backends.unavailable("triton", device) is None


def left_out(inputs: Inputs) -> Prepared:
    """Raise the reason to leave out a peer whose compilations would take too long."""
    raise ValueError(
        "left out: it is compiled at the first head dimension only, to keep the section short"
    )


def dense_twin() -> Contender:
    """Return dense attention on a packed batch of equal lengths, to show the cost of packing."""
    return Contender(f"{OURS}layout=dense", _dense_twin, ours=True)


def _dense_twin(inputs: Inputs) -> Prepared:
    batch, length = len(inputs.positional["cu_seqlens_q"]) - 1, inputs.positional["max_seqlen_q"]
    names = ("q", "k", "v")
    dense = {
        # These tensors of shape (B, H, L, D) are views of the packed rows.
        name: inputs.positional[name].unflatten(0, (batch, length)).transpose(1, 2)
        for name in names
    }
    prepared = of_function(ops.attention, Inputs(dense, inputs.keyword, inputs.gradients))
    return prepared._replace(restore=lambda x: x.transpose(1, 2).flatten(0, 1))


def attention_variants(device: str) -> list[Contender]:
    """Return a contender for each path of the Triton kernels, to find the fastest per length."""
    if not runs_triton(device):
        return []
    return [
        Contender(f"{OURS}path={path}", functools.partial(_attention_path, path), ours=True)
        for path in ATTENTION_PATHS
    ]


def _attention_path(path: str, inputs: Inputs) -> Prepared:
    """Prepare calls of the kernels' launchers on a forced path, without the operator."""
    kernels = importlib.import_module("fastbert.kernels.attention")
    ready = leaves(inputs)
    q, k, v = (x.detach() for x in list(ready.positional.values())[:3])
    options: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5,
        "dropout_p": ready.keyword.get("dropout_p", 0.0),
        "seed": ready.keyword.get("dropout_seed"),
        "path": path,
    }
    if "cu_seqlens_q" in ready.positional:
        options |= {name: v for name, v in ready.positional.items() if name not in ("q", "k", "v")}
    if (mask := ready.keyword.get("mask")) is not None:
        options["mask"] = mask[:, None, None, :].expand(*q.shape[:3], k.shape[2])
    saved: list[Tensor] = []

    def run() -> Tensor:
        saved[:] = kernels.attention_forward(q, k, v, **options)
        return saved[0]

    def backward(dout: Tensor) -> Any:
        return kernels.attention_backward(dout, q, k, v, *saved, **options)

    return Prepared(run, [q, k, v], backward=backward)


def gemm_variants(op: str, direction: str, device: str) -> list[Contender]:
    """Return contenders for the fused kernel and for a library GEMM with a second pass.

    Without Triton, or for another operation or direction, the result is empty.
    """
    prepare = {
        ("linear_gelu", FORWARD): _linear_gelu_path,
        ("feed_forward", BACKWARD): _feed_forward_path,
    }.get((op, direction))
    if prepare is None or not runs_triton(device):
        return []
    return [
        Contender(f"{OURS}path={path}", functools.partial(prepare, path), ours=True)
        for path in GEMM_PATHS
    ]


def _linear_gelu_path(path: str, inputs: Inputs) -> Prepared:
    kernels = importlib.import_module("fastbert.kernels.feed_forward")
    x, weight, bias = (t.detach() for t in inputs.positional.values())
    options = {"activation": "gelu", "save": False, "path": path}
    return Prepared(lambda: kernels.linear_gelu_forward(x, weight, bias, **options)[0], [])


def _feed_forward_path(path: str, inputs: Inputs) -> Prepared:
    """Prepare the backward pass; ``path`` selects the product that applies GELU's derivative."""
    kernels = importlib.import_module("fastbert.kernels.feed_forward_backward")
    sum_rows = importlib.import_module("fastbert.kernels.reduction").sum_rows
    x, w1, b1, w2, b2 = (t.detach() for t in inputs.positional.values())
    h = F.linear(x, w1, b1)

    def backward(dy: Tensor) -> Any:
        dh, db1, a = kernels.feed_forward_backward(dy, w2, h, activation="gelu", path=path)
        return dh @ w1, dh.t() @ x, db1, dy.t() @ a, sum_rows(dy, b2.dtype)

    return Prepared(lambda: F.linear(F.gelu(h), w2, b2), [], backward=backward)
