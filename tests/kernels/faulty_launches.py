"""Kernels that each break one rule of the ahead-of-time check, as a program for test_aot.py.

For each launch, the program prints as JSON the violations that ``judge`` reports.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from fastbert.kernels.launch import Launch
from fastbert.testing.ahead_of_time import compile_one


@triton.jit
def _rows_times_stride(x_ptr, y_ptr, stride_x_row, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (rows * stride_x_row).to(tl.int64)[:, None] + tl.arange(0, 16)[None, :])
    tl.store(y_ptr + tl.arange(0, 16), tl.sum(x, axis=0))


@triton.jit
def _rows_times_columns(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * columns + tl.arange(0, BLOCK))
    tl.store(y_ptr + row.to(tl.int64) * columns + tl.arange(0, BLOCK), x)


@triton.jit
def _rows_times_constant(x_ptr, y_ptr, rows_total, BLOCK: tl.constexpr):
    for first_row in range(tl.program_id(0) * BLOCK, rows_total, BLOCK):
        rows = first_row + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :])
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * 64 + tl.arange(0, 64)[None, :], x)


@triton.jit
def _stride_of_a_step(x_ptr, y_ptr, stride_x_row, rows_total, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(rows_total):
        total += tl.load(x_ptr + tl.arange(0, BLOCK))
        x_ptr += 8 * stride_x_row
    tl.store(y_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def _right_addresses(x_ptr, y_ptr, stride_x_row, columns, rows_total, BLOCK: tl.constexpr):
    """Break no rule: products in addresses are 64-bit; indices and block numbers may be 32-bit."""
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // (blocks * 2)
    cols = tl.program_id(0) % (blocks * 2) * BLOCK + tl.arange(0, BLOCK)
    for step in range(row, rows_total, blocks * 4):
        if step % 2 == 0:
            x = tl.load(x_ptr + step.to(tl.int64) * stride_x_row + cols)
        else:
            x = tl.load(x_ptr + cols)
        tl.store(y_ptr + step.to(tl.int64) * columns + cols, x)


@triton.jit
def _in_tf32(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, tl.dot(x, x))


@triton.jit
def _spills(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    total = tl.sum(x * y)
    tl.store(y_ptr + offsets, tl.exp(x) * tl.exp(y) + total * x)


@triton.jit
def _copies_by_two_bytes(x_ptr, y_ptr, stride_x, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols.to(tl.int64) * stride_x))


@triton.jit
def _small_tiles(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, tl.dot(x, x).to(tl.bfloat16))


def launches():
    def launch(kernel, dtype=torch.float32, warps=4, **numbers):
        x = torch.empty(4096, dtype=dtype, device="meta")
        name = kernel.__name__.removeprefix("_")
        return Launch(name, kernel, (1,), {"x_ptr": x, "y_ptr": x, **numbers}, warps, 1)

    yield launch(_rows_times_stride, stride_x_row=48, BLOCK=16)
    yield launch(_rows_times_columns, columns=48, BLOCK=1024)
    yield launch(_rows_times_constant, rows_total=99, BLOCK=16)
    yield launch(_stride_of_a_step, stride_x_row=48, rows_total=5, BLOCK=1024)
    yield launch(_right_addresses, stride_x_row=48, columns=4096, rows_total=9, BLOCK=1024)
    yield launch(_in_tf32, BLOCK=64)
    yield launch(_spills, BLOCK=128)
    yield launch(_copies_by_two_bytes, torch.bfloat16, stride_x=3, BLOCK=1024)
    yield launch(_small_tiles, torch.bfloat16, BLOCK=32)


if __name__ == "__main__":
    print(json.dumps({launch.name: compile_one(launch, "", 90).faults for launch in launches()}))
