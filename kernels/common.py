"""What every kernel file shares: interpreter workarounds, Philox, block sizes, launches."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton decides at import whether @jit interprets; the same flag must steer the workarounds below.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
# Rows of a tile there: few operations on large tiles are fast, but NumPy sums a column of a tile
# one row after the other, where a GPU adds in a tree.
INTERPRETED_ROWS = 8
INTERPRETED = tl.constexpr(IS_INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts; products of the first with integers below 2**9 are exact.
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.42860682030941723e-6)
INFINITY = tl.constexpr(float("inf"))
PHILOX_ROUNDS = tl.constexpr(7)

LARGEST_HEAD_DIM = 256
LARGEST_ROW = 65536


@triton.jit
def dot(a, b, acc):
    """acc + a b in fp32; fp32 operands multiply in IEEE fp32, never in tf32."""
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16 operands.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 x rounded to nearest even in dtype."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates to bf16: round in the bits first, so that its cast is exact.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def philox_product(factor: tl.constexpr, counter):
    """High and low word of the 64-bit product of two 32-bit words."""
    wide = counter.to(tl.uint64) * factor
    return (wide >> 32).to(tl.uint32), (wide & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """The four words of Philox4x32-7 (Salmon et al. 2011); seed is the key, low word first."""
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        high_0, low_0 = philox_product(0xD2511F53, c0)
        high_1, low_1 = philox_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def dropout_keep(seed, rows, c2, c3, first_column, threshold, COLUMNS: tl.constexpr):
    """Which elements of a tile survive dropout, int1 [rows, COLUMNS].

    Element (row, n) takes word n % 4 of counter (n // 4, row, c2, c3), so first_column must be a
    multiple of 4. It is kept iff word >> 8 >= threshold.
    """
    groups = first_column // 4 + tl.arange(0, COLUMNS // 4)
    c0 = groups.to(tl.uint32)[None, :]  # [1, COLUMNS / 4]
    c1 = rows.to(tl.uint32)[:, None]  # [rows, 1]
    c2 = tl.zeros_like(c0) + c2.to(tl.uint32)
    c3 = tl.zeros_like(c0) + c3.to(tl.uint32)
    word_0, word_1, word_2, word_3 = philox(seed, c0, c1, c2, c3)
    keep_0 = (word_0 >> 8).to(tl.int32) >= threshold
    keep_1 = (word_1 >> 8).to(tl.int32) >= threshold
    keep_2 = (word_2 >> 8).to(tl.int32) >= threshold
    keep_3 = (word_3 >> 8).to(tl.int32) >= threshold
    # [rows, COLUMNS / 4, 2, 2]: the last axis is bit 0 of n, the one before it bit 1.
    keep = tl.join(tl.join(keep_0, keep_2), tl.join(keep_1, keep_3))
    return keep.reshape(rows.shape[0], COLUMNS)


class Dropout(NamedTuple):
    """Kernel arguments of one dropout probability."""

    threshold: int
    scale: float
    enabled: bool


def dropout_arguments(p: float, seed: Tensor | None) -> Dropout:
    """Threshold of the 24-bit draw, scale of what is kept; ValueError: p > 0 without a seed."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p: got {p}, allowed: 0 to 1")
    if p > 0.0 and seed is None:
        raise ValueError(
            f"seed: got None with dropout_p={p}, allowed: an int64 tensor of shape (1,)"
        )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return Dropout(threshold=int(p * 2**24 + 0.5), scale=scale, enabled=p > 0.0)


class Tile(NamedTuple):
    """Block sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The interpreter pays per tile, whatever its size; tests/kernels makes it play the real ones.
INTERPRETED_TILE = Tile(128, 128, num_warps=4, num_stages=1)


def padded_head_dim(head_dim: int) -> int:
    """The head dimension as a matrix unit sees it: a power of two, at least 16."""
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, allowed: 1 to {LARGEST_HEAD_DIM}")
    return max(16, triton.next_power_of_2(head_dim))


def attention_tile(pass_name: str, head_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of an attention kernel; m counts queries, n keys.

    pass_name: "forward", "weights", "delta", "dkv" or "dq". Chosen so that no shipped launch spills
    (tests/kernels/test_aot.py).
    """
    width = padded_head_dim(head_dim)
    if IS_INTERPRETED:
        return INTERPRETED_TILE
    if pass_name == "delta":
        return Tile(4096 // width, 16, num_warps=4, num_stages=1)
    if dtype == torch.float32:
        # IEEE fp32 products run on the FMA units, from operands in registers: small tiles. One size
        # for all passes, so that the backward sums each product as the forward did.
        block = 32 if width <= 64 else 16
        return Tile(block, block, num_warps=4 if pass_name == "forward" else 8, num_stages=1)
    if pass_name == "dkv":
        return Tile(32, 128, 8, 1) if width <= 64 else Tile(16, 64, 8, 1)
    if width > 128:
        return Tile(64, 32, num_warps=8, num_stages=1)
    if width > 64:
        return Tile(64, 32, num_warps=4, num_stages=2)
    return Tile(128, 32, 8, 2) if pass_name == "dq" else Tile(128, 64, 8, 3)


def matmul_tile(rows: int, dtype: torch.dtype) -> tuple[Tile, int]:
    """Tile of the GEMM and its depth along K; few rows get a flat tile."""
    if IS_INTERPRETED:
        return INTERPRETED_TILE, 512
    if dtype == torch.float32:
        return Tile(64, 64, num_warps=8, num_stages=2), 16
    if rows <= 64:
        return Tile(64, 128, num_warps=4, num_stages=4), 64
    return Tile(128, 128, num_warps=8, num_stages=3), 64


def row_tile(columns: int) -> Tile:
    """Tile of a kernel that keeps whole rows in registers: block_m rows, block_n >= columns."""
    block_n = max(16, triton.next_power_of_2(columns))
    if block_n > LARGEST_ROW:
        raise ValueError(f"columns: got {columns}, allowed: up to {LARGEST_ROW}")
    block_m = max(1, min(16, 1024 // block_n))
    if IS_INTERPRETED:
        block_m = INTERPRETED_ROWS
    return Tile(block_m, block_n, min(32, max(4, block_n // 512)), num_stages=1)


def elementwise_tile() -> Tile:
    """Tile of a kernel that maps a matrix and sums its columns."""
    return Tile(INTERPRETED_ROWS, 1024, 4, 1) if IS_INTERPRETED else Tile(16, 128, 4, 1)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of x's device; a small number where the interpreter plays them one by one."""
    return _multiprocessors(x.device.index) if x.is_cuda else 4


def device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes x's device current: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class Launch(NamedTuple):
    """One kernel launch, complete: what runs now, or what tests/kernels compiles ahead of time."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self, on: Tensor) -> None:
        """Runs on the device of `on`; an empty grid runs nothing."""
        if min(self.grid) == 0:
            return
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        with device_of(on):
            self.kernel[self.grid](**self.arguments, **options)
