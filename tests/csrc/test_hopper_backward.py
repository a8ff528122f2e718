"""The backward of attention for Hopper GPUs is right on the PTX machine, with nvcc's PTX."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
from _hopper_attention import LONGEST, SEED, compiled_in, drawn
from quick_cases import long_case

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytestmark = pytest.mark.each_value

NAMES = ("dq", "dk", "dv")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_in(tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def hopper(compiled):
    compiled.options = {"limit": LONGEST}
    compiled.compiled.set_multiprocessors(2)
    return compiled


def forward(q, k, v, mask=None, dropout_p=0.0):
    """Return out and the log-sum-exp, computed in float64 and rounded to the forward's dtypes."""
    options = {"mask": mask, "dropout_p": dropout_p, "dropout_seed": SEED}
    out = reference.attention(q.double(), k.double(), v.double(), **options).to(q.dtype)
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return out, scores.logsumexp(-1).float()


def backward(hopper, tensors, out, lse, mask=None, dropout_p=0.0, ends=None, longest=None):
    """Return dq, dk and dv, which the kernel writes to memory full of NaN."""
    q, k, v, dout = tensors
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    sizes = (q.shape[2], k.shape[2]) if ends is None else (longest, longest)
    hopper.flash_attention_backward(
        *gradients,
        dout,
        q,
        k,
        v,
        out,
        lse,
        mask,
        ends,
        ends,
        SEED,
        *sizes,
        dropout_p,
        q.shape[-1] ** -0.5,
    )
    return gradients


def check(hopper, tensors, mask=None, dropout_p=0.0):
    def solve(dtype=None):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors[:3]]
        options = {"mask": mask, "dropout_p": dropout_p, "dropout_seed": SEED}
        out = reference.attention(*leaves, **options)
        out.backward(tensors[3].to(out.dtype))
        return [x.grad for x in leaves]

    statistics = forward(*tensors[:3], mask, dropout_p)
    actual = backward(hopper, tensors, *statistics, mask, dropout_p)
    oracle, yardstick = solve(torch.float64), Yardstick(solve)
    for i, name in enumerate(NAMES):
        assert_close(f"attention {name}", actual[i], oracle[i], yardstick[i])


def key_mask(batch, keys):
    mask = torch.rand(batch, 1, 1, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    # In the last sequence, the mask hides all keys of the first block.
    mask[-1, ..., : min(keys - 1, 130)] = False
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_against_float64(hopper, dim, dtype, masked):
    hopper.options["seed"] = 1
    check(hopper, drawn(2, 1, 150, 300, dim, dtype), key_mask(2, 300) if masked else None)


@pytest.mark.parametrize("sizes", [(1, 97), (129, 2), (64, 127), (65, 129), (330, 260)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_lengths(hopper, dim, sizes):
    hopper.options["seed"] = 2
    check(hopper, drawn(1, 1, *sizes, dim))


@pytest.mark.parametrize(
    ("dim", "masked", "dropout_p"),
    [
        (32, True, 0.1),
        (64, False, 0.1),
        (64, True, 0.3),
        (64, False, 1.0),
        (128, True, 0.1),
        (128, False, 1.0),
    ],
)
def test_dropout(hopper, dim, masked, dropout_p):
    hopper.options["seed"] = 1
    check(hopper, drawn(2, 1, 70, 150, dim), key_mask(2, 150) if masked else None, dropout_p)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_random_cases(hopper, dim, seed):
    hopper.options["seed"] = seed
    chosen = random.Random(seed)
    queries, keys = chosen.randint(1, 300), chosen.randint(1, 400)
    dtype = chosen.choice([torch.bfloat16, torch.float16])
    tensors = drawn(chosen.randint(1, 2), 1, queries, keys, dim, dtype, seed)
    # With only one attended key, dq is 0 exactly. Under dropout, the rounding of out makes dq
    # inexact, so short rows have no mask.
    masked = chosen.random() < 0.5 and keys > 150
    mask = key_mask(len(tensors[0]), keys) if masked else None
    check(hopper, tensors, mask, chosen.choice([0.0, 0.0, 0.2]))


@pytest.mark.parametrize("dim", [64, 128])
def test_the_dropout_mask_is_the_definitions_bit_for_bit(hopper, dim):
    """With equal weights and one-hot rows of dout, dv is 0 exactly where dropout drops a weight."""
    kept = reference.dropout_keep(SEED, 0.3, (2, 2, dim, 200))
    q, k, v, _ = (torch.zeros_like(x) for x in drawn(2, 2, dim, 200, dim))
    dout = torch.eye(dim).bfloat16().expand(2, 2, dim, dim).contiguous()
    _, _, dv = backward(hopper, [q, k, v, dout], *forward(q, k, v, None, 0.3), dropout_p=0.3)
    assert torch.equal(dv != 0, kept.transpose(2, 3))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_queries_or_no_keys(hopper, dim, sizes):
    tensors = drawn(2, 2, *sizes, dim)
    for gradient in backward(hopper, tensors, *forward(*tensors[:3])):
        assert (gradient == 0).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_the_gradient_of_a_single_key_is_0(hopper, dim):
    tensors = drawn(1, 2, 70, 1, dim)
    dq, dk, _ = backward(hopper, tensors, *forward(*tensors[:3]))
    assert (dq == 0).all()
    assert (dk == 0).all()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_poisoned_keys_change_no_bit(hopper, dim):
    tensors = drawn(2, 2, 40, 270, dim)
    mask = key_mask(2, 270)
    mask[0] = False
    statistics = forward(*tensors[:3], mask)
    clean = backward(hopper, tensors, *statistics, mask)
    assert (clean[0][0] == 0).all()
    hidden = ~mask[:, 0, 0]
    for x in tensors[1:3]:
        x.transpose(1, 2)[hidden] = torch.nan
    for gradient in clean[1:]:
        assert (gradient.transpose(1, 2)[hidden] == 0).all()
    for seed in range(2):
        hopper.options["seed"] = seed
        for a, b in zip(clean, backward(hopper, tensors, *statistics, mask), strict=True):
            assert torch.equal(a, b)


def packed(lengths, slack=0, heads=2, dim=64):
    """Return q, k, v and dout in one tensor, then out, the log-sum-exp, and the sequence ends."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(lengths) + slack, 4, heads, dim, generator=generator).bfloat16()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    out = torch.zeros_like(rows[:, 0])
    lse = torch.full((heads, len(rows)), -math.inf)
    for first, length in zip(ends.tolist(), lengths, strict=False):
        own = slice(first, first + length)
        result = forward(*(x[None, own].transpose(1, 2) for x in rows.unbind(1)[:3]))
        out[own], lse[:, own] = result[0][0].transpose(0, 1), result[1][0]
    return rows, out, lse, ends


@pytest.mark.parametrize(
    ("dim", "lengths", "multiprocessors"),
    [
        (32, (33, 0, 129, 1, 70), 1),
        long_case(64, (33, 0, 129, 1, 70), 1),
        long_case(128, (33, 0, 129, 1, 70), 1),
        (64, (33, 0, 70), 132),
        (64, (0, 64, 0), 1),
        (64, (0, 0), 1),
    ],
)
def test_packed_sequences_are_dense_ones_bit_for_bit(hopper, dim, lengths, multiprocessors):
    """Packing changes no bit. A NaN stays in its sequence, and rows outside sequences become 0."""
    hopper.compiled.set_multiprocessors(multiprocessors)
    rows, out, lse, ends = packed(lengths, slack=9, dim=dim)
    for number, (first, length) in enumerate(zip(ends.tolist(), lengths, strict=False)):
        hopper.options["seed"] = number
        own = slice(first, first + length)
        poisoned = [torch.full_like(x, torch.nan) for x in (rows, out, lse)]
        poisoned[0][own], poisoned[1][own], poisoned[2][:, own] = rows[own], out[own], lse[:, own]
        together = backward(
            hopper, poisoned[0].unbind(1), *poisoned[1:], ends=ends, longest=max(lengths)
        )
        dense = [x[None, own].transpose(1, 2) for x in (*rows.unbind(1), out)]
        alone = backward(hopper, dense[:4], dense[4], lse[None, :, own].contiguous())
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[own], b[0].transpose(0, 1))
            assert (a[ends[-1] :] == 0).all()


@pytest.mark.parametrize("sizes", [((40, 0, 70), (0, 30, 130)), ((0, 0), (5, 20))])
def test_sequences_without_queries_or_without_keys(hopper, sizes):
    """A sequence without queries or without keys has zero gradients, at any place in the batch."""
    queries, keys = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in sizes)
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (
        torch.randn(int(ends[-1]), 1, 64, generator=generator).bfloat16()
        for ends in (queries, keys, keys, queries)
    )
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lse = torch.full((1, len(q)), -math.inf)
    for i in range(len(sizes[0])):
        rows, columns = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        lse[:, rows] = forward(
            *(x[None].transpose(1, 2) for x in (q[rows], k[columns], v[columns]))
        )[1][0]
    longest = max(sizes[0]), max(sizes[1])
    hopper.flash_attention_backward(
        *gradients, dout, q, k, v, torch.zeros_like(q), lse, None, queries, keys, None, *longest,
        0.0, 0.125,
    )  # fmt: skip
    for i in range(len(sizes[0])):
        rows, columns = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        for gradient, own in zip(gradients, (rows, columns, columns), strict=True):
            assert gradient[own].isfinite().all()
            if sizes[0][i] == 0 or sizes[1][i] == 0:
                assert (gradient[own] == 0).all()


@pytest.mark.parametrize(("dim", "multiprocessors"), [(32, 3), (64, 1), (64, 3), (128, 3)])
@pytest.mark.every_case
def test_any_schedule_gives_the_same_bits(hopper, dim, multiprocessors):
    tensors = drawn(2, 2, 130, 140, dim)
    statistics = forward(*tensors[:3])
    expected = backward(hopper, tensors, *statistics)
    hopper.compiled.set_multiprocessors(multiprocessors)
    for seed in range(1, 4):
        hopper.options["seed"] = seed
        for a, b in zip(expected, backward(hopper, tensors, *statistics), strict=True):
            assert torch.equal(a, b)


def test_more_sequences_than_a_block_sorts(hopper):
    rows, out, lse, ends = packed([1] * 2100, heads=1)
    hopper.compiled.set_multiprocessors(132)
    hopper.options["blocks"] = [7]
    dq, _, dv = backward(hopper, rows.unbind(1), out, lse, ends=ends, longest=1)
    # The weight of a single key is 1, so dv equals dout. The machine runs only one of 132 blocks.
    assert torch.allclose(dv[7::132].float(), rows[7::132, 3].float(), rtol=2**-7)
    assert (dq[7::132] == 0).all()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_memory_is_moved_in_whole_sectors_and_without_bank_conflicts(hopper, dim):
    tensors = drawn(1, 1, 256, 256, dim)
    backward(hopper, tensors, *forward(*tensors[:3]))
    counts = hopper.counts()
    assert counts["shared_wavefronts"] == counts["shared_least_wavefronts"]
    assert counts["global_sectors"] == counts["global_least_sectors"]
    # out is read once, q and dout are read for both blocks of keys, and dq is summed in fp32.
    rows = 256 * dim * 2
    assert counts["global_bytes"] == rows * (2 + 2 * 2 + 1 + 3) + 2 * 2 * rows + 4 * 256 * 4


def test_a_head_dim_without_a_kernel_is_refused(hopper):
    x = torch.zeros(1, 1, 8, 96, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the launcher returned the cudaError -1"):
        backward(hopper, [x] * 4, x, torch.zeros(1, 1, 8))


def test_a_gradient_that_broadcasts_has_no_tensor_map(hopper):
    q, k, v, dout = drawn(2, 2, 8, 8)
    with pytest.raises(RuntimeError, match="cudaError -1"):
        backward(hopper, [q, k, v, dout[:, :1].expand_as(dout)], *forward(q, k, v))
