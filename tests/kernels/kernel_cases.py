"""Inputs of kernel tests, and checks against the reference in float64 by the tolerance rule."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Draw normal numbers of deviation `scale` in `dtype`, from torch's default generator."""
    return (torch.randn(shape) * scale).to(dtype).to(device)


def seed_tensor(device: str, value: int = 0x0123_4567_89AB_CDEF) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def differentiate(function, inputs: list[Tensor | None], dy: Tensor, dtype: torch.dtype):
    """Return [output, *gradients] of function(*inputs), computed in `dtype` on the CPU."""
    leaves = [None if x is None else x.detach().cpu().to(dtype).requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(dy.detach().cpu().to(dtype))
    return [output.detach(), *(x.grad for x in leaves if x is not None)]


def judge(names: str, actual: list[Tensor], function, inputs: list[Tensor | None], dy: Tensor):
    """Check [output, *gradients] against `function` in float64, by the tolerance rule."""
    dtype = actual[0].dtype
    oracle = differentiate(function, inputs, dy, torch.float64)
    yardstick = Yardstick(lambda: differentiate(function, inputs, dy, dtype))
    for name, *triple in zip(names.split(), actual, oracle, yardstick, strict=True):
        assert_close(name, *triple)


def philox_words(seed: int, counters: np.ndarray, rounds: int = 7) -> np.ndarray:
    """Return Philox4x32 of uint64 counters (..., 4), written from the definition in the paper."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    c0, c1, c2, c3 = (counters[..., i].astype(np.uint64) for i in range(4))
    for _ in range(rounds):
        product_0, product_1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ key[0],
            product_1 & mask,
            (product_0 >> shift) ^ c3 ^ key[1],
            product_0 & mask,
        )
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack([c0, c1, c2, c3], axis=-1)


def kept(seed: int, p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """Return the dropout mask, in which True keeps an element.

    Element (c3, c2, c1, j) depends on word j % 4 of Philox for the counter (j // 4, c1, c2, c3).
    """
    c3, c2, c1, j = np.indices(shape)
    words = philox_words(seed, np.stack([j // 4, c1, c2, c3], axis=-1))
    word = np.take_along_axis(words, (j % 4)[..., None], axis=-1)[..., 0]
    return torch.from_numpy((word >> np.uint64(8)) >= np.uint64(int(p * 2**24 + 0.5)))
