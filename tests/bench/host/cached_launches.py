"""Compare cached kernel launches on the mocked GPU with launches that Triton prepares each time.

``test_host.py`` runs this program in a child process. The program prints the number of comparisons
and the number of launches that came from the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mocked_cuda
import torch
from torch import Tensor

from fastbert import ops

mocked_cuda.activate()

from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402

from fastbert.kernels import launch as launches  # noqa: E402

USERS = (
    "attention", "attention_backward", "cross_entropy", "cross_entropy_backward", "embedding",
    "feed_forward", "feed_forward_backward", "layer_norm", "reduction", "rms_norm", "rotary",
    "splade", "splade_backward",
)  # fmt: skip
HEADS, HEAD_DIM, WIDTH = 2, 32, 64
recorded: list[Any] = []
compared = cached_runs = 0


def plain(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def checked(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap `run` to check that the driver gets the same launches as without the cache."""

    def compare(build: Any, inputs: Any, results: Any, *constants: Any) -> None:
        global compared
        recorded.clear()
        run(build, inputs, results, *constants)
        got = list(recorded)
        recorded.clear()
        for launch in launches._launches(build(*inputs, *results, *constants)):
            launch.run(on=inputs[0])
        assert got, build
        assert got == recorded, (build, got, recorded)
        compared += 1

    return compare


def watch() -> None:
    call, run_cached = CudaLauncher.__call__, launches.CachedLaunch.run

    def record(self: Any, *arguments: Any) -> Any:
        x, y, z, stream, function, packed, _, _, _, *given = arguments
        # Each launcher object belongs to one compiled kernel, so its id identifies the kernel.
        recorded.append((id(self), (x, y, z), stream, function, packed, list(map(plain, given))))
        return call(self, *arguments)

    def count(self: Any, addresses: Any) -> None:
        global cached_runs
        cached_runs += 1
        run_cached(self, addresses)

    CudaLauncher.__call__, launches.CachedLaunch.run = record, count
    for name in USERS:
        module = importlib.import_module(f"fastbert.kernels.{name}")
        module.run = checked(module.run)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Tensor:
    """Return a tensor whose address is a multiple of 16 bytes plus `offset` elements."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + offset, dtype=dtype, device="cuda")[offset:].view(shape)


def layer_norms() -> None:
    weight, other = tensor(WIDTH), tensor(WIDTH, dtype=torch.float32)
    wide = tensor(7, 2 * WIDTH)
    x = tensor(7, WIDTH)
    # In the first call, x and the residual are the same tensor. In the next, they are two tensors.
    ops.layer_norm(x, weight, weight, residual=x)
    ops.layer_norm(x, weight, weight, residual=x.clone())
    ops.layer_norm(x, weight, other, eps=1e-5)
    ops.layer_norm(x, other, weight, dropout_p=0.1)
    ops.layer_norm(x, other, weight, dropout_p=0.5)
    for other in (x, tensor(16, WIDTH), tensor(7, WIDTH, offset=1), wide[:, :WIDTH]):
        ops.layer_norm(other, weight, weight)
    given = x.detach().requires_grad_()
    ops.layer_norm(given, weight, weight, residual=x, x_bias=weight).sum().backward()


def others() -> None:
    """Call the operations that layers of BERT do not use."""
    x, weight = tensor(7, WIDTH), tensor(WIDTH).requires_grad_()
    ops.rms_norm(x.requires_grad_(), weight).sum().backward()
    heads, angles = tensor(7, 6, HEAD_DIM).requires_grad_(), tensor(7, 16, dtype=torch.float32)
    ops.rotary(heads, angles, angles, heads=4).sum().backward()
    ids = torch.zeros(7, dtype=torch.int64, device="cuda")
    table = tensor(20, WIDTH).requires_grad_()
    for types in (None, ids):
        tables = (table, None if types is None else table, None)
        ops.embedding(ids, types, None, *tables, weight, weight).sum().backward()
    for reduction in ("mean", "sum"):
        ops.linear_cross_entropy(x, table, None, ids, reduction=reduction).backward()
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    ops.splade(x, table, cu_seqlens=ends).sum().backward()


def attentions() -> None:
    ends = torch.tensor([0, 9, 25], dtype=torch.int32, device="cuda")
    packed = tensor(25, 3, HEADS, HEAD_DIM).requires_grad_()
    dense = tensor(2, 17, 3, HEADS, HEAD_DIM).requires_grad_()
    mask = torch.ones(2, 17, dtype=torch.bool, device="cuda")
    # Compilation takes most of the time. Most of these options differ only in numbers, so the calls
    # share kernels.
    for options in ({}, {"window": 4}, {"window": 5}):
        ops.attention_qkvpacked(packed, ends, 16, **options).sum().backward()
    for dropout_p in (0.1, 0.2):
        ops.attention_qkvpacked(packed, ends, 16, dropout_p=dropout_p)
    ops.attention_qkvpacked(packed, ends, 300).sum().backward()
    ops.attention_qkvpacked(dense, mask=mask)
    ops.attention_qkvpacked(dense, mask=mask & mask[0])
    ops.attention_qkvpacked(tensor(25, 3, HEADS, HEAD_DIM, offset=4), ends, 16)
    bias = tensor(1, HEADS, 1, 17).requires_grad_()
    ops.attention_qkvpacked(dense, bias=bias).sum().backward()


def strides() -> None:
    """Call a backward twice with equal inputs but with differently strided outputs."""
    from fastbert.kernels.attention_backward import attention_backward

    ends = torch.tensor([0, 9, 25], dtype=torch.int32, device="cuda")
    rows, lse = tensor(25, HEADS, HEAD_DIM), tensor(HEADS, 25, dtype=torch.float32)
    options = {"cu_seqlens_q": ends, "max_seqlen_q": 16, "max_seqlen_k": 16, "scale": 0.25}
    slices = tensor(25, 3, HEADS, HEAD_DIM).unbind(1)
    for into in (tuple(torch.empty_like(rows) for _ in range(3)), slices):
        attention_backward(rows, rows, rows, rows, rows, lse, into=into, **options)


def dtypes() -> None:
    """Add equal partial sums for gradients of several dtypes, as fp32 and autocast do in turn."""
    from fastbert.kernels.reduction import sum_planes

    partials = tensor(2, 3, WIDTH, dtype=torch.float32)
    for wanted in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)):
        sum_planes(partials, *wanted)


def feed_forwards() -> None:
    w1, b1, w2 = tensor(128, WIDTH), tensor(128), tensor(WIDTH, 128)
    for rows in (5, 100):
        for offset in (0, 1):
            x = tensor(rows, WIDTH, offset=offset)
            ops.feed_forward(x, w1, b1, w2, None)
            ops.feed_forward(x, w1, None, w2, None, activation="relu")
            given = x.detach().requires_grad_()
            b1.requires_grad_()
            ops.feed_forward(given, w1, b1, w2, None).sum().backward()


def device() -> None:
    """Check that a launch makes the device of its tensors the current device."""
    entered: list[Any] = []
    launch = next(iter(launches._cache.values()))[0]
    torch._C._cuda_getDevice = lambda: 1
    torch.cuda._exchange_device = lambda index: entered.append(index) or 1
    launch.run((1024,) * 9)
    assert entered == [0], entered


if __name__ == "__main__":
    watch()
    for _ in range(2):
        layer_norms()
        attentions()
        feed_forwards()
        strides()
        dtypes()
        others()
    device()
    print(compared, cached_runs)
    mocked_cuda.leave()
