"""Block sizes, numbers of programs, and the choice between kernels that compute the same result.

Most of these choices were not measured on a GPU. They follow from the reasons in this file and from
the forecasts in benchmarks/NOTES.md. Choices that were measured on an H200 with Triton 3.6 name the
GPU (benchmarks/results/2026-11-28-h200). No shipped launch spills registers with the ptxas of
Triton 3.9 (tests/kernels/test_aot.py). With the ptxas of Triton 3.6, eight fp32 launches for sm_90
spill registers and are therefore slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastbert.kernels.assembler import loses_descriptors
from fastbert.kernels.common import INTERPRETED

# Whether tiles are chosen for the interpreter. Tests set this flag to False to get the tiles of a
# GPU.
IS_INTERPRETED = INTERPRETED.value
# Number of rows of a tile of `row_tile` in the interpreter. Larger tiles need fewer NumPy calls and
# are faster. But NumPy adds the rows of a tile one after another, whereas a GPU adds them in a
# tree, so this number is small.
INTERPRETED_ROWS = 8
LARGEST_HEAD_DIM = 256
LARGEST_ROW = 8192


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient rounded up; ``triton.cdiv`` takes ten times as long on the host."""
    return -(-number // divisor)


class Tile(NamedTuple):
    """Block sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What ``fastbert tune`` has measured on this GPU: the name of a choice → the number of keys or rows
# at which it was measured → the choice. A tile is a list of its numbers.
TUNED: dict[str, dict[int, Any]] = {}


@contextmanager
def tuned(choices: dict[str, dict[int, Any]]) -> Iterator[None]:
    """Replace all measured choices inside the block, as ``fastbert tune`` does to try them."""
    before = dict(TUNED)
    TUNED.clear()
    TUNED.update(choices)
    try:
        yield
    finally:
        TUNED.clear()
        TUNED.update(before)


def measured_choice(name: str, size: int = 1) -> Any:
    """Return the choice that was measured nearest to a size, or None if none was measured."""
    by_size = TUNED.get(name)
    if not by_size:
        return None
    return by_size[min(by_size, key=lambda measured: abs(math.log(measured / max(1, size))))]


def attention_path_name(pass_name: str, head_dim: int) -> str:
    """Return the name of the choice of `attention_path` in `TUNED`."""
    return f"attention path, {pass_name}, D {head_dim}"


def attention_tile_name(head_dim: int) -> str:
    """Return the name of the choice of a forward tile of attention in `TUNED`."""
    return f"attention tile, forward, D {head_dim}"


def gemm_path_name(depth: int) -> str:
    """Return the name of the choice of `gemm_path` in `TUNED`."""
    return f"product path, depth {depth}"


def gemm_tile_name(columns: int) -> str:
    """Return the name of the choice of a forward tile of a product in `TUNED`."""
    return f"product tile, forward, {columns} columns"


# The interpreter's time depends on the number of tiles, so this tile is large. The tests in
# tests/kernels use the tiles that a GPU uses instead.
INTERPRETED_TILE = Tile(128, 128, num_warps=4, num_stages=1)


def padded_head_dim(head_dim: int) -> int:
    """Return the head dim padded for a matrix unit: a power of two, at least 16.

    Raises:
        ValueError: If `head_dim` is outside 1..256.
    """
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim: got {head_dim}, allowed: 1 to {LARGEST_HEAD_DIM}")
    return max(16, triton.next_power_of_2(head_dim))


def attention_tile(
    pass_name: str,
    head_dim: int,
    dtype: torch.dtype,
    has_pairs: bool = False,
    target: int = 90,
) -> Tile:
    """Return the tile of an attention kernel: block_m queries and block_n keys.

    For sm_120, ptxas gives some tiles fewer registers than the hardware allows, so that a few bytes
    spill. The tiles for sm_120 therefore have other numbers of warps or stages, which do not spill.

    Args:
        pass_name: "forward", "weights", "delta", "statistics", "dkv", "dq" or "bias".
        head_dim: Head dim D, 1 to 256.
        dtype: Dtype of q, k and v.
        has_pairs: Whether the kernel reads a bias, or a mask that differs between queries.
        target: Architecture of the GPU, such as 90 for sm_90.

    Raises:
        ValueError: If `head_dim` is not allowed.
    """
    width = padded_head_dim(head_dim)
    if IS_INTERPRETED:
        return INTERPRETED_TILE
    if pass_name == "delta":
        return Tile(4096 // width, 16, num_warps=4, num_stages=1)
    is_walk = pass_name in ("dq", "statistics")
    if dtype == torch.float32:
        # IEEE fp32 products run on the FMA units with operands in registers, so tiles are small.
        # All passes use the same tile size, so that the backward sums each product in the order of
        # the forward.
        block = 32 if width <= 64 else 16
        num_warps, num_stages = 4 if pass_name == "forward" else 8, 1
        if is_walk and width > 64:
            num_stages = 2
        return Tile(block, block, num_warps, num_stages)
    # With more than one stage, tiles are copied directly to shared memory, which takes fewer
    # registers.
    if pass_name == "dkv":
        return Tile(32, 128, 8, 1) if width <= 64 else Tile(16, 64, 8, 3)
    if width > 128:
        return Tile(64, 16 if is_walk else 32, num_warps=8, num_stages=2)
    if width > 64:
        has_8_warps = has_pairs or (pass_name == "forward") != (target >= 120)
        return Tile(64, 32, 8 if has_8_warps else 4, num_stages=2)
    if is_walk or has_pairs:
        is_tight = target >= 120 and has_pairs
        return Tile(128, 32, num_warps=8, num_stages=(1 if is_tight else 2) if is_walk else 3)
    measured = measured_choice(attention_tile_name(head_dim)) if pass_name == "forward" else None
    return Tile(*measured) if measured else ATTENTION_TILES[0]


# The tiles of the forward for 16 bits and a head dim of up to 64, the default first. All of them
# have 64 keys, as the short kernel has, so that the bits of a row do not depend on the choice.
ATTENTION_TILES = (
    Tile(128, 64, num_warps=8, num_stages=3),
    Tile(128, 64, num_warps=4, num_stages=3),
    Tile(128, 64, num_warps=8, num_stages=2),
    Tile(64, 64, num_warps=4, num_stages=3),
)


def relative_tile(pass_name: str, head_dim: int, dtype: torch.dtype, target: int = 90) -> Tile:
    """Return the tile of a kernel of relative attention: block_m queries and block_n keys.

    The kernels multiply the queries and the keys by a window of block_m + block_n rows of each
    table. With equal numbers of queries and keys, the window is a power of two without padding. The
    tiles are small, because the addresses of the gathers take many registers.

    Args:
        pass_name: "forward", "weights", "statistics", "dq", "dkv" or "sums".
        head_dim: Head dim D, 1 to 256.
        dtype: Dtype of q, k and v.
        target: Architecture of the GPU, such as 90 for sm_90.

    Raises:
        ValueError: If `head_dim` is not allowed.
    """
    width = padded_head_dim(head_dim)
    if IS_INTERPRETED:
        return Tile(64, 64, num_warps=4, num_stages=1)
    is_forward = pass_name == "forward"
    if dtype == torch.float32:
        return Tile(16, 16, num_warps=8, num_stages=2 if is_forward and width <= 64 else 1)
    if pass_name == "sums" or (width > 128 and not is_forward):
        return Tile(16, 16, num_warps=8, num_stages=1)
    if width > 64:
        return Tile(16, 16, num_warps=4, num_stages=1)
    if pass_name == "dkv" and 100 <= target < 120:
        return Tile(32, 16, num_warps=8, num_stages=1)
    return Tile(32, 32, num_warps=4, num_stages=2)


def relative_registers(head_dim: int, dtype: torch.dtype) -> int | None:
    """Return the ``max_registers`` of a launch of `relative_tile`.

    Where a tile takes most registers of a thread, ptxas would let some spill for more programs.
    """
    return 255 if dtype == torch.float32 or padded_head_dim(head_dim) > 64 else None


def table_sums_columns(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of columns of a table whose gradient one program of the sums computes.

    The sums of more columns do not fit into the registers, so that several programs compute the
    gradient of the logits for the same pairs.
    """
    return min(padded_head_dim(head_dim), 64 if dtype == torch.float32 else 128)


def table_rows_tile(columns: int) -> Tile:
    """Return the tile of the kernel that adds the sums by distance to block_m rows of a table."""
    return Tile(16, min(32, padded_head_dim(columns)), num_warps=4, num_stages=1)


# Bytes of shared memory that a program may use, by architecture. Consumer GPUs have the least.
SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    87: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    110: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}


def shared_memory(target: int) -> int:
    """Return the bytes of shared memory that a program may use; 99 KiB on an unknown GPU.

    Args:
        target: Architecture of the GPU, such as 90 for sm_90.
    """
    return SHARED_MEMORY.get(target, min(SHARED_MEMORY.values()))


# The largest number of keys of the short backward. With more keys, dk and dv would not fit into the
# registers together with the tiles of scores.
LARGEST_SHORT_BACKWARD = 128


def multiplies_in_registers(target: int) -> bool:
    """Return whether matrix units read operands from registers only, as on sm_80 and sm_120.

    sm_90 reads operands from shared memory, and sm_100 has a separate tensor memory.

    Args:
        target: Architecture of the GPU, such as 90 for sm_90.
    """
    return target < 90 or target >= 120


class ShortTile(NamedTuple):
    """The tile of a short attention kernel, and its numbers of chunks and of programs.

    The keys of a head are divided into `chunks` chunks of block_n keys each. A multiprocessor runs
    `programs` programs at once.
    """

    tile: Tile
    chunks: int
    programs: int


def short_attention_tile(
    pass_name: str, max_keys: int, head_dim: int, target: int = 90, has_dropout: bool = False
) -> ShortTile:
    """Return the tile of a kernel in attention_short.py.

    The numbers below are the registers and the shared memory that ptxas reports for sm_90. A
    multiprocessor of sm_90 has 65,536 registers and 227 KiB of shared memory. Both limit the number
    of programs that it runs at once.

    - Forward: Scores are computed for 64 keys at a time, as [64, 64] on 4 warps. Other tile shapes
      need more registers, which costs more time than these shapes save. All lengths use one chunk
      size, so that the bits of a row do not depend on the longest sequence of the batch. At D = 64,
      K and V take 32 KiB of shared memory for every 128 keys. With up to 128 keys on GPUs before
      sm_100, the next query tile is loaded in advance. With more keys, the 16 KiB of the next query
      tile would leave no shared memory for a third program. With 65 to 128 keys, a thread takes 146
      to 164 registers, and with dropout 176 to 205; with 129 to 256 keys, it takes 162 registers
      with the compiler of Triton 3.9 and 234 with that of Triton 3.6.
    - Backward: dk and dv [128, 64] take 64 registers per thread on 8 warps. The tiles [128, 32] of
      the softmax weights and of their gradient take 32 registers. With addresses and dropout, a
      thread takes 242 registers, so only one program fits on a multiprocessor. With up to 64 keys,
      4 warps are enough, and two programs fit. On sm_80 and sm_120, copies go through registers,
      and the kernels use tiles of 16 queries. On sm_100, the products are in tensor memory; with
      dropout, the kernel spills registers on 8 warps and not on 4. ptxas 12.8, which is in the
      wheels of Triton 3.6, makes wrong code of the kernel with 64 keys on sm_90, but not of the
      kernel with 128 keys.

    Args:
        pass_name: "forward" or "backward".
        max_keys: Length of the longest sequence of keys.
        head_dim: Head dim D; the tile does not depend on it.
        target: Architecture of the GPU, such as 90 for sm_90.
        has_dropout: Whether the pass applies dropout to the softmax weights.
    """
    if pass_name == "forward":
        block = 128 if IS_INTERPRETED else 64
        chunks = max(1, ceil_div(max_keys, block))
        # With at most 170 registers per thread, three programs fit on a multiprocessor.
        resident = 1 if chunks > 4 else 2 if chunks > 2 or (chunks == 2 and has_dropout) else 3
        stages = 2 if max_keys <= 128 and target < 100 else 1
        return ShortTile(Tile(block, block, 4, stages), chunks, resident)
    least = 128 if not IS_INTERPRETED and loses_descriptors(target) else 64
    block_n = max(least, triton.next_power_of_2(max_keys))
    block_m = 128 if IS_INTERPRETED else 16 if multiplies_in_registers(target) else 32
    if block_n == 64:
        return ShortTile(Tile(block_m, block_n, 4, 1), chunks=1, programs=2)
    num_warps = 4 if has_dropout and 100 <= target < 120 else 8
    return ShortTile(Tile(block_m, block_n, num_warps, 1), chunks=1, programs=1)


def short_attention_obstacle(
    pass_name: str, max_keys: int, head_dim: int, dtype: torch.dtype, target: int = 90
) -> str | None:
    """Return the reason why the short kernels cannot compute a pass, or None if they can.

    The forward keeps the keys and values of a head in shared memory. In 16 bits, 512 keys with a
    head dim of 64 take 128 KiB. On GPUs with less than 163 KiB of shared memory, the limit is half
    as many keys. For other head dims, the limit is inversely proportional to the padded head dim.
    """
    width = padded_head_dim(head_dim)
    if dtype == torch.float32:
        return "dtype: got torch.float32, allowed: torch.float16, torch.bfloat16"
    if pass_name == "backward" and width > 64:
        return f"head_dim: got {head_dim}, allowed: up to 64"
    keys = 512 if shared_memory(target) >= 163 * 1024 else 256
    most = LARGEST_SHORT_BACKWARD if pass_name == "backward" else keys * 64 // width
    return f"keys: got {max_keys}, allowed: up to {most}" if max_keys > most else None


def attention_path(
    pass_name: str,
    max_keys: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_key_mask: bool = False,
    has_pairs: bool = False,
    target: int = 90,
) -> str:
    """Choose the kernels for the forward or the backward of attention: "short" or "general".

    A path that ``fastbert tune`` has measured on this GPU takes precedence over the rules below, if
    there is no mask and the kernels can compute the pass.

    - The forward up to 128 keys and D = 64 is bound by memory. The short kernel reads K and V once
      and has three programs of 4 warps on a multiprocessor, so that one program loads while the
      others compute. With more keys, fewer programs fit, whose products and exponentials wait for
      each other. On an H200, 16,384 tokens of 16 heads take 49 us with sequences of 64 tokens (the
      general kernel 74), 55 us with 128 (53), and 99 us with 256 (71).
    - If D is not a power of two from 16 on, or with `has_pairs`, each load has only 2 bytes, and so
      many loads need too many registers.
    - Above D = 64, K, V and the accumulator are twice as large, and the short forward spills
      registers.
    - With up to 128 keys, the short backward takes one launch instead of three and 5 products
      instead of 7, and reads q, k, v and dout once instead of twice.
    - With a key mask, the short backward spills registers on sm_80 beyond 64 keys. Models pack
      their sequences and need no key mask.

    Args:
        pass_name: "forward" or "backward".
        max_keys: Length of the longest sequence of keys.
        head_dim: Head dim D.
        dtype: Dtype of q, k and v.
        has_key_mask: Whether there is a mask that is the same for every query.
        has_pairs: Whether there is a bias, or a mask that differs between queries.
        target: Architecture of the GPU, such as 90 for sm_90.
    """
    if not (has_key_mask or has_pairs) and dtype != torch.float32:
        measured = measured_choice(attention_path_name(pass_name, head_dim), max_keys)
        if measured == "general" or (
            measured == "short"
            and not short_attention_obstacle(pass_name, max_keys, head_dim, dtype, target)
        ):
            return str(measured)
    is_wide = head_dim > 64 or head_dim != padded_head_dim(head_dim)
    if dtype == torch.float32 or is_wide or has_pairs:
        return "general"
    most = 64 if pass_name == "backward" and has_key_mask else 128
    return "short" if max_keys <= most else "general"


# The tile of a GEMM is made smaller until the GEMM has at least this many tiles, about one per
# multiprocessor.
GEMM_TILES = 96

# Above this depth (the K of the product), a library GEMM with a separate pass over the result is
# assumed to be faster than the fused GEMM.
LARGEST_FUSED_DEPTH = 1024
# On sm_90, products with an activation of at least this number of rows take the library's GEMM. The
# smallest number of rows that was measured is 2048.
LIBRARY_ROWS = 1024


def gemm_tile(
    rows: int, columns: int, dtype: torch.dtype, epilogue: str = "forward", target: int = 90
) -> Tile:
    """Return the tile of a GEMM with rows × columns results.

    In the forward, a tile of 128 × 128 on 4 warps allows two programs on a multiprocessor, so that
    one program multiplies while the other runs its epilogue. On sm_120, ptxas spills 8 bytes of
    such a program, so the tile has 8 warps. On sm_86 to sm_89, ptxas gives each thread of 8 warps
    only 80 registers and spills 8 bytes of the fp32 forward, which therefore has 4 warps.

    Args:
        rows: Number of rows of the result.
        columns: Number of columns of the result.
        dtype: Dtype of the operands.
        epilogue: "forward", "backward" or "gated_backward"; each needs more registers than the
            previous one.
        target: Architecture of the GPU, such as 90 for sm_90.
    """
    if IS_INTERPRETED:
        return INTERPRETED_TILE
    if dtype == torch.float32:
        has_4_warps = epilogue == "forward" and 80 < target < 90
        return Tile(64, 64, 4 if has_4_warps else 8, num_stages=2)
    large = {
        "forward": Tile(128, 128, 8 if target >= 120 else 4, num_stages=3),
        "backward": Tile(128, 128, num_warps=8, num_stages=3),
        "gated_backward": Tile(128, 64, num_warps=8, num_stages=3),
    }
    if epilogue == "forward" and (measured := measured_choice(gemm_tile_name(columns), rows)):
        return Tile(*measured)
    for tile in (large[epilogue], Tile(64, 64, num_warps=8, num_stages=3)):
        if ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n) >= GEMM_TILES:
            return tile
    return Tile(64, 32, num_warps=4, num_stages=4)


# The tiles of a forward product in 16 bits that ``fastbert tune`` tries.
GEMM_TILES_TRIED = (
    Tile(128, 128, num_warps=4, num_stages=3),
    Tile(128, 128, num_warps=8, num_stages=3),
    Tile(128, 64, num_warps=4, num_stages=4),
    Tile(64, 64, num_warps=8, num_stages=3),
    Tile(64, 32, num_warps=4, num_stages=4),
)


def gemm_depth(dtype: torch.dtype) -> int:
    """Return the size along K of the operands that a GEMM multiplies in one step of its loop."""
    if IS_INTERPRETED:
        return 512
    return 32 if dtype == torch.float32 else 64


def gemm_programs(x: Tensor, tile: Tile, tiles: int) -> int:
    """Return the number of programs of a GEMM on x's device; all of them run at once.

    Args:
        x: A tensor on the device.
        tile: The tile of the GEMM.
        tiles: Number of tiles of the result.
    """
    return min(multiprocessors(x) * max(1, 8 // tile.num_warps), tiles)


class GemmPath(NamedTuple):
    """The path of a product with an activation, and the reason for the choice.

    Args:
        name: "fused" for fastbert's GEMM with the activation in its epilogue, or "library" for
            torch's GEMM and an elementwise kernel on its result.
        reason: The reason in words.
    """

    name: str
    reason: str


def gemm_path(rows: int, columns: int, depth: int, dtype: torch.dtype, target: int) -> GemmPath:
    """Choose the path of a product with an activation, as in `GemmPath`.

    - Products in fp32 are computed in IEEE fp32, without matrix units. cuBLAS is assumed to be much
      faster than Triton for these products, and the separate pass takes little time compared with
      the GEMM.
    - The epilogue of cuBLASLt has only the tanh form of GELU. A separate pass is assumed to cost
      38 % of the first GEMM of BERT-base (depth 768) and 19 % at twice the depth. A Triton GEMM is
      assumed to be 20 % slower than the library's GEMM. Both paths then take the same time at a
      depth of about 1,400. If the pre-activation is saved, this depth is smaller, because the
      library's GEMM writes the pre-activation in any case.
    - With few rows, both paths take as long as reading the weight takes, and "fused" saves a
      launch.
    - On an H200, cuBLAS reaches 520 to 680 TFLOP/s at the depths 384, 768 and 1024, and Triton's
      GEMM 255 to 400. The separate pass costs less than this difference: 16,384 rows take 293
      instead of 345 us at a depth of 1024, and 187 instead of 219 us at 768.

    Args:
        rows: Number of rows of the result.
        columns: Number of columns of the result.
        depth: Number of products that are summed for one element of the result, K.
        dtype: Dtype of the operands.
        target: Architecture of the GPU, such as 90 for sm_90.
    """
    if dtype != torch.float32 and (measured := measured_choice(gemm_path_name(depth), rows)):
        return GemmPath(measured, "measured on this GPU by fastbert tune")
    if dtype == torch.float32:
        return GemmPath("library", "fp32 in IEEE: the library's GEMM is faster (not measured)")
    if rows <= 64:
        return GemmPath("fused", "few rows: one launch instead of two (not measured)")
    if target == 90 and rows >= LIBRARY_ROWS:
        return GemmPath("library", "the library's GEMM is faster (measured on an H200)")
    if depth > LARGEST_FUSED_DEPTH:
        reason = f"depth {depth} > {LARGEST_FUSED_DEPTH}: the GEMM outweighs the pass after it"
        return GemmPath("library", f"{reason} (not measured)")
    return GemmPath("fused", "saves a pass over the pre-activation (not measured)")


def cross_entropy_tile(dtype: torch.dtype) -> tuple[Tile, int]:
    """Return the tile of the products of linear_cross_entropy, and its size along K.

    The tile is the same for every number of rows and for both passes, so that a logit always has
    the same bits. The tile is square, because the columns of one product are the rows of the next
    product.
    """
    if IS_INTERPRETED:
        return INTERPRETED_TILE, 512
    if dtype == torch.float32:
        return Tile(64, 64, num_warps=8, num_stages=2), 32
    return Tile(128, 128, num_warps=8, num_stages=3), 64


def splade_tile(pass_name: str, dtype: torch.dtype) -> tuple[Tile, int]:
    """Return the tile of a kernel of splade, and the size of its operands along the summed axis.

    The tile is the same for every number of tokens and sequences, so that a sequence always has the
    same bits.

    - Forward: block_m classes and block_n tokens. Texts have tens to hundreds of tokens, so a tile
      has only 64, which wastes fewer products after the end of a sequence.
    - dhidden: block_m tokens and block_n columns of the weight.
    - dweight: block_m classes and block_n columns of hidden, without a matrix product.

    Args:
        pass_name: "forward", "dhidden" or "dweight".
        dtype: Dtype of the operands.
    """
    if IS_INTERPRETED:
        return INTERPRETED_TILE, 512 if pass_name == "forward" else 128
    if pass_name == "dweight":
        return Tile(32, 128, num_warps=4, num_stages=1), 0
    if dtype == torch.float32:
        return Tile(64, 64, num_warps=8, num_stages=2), 32
    if pass_name == "dhidden":
        return Tile(64, 128, num_warps=8, num_stages=2), 64
    return Tile(128, 64, num_warps=4, num_stages=3), 64


def splade_registers(dtype: torch.dtype, target: int) -> int | None:
    """Return the ``max_registers`` of the kernel that computes dhidden of splade.

    On sm_100, ptxas would otherwise let 8 bytes of a 16-bit kernel spill for more programs.
    """
    return 255 if dtype != torch.float32 and 100 <= target < 120 else None


@functools.cache
def row_tile(columns: int) -> Tile:
    """Return the tile of a kernel that keeps block_m whole rows in registers; block_n >= columns.

    All warps share a row. Up to 1024 columns, a thread holds 8 elements, which in 16 bits are one
    load of 16 bytes. With 16 elements, the backward would spill registers on sm_80.

    Raises:
        ValueError: If a row has more than 8192 columns.
    """
    block_n = max(16, triton.next_power_of_2(columns))
    if block_n > LARGEST_ROW:
        raise ValueError(f"columns: got {columns}, allowed: up to {LARGEST_ROW}")
    num_warps = max(1, block_n // 256) if block_n <= 1024 else max(4, block_n // 512)
    block_m = INTERPRETED_ROWS if IS_INTERPRETED else max(1, min(16, 256 * num_warps // block_n))
    return Tile(block_m, block_n, num_warps, num_stages=1)


def rotary_tile(head_dim: int) -> Tile:
    """Return the tile of a kernel that rotates pairs: block_m heads, and block_n pairs of a head.

    A thread holds 8 pairs, which in 16 bit are one load of 16 bytes for each half of a head.
    """
    block_n = min(128, max(16, triton.next_power_of_2(head_dim // 2)))
    return Tile(1024 // block_n, block_n, num_warps=4, num_stages=1)


def row_programs(x: Tensor) -> int:
    """Return the number of programs that share the rows of x (R, N) in the backward of a norm.

    Each program computes one partial sum. The result is the number of programs that the registers
    allow to run at once, or the number of row tiles if that is smaller.
    """
    tile = row_tile(x.shape[1])
    warps = 16 if tile.block_n <= 1024 else 12
    resident = max(1, warps // tile.num_warps)
    return min(ceil_div(x.shape[0], tile.block_m), resident * multiprocessors(x))


def run_sum_tile(columns: int, dtype: torch.dtype) -> Tile:
    """Return the tile of the kernel in embedding.py that sums runs of equal keys.

    The kernel multiplies block_m sorted rows by a matrix of 0 and 1. In 16 bits, the product runs
    on the matrix units. In fp32, the product is slow, so block_m is small.
    """
    if IS_INTERPRETED:
        return Tile(64, max(16, min(1024, triton.next_power_of_2(columns))), 4, num_stages=1)
    return Tile(16 if dtype == torch.float32 else 64, 128, num_warps=4, num_stages=1)


def partial_sums_tile() -> Tile:
    """Return the tile of partial sums over rows; block_m divides reduction.ROWS_PER_PARTIAL."""
    return Tile(128, 256, 4, 1) if IS_INTERPRETED else Tile(16, 128, 4, 1)


def sum_partials_tile() -> Tile:
    """Return the tile of the sum over a few hundred partial sums, whose time is mostly latency."""
    return Tile(32, 64, 4, 1) if IS_INTERPRETED else Tile(128, 32, 8, 1)


def elementwise_tile() -> Tile:
    """Return the tile of an elementwise kernel, which adds block_m rows to one partial sum."""
    return Tile(64, 512, 4, 1) if IS_INTERPRETED else Tile(64, 64, 8, 1)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of x's device, or 4 if x is not on a GPU."""
    return _multiprocessors(x.device.index) if x.is_cuda else 4


# The architecture for launches on tensors that are not on a GPU, such as 90 for sm_90. Tools that
# compile kernels without a GPU set this variable.
compiled_target = 90


def target_of(x: Tensor) -> int:
    """Return the architecture of x's GPU, such as 80 for sm_80; `compiled_target` without a GPU."""
    return _capability(x.device.index) if x.is_cuda else compiled_target


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
