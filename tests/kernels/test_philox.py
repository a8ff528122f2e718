"""The dropout generator gives known answers, and keeps the right fraction of the elements."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from kernel_cases import kept, philox_words

from fastbert import reference
from fastbert.kernels.philox import dropout_keep, philox

KNOWN = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@triton.jit
def _words_kernel(counters_ptr, seed_ptr, out_ptr, COUNT: tl.constexpr):
    rows = tl.arange(0, COUNT)
    c0, c1 = tl.load(counters_ptr + rows * 4), tl.load(counters_ptr + rows * 4 + 1)
    c2, c3 = tl.load(counters_ptr + rows * 4 + 2), tl.load(counters_ptr + rows * 4 + 3)
    w0, w1, w2, w3 = philox(
        tl.load(seed_ptr), c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    )
    tl.store(out_ptr + rows * 4, w0.to(tl.int64))
    tl.store(out_ptr + rows * 4 + 1, w1.to(tl.int64))
    tl.store(out_ptr + rows * 4 + 2, w2.to(tl.int64))
    tl.store(out_ptr + rows * 4 + 3, w3.to(tl.int64))


@triton.jit
def _keep_kernel(seed_ptr, out_ptr, c2, c3, first, threshold, ROWS: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, ROWS)
    keep = dropout_keep(tl.load(seed_ptr), rows, c2, c3, first, threshold, N)
    tl.store(out_ptr + rows[:, None] * N + tl.arange(0, N)[None, :], keep.to(tl.int32))


def words(counters: torch.Tensor, seed: int, device: str) -> torch.Tensor:
    out = torch.empty(counters.shape, dtype=torch.int64, device=device)
    seed = torch.tensor([seed], dtype=torch.int64, device=device)
    _words_kernel[(1,)](
        counters_ptr=counters.to(device), seed_ptr=seed, out_ptr=out, COUNT=len(counters)
    )
    return out.cpu()


def test_known_answer_of_seven_rounds(device):
    assert words(torch.zeros(16, 4, dtype=torch.int64), 0, device)[3].tolist() == KNOWN
    assert philox_words(0, np.zeros((1, 4), dtype=np.uint64))[0].tolist() == KNOWN
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in reference.philox(zero, zero, zero, zero, zero)] == KNOWN


def test_words_of_any_counter_and_seed(device):
    counters = torch.randint(0, 2**32, (64, 4))
    counters[0] = 2**32 - 1
    for seed in (1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF):
        expected = philox_words(seed, counters.numpy().astype(np.uint64))
        assert words(counters, seed, device).tolist() == expected.tolist()


def test_kept_fraction_is_binomial(device):
    """The fraction of elements that dropout keeps is within 5 standard deviations (p = 6e-7)."""
    out = torch.empty(64, 1024, dtype=torch.int32, device=device)
    seed = torch.tensor([99], dtype=torch.int64, device=device)
    for p in (0.1, 0.5, 0.9):
        threshold = int(p * 2**24 + 0.5)
        _keep_kernel[(1,)](
            seed_ptr=seed, out_ptr=out, c2=3, c3=2, first=64, threshold=threshold, ROWS=64, N=1024
        )
        expected = kept(99, p, (3, 4, 64, 64 + 1024))[2, 3, :, 64:]
        assert torch.equal(out.cpu().bool(), expected)
        share = out.double().mean().item()
        assert abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / out.numel())
