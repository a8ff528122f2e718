"""Attention for Hopper GPUs is right when the PTX machine runs the PTX that nvcc compiles."""

from __future__ import annotations

import math
import random
from itertools import accumulate, product

import pytest
import torch
from _hopper_attention import compiled_in
from quick_cases import long_case

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytestmark = pytest.mark.each_value

SEED = torch.tensor([0x0123456789ABCDEF])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_in(tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def hopper(compiled):
    compiled.options = {}
    compiled.compiled.set_multiprocessors(2)
    return compiled


def drawn(batch, heads, queries, keys, dim, dtype=torch.bfloat16, seed=0):
    """Return random q, k and v of shape (batch, heads, length, dim)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        for n in (queries, keys, keys)
    ]


def forward(hopper, q, k, v, mask=None, scale=None, cu_seqlens=None, longest=None, dropout_p=0.0):
    """Return the attention output and the log-sum-exp."""
    if cu_seqlens is None:
        sizes = q.shape[2], k.shape[2]
    else:
        sizes = longest, longest
    return hopper.flash_attention_forward(
        q, k, v, mask, cu_seqlens, cu_seqlens, SEED, *sizes, dropout_p, scale or q.shape[-1] ** -0.5
    )


def check(hopper, q, k, v, mask=None, scale=None, dropout_p=0.0):
    out, lse = forward(hopper, q, k, v, mask, scale, dropout_p=dropout_p)
    options = {"mask": mask, "scale": scale, "dropout_p": dropout_p, "dropout_seed": SEED}
    oracle = reference.attention(q.double(), k.double(), v.double(), **options)
    yardstick = Yardstick(lambda: [reference.attention(q, k, v, **options)])
    assert_close("attention out", out, oracle, yardstick[0])
    scores = q.double() @ k.double().transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    # lse differs from float64 only by the polynomial and by the order of the summation.
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=5e-6)


def key_mask(batch, keys):
    mask = torch.rand(batch, 1, 1, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[-1, ..., : min(keys, 130)] = False
    return mask


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_against_float64(hopper, dim, dtype, masked, seed):
    hopper.options = {"seed": seed}
    q, k, v = drawn(2, 2, 150, 300, dim, dtype, seed)
    check(hopper, q, k, v, key_mask(2, 300) if masked else None)


@pytest.mark.parametrize("sizes", [(1, 97), (129, 1), (128, 128), (64, 127), (65, 129), (257, 640)])
@pytest.mark.parametrize("dim", [32, 64])
def test_lengths(hopper, dim, sizes):
    hopper.options = {"seed": 1}
    check(hopper, *drawn(1, 2, *sizes, dim), scale=0.3)


@pytest.mark.parametrize(
    ("dim", "masked", "dropout_p"),
    [(32, True, 0.1), (64, False, 0.1), (64, True, 1.0), (128, True, 0.1)],
)
def test_dropout(hopper, dim, masked, dropout_p):
    hopper.options = {"seed": 1}
    q, k, v = drawn(2, 2, 150, 300, dim)
    check(hopper, q, k, v, key_mask(2, 300) if masked else None, dropout_p=dropout_p)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_random_cases(hopper, dim, seed):
    hopper.options = {"seed": seed}
    chosen = random.Random(seed)
    queries, keys = chosen.randint(1, 300), chosen.randint(1, 600)
    dtype = chosen.choice([torch.bfloat16, torch.float16])
    q, k, v = drawn(chosen.randint(1, 2), chosen.randint(1, 2), queries, keys, dim, dtype, seed)
    mask = key_mask(len(q), keys) if chosen.random() < 0.5 else None
    check(hopper, q, k, v, mask, dropout_p=chosen.choice([0.0, 0.0, 0.2]))


def test_the_dropout_mask_is_the_definitions_bit_for_bit(hopper):
    """With equal weights and one-hot values, the output is 0 exactly where dropout drops a key."""
    q = torch.zeros(2, 2, 130, 64, dtype=torch.bfloat16)
    kept = reference.dropout_keep(SEED, 0.3, (2, 2, 130, 192))
    for first in (0, 64, 128):
        v = torch.zeros(2, 2, 192, 64, dtype=torch.bfloat16)
        v[:, :, first : first + 64] = torch.eye(64)
        out, _ = forward(hopper, q, torch.zeros_like(v), v, dropout_p=0.3)
        assert torch.equal(out != 0, kept[..., first : first + 64])


def test_one_query_has_a_mask_of_keys(hopper):
    """With one query, a mask of (query, key) pairs works as a mask of keys, with any stride."""
    mask = torch.rand(1, 1, 1, 97, generator=torch.Generator().manual_seed(1)) > 0.4
    check(hopper, *drawn(1, 2, 1, 97, 64), mask)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(hopper, sizes):
    out, lse = forward(hopper, *drawn(2, 2, *sizes, 64))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dim", [32, 64])
def test_poisoned_keys_change_no_bit(hopper, dim):
    q, k, v = drawn(2, 2, 40, 270, dim)
    mask = key_mask(2, 270)
    mask[0] = False
    clean = forward(hopper, q, k, v, mask)
    assert (clean[0][0] == 0).all()
    assert (clean[1][0] == -math.inf).all()
    hidden = ~mask[:, 0, 0]
    for x in (k, v):
        x.transpose(1, 2)[hidden] = torch.nan
    for seed in range(3):
        hopper.options = {"seed": seed}
        for a, b in zip(clean, forward(hopper, q, k, v, mask), strict=True):
            assert torch.equal(a, b)


def packed(lengths, slack=0, heads=2, dim=64):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(lengths) + slack, 3, heads, dim, generator=generator).bfloat16()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return rows, ends


@pytest.mark.parametrize(
    ("dim", "multiprocessors", "lengths"),
    [
        *product((64,), (1, 132), [(33, 0, 129, 1, 270), (0, 64, 0), (200,), (0, 0)]),
        (32, 1, (33, 0, 129, 1, 270)),
        (32, 132, (33, 0, 129, 1, 270)),
    ],
)
def test_packed_sequences_are_dense_ones_bit_for_bit(hopper, dim, multiprocessors, lengths):
    """Packing changes no bit. A NaN stays in its sequence, and rows outside sequences become 0."""
    hopper.compiled.set_multiprocessors(multiprocessors)
    rows, ends = packed(lengths, slack=9, dim=dim)
    rows[ends[-1] :] = torch.nan
    for number, (first, length) in enumerate(zip(ends.tolist(), lengths, strict=False)):
        hopper.options = {"seed": number}
        poisoned = torch.full_like(rows, torch.nan)
        poisoned[first : first + length] = rows[first : first + length]
        out, lse = forward(hopper, *poisoned.unbind(1), cu_seqlens=ends, longest=max(lengths))
        own = rows[None, first : first + length].unbind(2)
        alone = forward(hopper, *(x.transpose(1, 2) for x in own))
        assert torch.equal(out[first : first + length], alone[0][0].transpose(0, 1))
        assert torch.equal(lse[:, first : first + length], alone[1][0])
        assert (out[ends[-1] :] == 0).all()
        assert (lse[:, ends[-1] :] == -math.inf).all()


@pytest.mark.parametrize("multiprocessors", [1, *map(long_case, (5, 132))])
def test_any_schedule_gives_the_same_bits(hopper, multiprocessors):
    q, k, v = drawn(2, 3, 200, 400, 64)
    expected = forward(hopper, q, k, v)
    hopper.compiled.set_multiprocessors(multiprocessors)
    for seed in range(1, 4):
        hopper.options = {"seed": seed}
        for a, b in zip(expected, forward(hopper, q, k, v), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_memory_is_moved_in_whole_sectors_and_without_bank_conflicts(hopper, dim):
    forward(hopper, *drawn(1, 2, 256, 256, dim))
    counts = hopper.counts()
    assert counts["shared_wavefronts"] == counts["shared_least_wavefronts"]
    # One lane of four writes a log-sum-exp. The eight numbers that a warp writes fill a sector.
    assert counts["global_sectors"] == counts["global_least_sectors"]
    # Two work items of a head read all its keys and values. Queries and outputs are moved once.
    lse = 2 * 256 * 4
    assert counts["global_bytes"] == 2 * 256 * dim * 2 * (2 + 2 * 2) + lse


def test_blocks_get_equal_work(hopper):
    """Two blocks do equal work, because the scheduler assigns the longest sequence first."""
    hopper.compiled.set_multiprocessors(2)
    rows, ends = packed((100, 100, 100, 100, 500), heads=1)
    work = []
    for block in range(2):
        hopper.options = {"blocks": [block]}
        forward(hopper, *rows.unbind(1), cu_seqlens=ends, longest=500)
        work.append(hopper.counts()["tensor_flops"])
    # Four work items have four tiles of keys each, and four items have one tile.
    assert work[0] == work[1]


def test_more_sequences_than_a_block_sorts(hopper):
    rows, ends = packed([1] * 2100, heads=1)
    hopper.compiled.set_multiprocessors(132)
    hopper.options = {"blocks": [7]}
    out, _ = forward(hopper, *rows.unbind(1), cu_seqlens=ends, longest=1)
    # The output of a one-token sequence is its value. The machine runs only one of 132 blocks.
    assert torch.equal(out[7::132], rows[7::132, 2])


def test_a_head_dim_without_a_kernel_is_refused(hopper):
    x = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    options = None, None, None, None, 8, 8, 0.0, 0.1
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError -1"):
        hopper.flash_attention_forward(x, x, x, *options)


def test_a_dimension_that_broadcasts_has_no_tensor_map(hopper):
    q, k, v = drawn(2, 2, 8, 8, 64)
    with pytest.raises(RuntimeError, match="cudaError -1"):
        forward(hopper, q, k[:, :1].expand_as(k), v)
