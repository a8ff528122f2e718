"""Attention for Hopper GPUs is right with masks of (query, key) pairs, on the PTX machine."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise

import pytest
import torch
from _hopper_attention import LONGEST, SEED, compiled_in, drawn
from quick_cases import long_case

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytestmark = pytest.mark.each_value

NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_in(tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def hopper(compiled):
    compiled.options = {"limit": LONGEST, "seed": 1}
    compiled.compiled.set_multiprocessors(2)
    return compiled


def pairs(*shape, seed=1):
    """Return a random mask with all-false rows and columns, and an all-true tile if a tile fits."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., :128, :128] |= shape[-1] > 256
    mask[..., 128:256, 128:256] = False
    mask[..., 3, :] = False
    mask[..., 5::7] = False
    return mask


def solve(hopper, tensors, mask, dropout_p=0.0, ends=(None, None), longest=None):
    """Return the output, dq, dk, dv and the log-sum-exp."""
    q, k, v, dout = tensors
    sizes = longest or (q.shape[-2], k.shape[-2])
    options = mask, *ends, SEED, *sizes, dropout_p, q.shape[-1] ** -0.5
    out, lse = hopper.flash_attention_forward(q, k, v, *options)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    hopper.flash_attention_backward(*gradients, dout, q, k, v, out, lse, *options)
    return [out, *gradients, lse]


def check(hopper, tensors, mask, dropout_p=0.0):
    def expected(dtype=None):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors[:3]]
        options = {"mask": mask, "dropout_p": dropout_p, "dropout_seed": SEED}
        out = reference.attention(*leaves, **options)
        out.backward(tensors[3].to(out.dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    actual = solve(hopper, tensors, mask, dropout_p)
    oracle, yardstick = expected(torch.float64), Yardstick(expected)
    for i, name in enumerate(NAMES):
        assert_close(f"attention {name}", actual[i], oracle[i], yardstick[i])
    scores = tensors[0].double() @ tensors[1].double().transpose(-1, -2)
    scores = (scores * tensors[0].shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    assert torch.allclose(actual[4].double(), scores.logsumexp(-1), rtol=1e-6, atol=5e-6)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_against_float64(hopper, dim, dtype):
    check(hopper, drawn(2, 1, 150, 300, dim, dtype), pairs(2, 1, 150, 300))


@pytest.mark.parametrize("sizes", [(7, 97), (129, 2), (64, 127), (65, 129), (257, 384)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_lengths(hopper, dim, sizes):
    check(hopper, drawn(1, 1, *sizes, dim), pairs(1, 1, *sizes))


@pytest.mark.parametrize(("dim", "dropout_p"), [(32, 0.1), (64, 0.3), (128, 0.1), (64, 1.0)])
def test_dropout(hopper, dim, dropout_p):
    check(hopper, drawn(2, 2, 70, 150, dim), pairs(2, 1, 70, 150), dropout_p)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_random_cases(hopper, dim, seed):
    hopper.options["seed"] = seed
    chosen = random.Random(seed)
    batch, heads = chosen.randint(1, 2), chosen.randint(1, 2)
    queries, keys = chosen.randint(4, 300), chosen.randint(100, 400)
    dtype = chosen.choice([torch.bfloat16, torch.float16])
    shape = chosen.choice([1, batch]), chosen.choice([1, heads]), queries, keys
    tensors = drawn(batch, heads, queries, keys, dim, dtype, seed)
    check(hopper, tensors, pairs(*shape, seed=seed), chosen.choice([0.0, 0.0, 0.2]))


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.every_case
def test_a_mask_of_keys_for_each_query_gives_the_same_bits(hopper, dim, dropout_p):
    tensors = drawn(2, 1, 70, 270, dim)
    keys = torch.rand(2, 1, 1, 270, generator=torch.Generator().manual_seed(1)) > 0.4
    expected = solve(hopper, tensors, keys, dropout_p)
    assert_same(solve(hopper, tensors, keys.repeat(1, 1, 70, 1), dropout_p), expected)


def layouts():
    """Return masks that broadcast to the shape (2, 2, 40, 200) or have unusual strides."""
    whole = pairs(2, 2, 40, 200)
    wide = torch.zeros(2, 40, 2, 611, dtype=torch.bool).transpose(1, 2)
    wide[..., 1:600:3] = whole
    return {
        "heads": whole[:, :1],
        "batch": whole[:1],
        "both": whole[:1, 1:],
        "queries only": whole[..., 4:5].contiguous(),
        "keys first": whole.transpose(2, 3).contiguous().transpose(2, 3),
        "sliced": wide[..., 1:600:3],
        "an odd address": torch.nn.functional.pad(whole, (3, 2))[..., 3:-2],
        "other bytes than 1": (whole.to(torch.uint8) * 6).view(torch.bool),
    }


@pytest.mark.parametrize("layout", layouts())
def test_the_layout_of_a_mask_changes_no_bit(hopper, layout):
    tensors, mask = drawn(2, 2, 40, 200, 32), layouts()[layout]
    plain = torch.ones_like(mask, dtype=torch.bool).masked_fill_(mask.logical_not(), False)
    expected = solve(hopper, tensors, plain.expand(2, 2, 40, 200).contiguous())
    assert_same(solve(hopper, tensors, mask), expected)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_a_query_without_a_key_gives_0(hopper, dim):
    tensors, mask = drawn(1, 2, 140, 140, dim), pairs(1, 2, 140, 140)
    mask[:, 1, 64:] = False
    out, dq, _, _, lse = solve(hopper, tensors, mask)
    empty = ~mask.any(-1)
    assert empty.sum() == 2 + 76
    for x in (out, dq):
        assert (x[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.every_case
def test_keys_that_no_query_attends_change_no_bit(hopper, dim):
    tensors, mask = drawn(2, 1, 140, 270, dim), pairs(2, 1, 140, 270)
    mask[0, :, :, 128:256] = False
    mask[1, :, :, 140:] = False
    clean = solve(hopper, tensors, mask)
    hidden = ~mask.any(-2)
    assert hidden.sum() > 128
    for x in tensors[1:3]:
        x[hidden] = torch.nan
    for gradient in clean[2:4]:
        assert (gradient[hidden] == 0).all()
    for seed in range(2):
        hopper.options["seed"] = seed
        assert_same(solve(hopper, tensors, mask), clean)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("dim", "multiprocessors"), [long_case(32, 1), (64, 1), long_case(64, 132), long_case(128, 1)]
)
@pytest.mark.every_case
def test_packed_sequences_are_dense_ones_bit_for_bit(hopper, dim, multiprocessors, shared):
    """Packed sequences have the bits of dense sequences, with one shared mask or one mask each."""
    lengths = ((33, 0, 129, 1, 70), (40, 5, 140, 1, 0))
    ends = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in lengths]
    longest = tuple(map(max, lengths))
    mask = pairs(1 if shared else 5, 2, *longest)
    generator = torch.Generator().manual_seed(3)
    of = (0, 1, 1, 0)
    rows = [torch.randn(sum(lengths[i]) + 9, 2, dim, generator=generator).bfloat16() for i in of]
    for number in range(5):
        own = [slice(*list(pairwise(ends[i].tolist()))[number]) for i in of]
        poisoned = [torch.full_like(x, torch.nan) for x in rows]
        for to, x, place in zip(poisoned, rows, own, strict=True):
            to[place] = x[place]
        hopper.compiled.set_multiprocessors(multiprocessors)
        together = solve(hopper, poisoned, mask, 0.0, ends, longest)
        alone = [x[None, place].transpose(1, 2) for x, place in zip(rows, own, strict=True)]
        queries, keys = (x[number] for x in lengths)
        hopper.compiled.set_multiprocessors(2)
        expected = solve(hopper, alone, mask[0 if shared else number, None, :, :queries, :keys])
        places = own[0], *own[:3]
        for a, b, place in zip(together[:4], expected[:4], places, strict=True):
            assert torch.equal(a[place], b[0].transpose(0, 1))
        assert torch.equal(together[4][:, own[0]], expected[4][0])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_queries_or_no_keys(hopper, dim, sizes):
    for result in solve(hopper, drawn(2, 2, *sizes, dim), torch.ones(*sizes, dtype=torch.bool))[:4]:
        assert (result == 0).all()


@pytest.mark.parametrize(
    ("dim", "multiprocessors"),
    [long_case(32, 3), (64, 1), *(long_case(dim, 3) for dim in (64, 128))],
)
@pytest.mark.every_case
def test_any_schedule_gives_the_same_bits(hopper, dim, multiprocessors):
    tensors, mask = drawn(2, 2, 140, 400, dim), pairs(2, 1, 140, 400)
    expected = solve(hopper, tensors, mask)
    hopper.compiled.set_multiprocessors(multiprocessors)
    for seed in range(2, 5):
        hopper.options["seed"] = seed
        assert_same(solve(hopper, tensors, mask), expected)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_memory_is_moved_in_whole_sectors_and_without_bank_conflicts(hopper, dim):
    tensors, mask = drawn(1, 2, 256, 256, dim), pairs(1, 1, 256, 256)
    hopper.compiled.reports.clear()
    solve(hopper, tensors, mask)
    counts = [report.counts for _, report in hopper.compiled.reports]
    for c in counts:
        assert c["shared_wavefronts"] == c["shared_least_wavefronts"]
        assert c["global_sectors"] == c["global_least_sectors"]
    # The heads share the mask. In each direction, the packing reads the mask's bytes once and
    # writes one bit for each byte.
    bits = 256 * 256 // 8
    assert [c["global_bytes"] for c in (counts[0], counts[2])] == [9 * bits] * 2
    # For each head, the forward reads the bits once. The backward reads the bits twice: first to
    # find the attended keys, and then for the tiles.
    rows = 2 * 256 * dim * 2
    assert counts[1]["global_bytes"] == rows * (2 + 2 * 2) + 2 * 256 * 4 + 2 * bits
    sums = 2 * 2 * rows + 2 * 4 * 256 * 4
    assert counts[3]["global_bytes"] == rows * (2 + 2 * 2 + 1 + 3) + sums + 2 * 2 * bits
