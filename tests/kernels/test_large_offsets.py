"""Tensors of more than 2**31 elements: a wrapped int32 offset is a segfault, so in a child process.

The memory is a private mapping without reservation: only the pages that hold rows are touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = """
import mmap
import torch
from fastbert.kernels.attention import attention_backward, attention_forward
from fastbert.kernels.feed_forward import linear_gelu_forward
from fastbert.kernels.layer_norm import layer_norm_backward, layer_norm_forward

FAR = 2**31
NORESERVE = 0x4000
torch.manual_seed(0)

def spread(x, strides):
    '''x on a mapping of its own, its elements FAR apart along one dimension.'''
    size = 2 * (FAR + 4096)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    view = torch.frombuffer(pages, dtype=torch.float16).as_strided(x.shape, strides)
    return view.copy_(x)

def same(near, far):
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))

q, k, v, dout = (torch.randn(1, 2, 20, 16).half() for _ in range(4))
out, lse = attention_forward(q, k, v, scale=1.0)
near = attention_backward(dout, q, k, v, out, lse, scale=1.0)
for far in range(4):
    tensors = [q, k, v, dout]
    tensors[far] = spread(tensors[far], (0, FAR, 16, 1))
    q_far, k_far, v_far, dout_far = tensors
    got, _ = attention_forward(q_far, k_far, v_far, scale=1.0)
    gradients = attention_backward(dout_far, q_far, k_far, v_far, out, lse, scale=1.0)
    same([out, *near], [got, *gradients])
    rows = [x[0].transpose(0, 1)[:2] for x in (q, k, v, dout)]
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    packed, lse_2 = attention_forward(*rows[:3], scale=1.0, cu_seqlens_q=bounds)
    rows[far] = spread(rows[far], (FAR, 16, 1))
    same([packed], attention_forward(*rows[:3], scale=1.0, cu_seqlens_q=bounds)[:1])

x, dy = (torch.randn(2, 64).half() for _ in range(2))
ones = torch.ones(64)
near = layer_norm_forward(x, ones, ones, eps=1e-12)
far = spread(x, (FAR, 1))
same(near, layer_norm_forward(far, ones, ones, eps=1e-12))
dy_far = spread(dy, (FAR, 1))
gradients = layer_norm_backward(dy, x, ones, *near[1:])
same(
    [t for t in gradients if t is not None],
    [t for t in layer_norm_backward(dy_far, far, ones, *near[1:]) if t is not None],
)
same(
    linear_gelu_forward(x, dy, None, approximate="none", save=True),
    linear_gelu_forward(far, dy_far, None, approximate="none", save=True),
)
print("same")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mapping is memory of the CPU")
def test_offsets_beyond_two_to_the_31():
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    run = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "same", f"exit status {run.returncode}: {run.stderr[-2000:]}"
