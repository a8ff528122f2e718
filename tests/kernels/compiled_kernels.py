"""Check compiled Triton kernels for properties that Triton's interpreter cannot show.

The program ``python compiled_kernels.py 90`` runs the kernels for sm_90 on the PTX machine, and
prints the findings of each check in `CHECKS` as JSON. A check without findings has passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from fastbert import ops
from fastbert.kernels import tiles
from fastbert.kernels.attention import attention_backward, attention_forward
from fastbert.kernels.launch import Launch
from fastbert.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from fastbert.kernels.rms_norm import rms_norm_forward
from fastbert.ops import backend
from fastbert.testing.ahead_of_time import identity
from fastbert.testing.parity import check_case, plan
from fastbert.testing.ptx.triton_launches import STAND_IN, emulated

HALF_AND_SINGLE = (torch.float16, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def fused_products() -> Iterator[None]:
    """Let the compiler fuse multiplications with additions in the kernels of the ``with`` block."""
    options = Launch.options
    with mock.patch.object(Launch, "options", lambda launch: {**options(launch), **FUSED}):
        yield


FUSED = {"enable_fp_fusion": True}


def gradients_of_one_column(arch: int) -> Iterator[float]:
    """Yield the largest gradient of one-column layer norms, by dtype; the exact gradient is 0."""
    for dtype in HALF_AND_SINGLE:
        x, dy = random(40, 1, dtype=dtype), random(40, 1, dtype=dtype, seed=1)
        weight, bias = random(1, seed=2), random(1, seed=3)
        with emulated(arch):
            _, mean, rstd = layer_norm_forward(x, weight, bias, eps=1e-12)
            dx = layer_norm_backward(dy, x, weight, mean, rstd)[0]
        yield dx.abs().max().item()


def cancellation(arch: int) -> list[str]:
    """Check that the gradient of one-column rows is 0, but is not 0 if products are fused."""
    findings = [f"gradient {dx}, expected 0" for dx in gradients_of_one_column(arch) if dx != 0.0]
    with fused_products():
        if not any(gradients_of_one_column(arch)):
            findings.append("the gradient is 0 with fused products too")
    return findings


def lanes_that_store_the_same_row(arch: int) -> list[str]:
    """Check that two lanes compute equal sums of a row, but unequal sums if products are fused."""

    def run() -> None:
        for columns in (16, 24):
            for dtype in HALF_AND_SINGLE:
                x, weight = random(40, columns, dtype=dtype), random(columns, seed=2)
                with emulated(arch):
                    _, mean, rstd = layer_norm_forward(x, weight, None, eps=1e-12)
                    layer_norm_backward(x, x, weight, mean, rstd, has_bias=False)

    findings = []
    try:
        run()
    except RuntimeError as error:
        findings.append(str(error))
    with fused_products():
        try:
            run()
        except RuntimeError as error:
            if "two values" not in str(error):
                findings.append(str(error))
        else:
            findings.append("fused products do not make lanes disagree")
    return findings


def approximations(arch: int) -> list[str]:
    """Check that fp32 is within tolerance if approximate instructions have their largest error."""
    findings = []
    for op in (
        *("attention", "layer_norm", "rms_norm", "linear_gelu", "linear_cross_entropy", "splade"),
    ):
        for case, name, dtype, device in plan(op, "triton", torch.float32, None, quick=True):
            for error in (-1.0, 1.0):
                with emulated(arch, approximate=error, races=False):
                    results = check_case(case, name, dtype, device)
                findings += [f"{case.name}, {error:+}: {r}" for r in results if not r.passed]
    return findings


def rows_in_any_batch(arch: int) -> list[str]:
    """Check that a row or a sequence has the same bits alone and in a batch."""
    findings = []
    for dtype in HALF_AND_SINGLE:
        for columns in (24, 768):
            x, weight = random(9, columns, dtype=dtype), random(columns, seed=2)
            for forward in (layer_norm_forward, rms_norm_forward):
                given = (weight, weight) if forward is layer_norm_forward else (weight,)
                with emulated(arch):
                    batch = forward(x, *given, eps=1e-6)[0]
                    alone = torch.cat([forward(row, *given, eps=1e-6)[0] for row in x.split(1)])
                if not torch.equal(batch, alone):
                    findings.append(f"{forward.__name__} {dtype} {columns}")
        q, k, v = random(3, 70, 2, 32, dtype=dtype).unbind(0)
        lengths = (40, 1, 29)
        ends = torch.tensor([0, 40, 41, 70], dtype=torch.int32)
        for path in ("general", "short") if dtype == torch.float16 else ("general",):
            options = {"scale": 32**-0.5, "path": path}
            with emulated(arch):
                batch = attention_forward(
                    q, k, v, cu_seqlens_q=ends, max_seqlen_q=40, max_seqlen_k=40, **options
                )[0]
                alone = [
                    attention_forward(
                        *(x[end - length : end].transpose(0, 1)[None] for x in (q, k, v)), **options
                    )[0][0].transpose(0, 1)
                    for end, length in zip(ends[1:].tolist(), lengths, strict=True)
                ]
            if not torch.equal(batch, torch.cat(alone)):
                findings.append(f"attention {path} {dtype}")
    return findings


def reruns(arch: int) -> list[str]:
    """Check that the gradients of attention have the same bits in any execution order of warps."""
    findings = []
    for dtype in HALF_AND_SINGLE:
        for path in ("general", "short") if dtype == torch.float16 else ("general",):
            q, k, v, dout = random(4, 2, 2, 40, 32, dtype=dtype).unbind(0)
            seed = torch.tensor([7])
            options = {"scale": 32**-0.5, "path": path, "seed": seed, "dropout_p": 0.1}
            results = []
            for order in range(3):
                with emulated(arch, seed=order):
                    out, lse = attention_forward(q, k, v, **options)
                    gradients = attention_backward(dout, q, k, v, out, lse, **options)
                results.append([out, lse, *gradients])
            for again in results[1:]:
                if not all(map(torch.equal, results[0], again)):
                    findings.append(f"attention {path} {dtype}")
    return findings


def one_binary_for_all_lengths(arch: int) -> list[str]:
    """Check that batches of 48 and 49 tokens run the same binaries."""
    binaries: list[dict[str, set[str]]] = []
    for tokens in (48, 49):
        binaries.append({})
        with mock.patch.object(Launch, "run", _recorder(binaries[-1])):
            for dtype in HALF_AND_SINGLE:
                _every_packed_operation(tokens, dtype)
    names = {name for launches in binaries for name in launches}
    return [name for name in sorted(names) if binaries[0].get(name) != binaries[1].get(name)]


def _recorder(binaries: dict[str, set[str]]):
    def record(launch: Launch, on: Tensor) -> None:
        binaries.setdefault(launch.name, set()).add(identity(launch))

    return record


def _every_packed_operation(tokens: int, dtype: torch.dtype) -> None:
    """Call every operation on packed rows, forward and backward, without running a kernel."""

    def leaf(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    rows, weight = leaf(tokens, 64), leaf(64)
    ends = torch.tensor([0, 20, tokens], dtype=torch.int32)
    ids = torch.zeros(tokens, dtype=torch.int64)
    q, k, v = (leaf(tokens, 2, 32) for _ in range(3))
    results = [
        ops.attention_varlen(q, k, v, ends, max_seqlen_q=length, max_seqlen_k=length, **options)
        for length in (48, 300)
        for options in ({}, {"dropout_p": 0.1}, {"bias": leaf(1, 2, length, length)})
    ]
    results += [
        ops.layer_norm(rows, weight, weight, residual=rows, x_bias=weight, dropout_p=0.1),
        ops.rms_norm(rows, weight),
        ops.embedding(ids, ids, ids, leaf(50, 64), leaf(2, 64), leaf(64, 64), weight, weight),
        ops.feed_forward(rows, leaf(128, 64), leaf(128), leaf(64, 128), leaf(64)),
        ops.linear_cross_entropy(rows, leaf(200, 64), leaf(200), ids),
        ops.linear_cross_entropy(rows, leaf(200, 64), leaf(200), ids, reduction="none"),
        ops.splade(rows, leaf(200, 64), leaf(200), cu_seqlens=ends),
    ]
    for result in results:
        result.backward(torch.zeros_like(result))


CHECKS = (
    cancellation,
    lanes_that_store_the_same_row,
    approximations,
    rows_in_any_batch,
    reruns,
    one_binary_for_all_lengths,
)


def main() -> None:
    arch = int(sys.argv[1])
    torch.set_num_threads(1)
    tiles.compiled_target = arch
    # With this default backend, calls with CPU tensors launch Triton kernels on the PTX machine.
    default = mock.patch.object(backend, "DEFAULT_REQUEST", "triton")
    with default, backend.standing_in(STAND_IN, "triton"):
        print(json.dumps({check.__name__: check(arch) for check in CHECKS}))


if __name__ == "__main__":
    main()
