"""The splade launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, normal

from fastbert import reference
from fastbert.kernels import splade_backward as backward
from fastbert.kernels.splade import splade_forward
from fastbert.kernels.splade_backward import splade_backward
from fastbert.kernels.tiles import splade_tile
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

NAMES = ("y", "dhidden", "dweight", "dbias")
# A tile of the interpreter has 128 tokens and 128 classes, and a list is read in blocks of 64 in
# the tests that set LIST_BLOCK.
LENGTHS = (0, 1, 60, 140, 0, 0, 37, 300, 0)


def ends_of(*lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def draw(lengths, depth, classes, dtype, device, *, slack=0, bias=True, shift=0.0):
    """Return random [hidden, weight, bias or None, cu_seqlens]."""
    return [
        normal(sum(lengths) + slack, depth, dtype=dtype, device=device),
        normal(classes, depth, dtype=dtype, device=device, scale=depth**-0.5),
        normal(classes, dtype=dtype, device=device) + shift if bias else None,
        ends_of(*lengths, device=device),
    ]


def run(given, dy):
    """Return [y, dhidden, dweight, (dbias)]."""
    y, logits, rows = splade_forward(*given, save=True)
    gradients = splade_backward(dy, *given, logits, rows)
    return [y, *(g for g in gradients if g is not None)]


def expected(given, dy, dtype):
    """Return the results of `run`, but from the reference in `dtype` on the CPU."""
    leaves = [None if x is None else x.cpu().to(dtype).requires_grad_() for x in given[:3]]
    y = reference.splade(*leaves, cu_seqlens=given[3].cpu())
    leaves = [x for x in leaves if x is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.cpu().to(dtype))]


def random_gradient(given):
    hidden, weight, _, ends = given
    return normal(len(ends) - 1, len(weight), dtype=hidden.dtype, device=hidden.device)


def judge(given):
    dy = random_gradient(given)
    actual, oracle = run(given, dy), expected(given, dy, torch.float64)
    yardstick = Yardstick(lambda: expected(given, dy, given[0].dtype))
    for name, *triple in zip(NAMES[: len(actual)], actual, oracle, yardstick, strict=True):
        assert_close(name, *triple)
    return actual


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("lengths", "depth", "classes", "dtype", "slack", "bias"),
    [
        (LENGTHS, 40, 301, SINGLE, 3, True),
        (LENGTHS, 72, 130, HALF, 0, True),
        (LENGTHS, 111, 301, BRAIN, 200, True),
        ((5, 130), 64, 129, BRAIN, 0, False),
        ((1,), 1, 1, SINGLE, 0, True),
        ((4,), 300, 70, HALF, 0, False),
    ],
)
def test_against_oracle(lengths, depth, classes, dtype, slack, bias, device):
    given = draw(lengths, depth, classes, dtype, device, slack=slack, bias=bias)
    y, dhidden, *_ = judge(given)
    assert not dhidden[sum(lengths) :].any()
    assert not y[[i for i, length in enumerate(lengths) if length == 0]].any()


def test_few_positive_logits(device):
    judge(draw((25, 200, 3), 64, 130, SINGLE, device, shift=-2.0))


def test_small_integers_are_exact_and_the_first_of_equal_logits_is_taken(device):
    hidden, weight, bias = (
        torch.randint(-3, 4, shape).float().to(device) for shape in ((330, 48), (300, 48), (300,))
    )
    ends = ends_of(20, 310, device=device)
    _, logits, rows = splade_forward(hidden, weight, bias, ends, save=True)
    products = (hidden.cpu() @ weight.cpu().t() + bias.cpu()).split((20, 310))
    assert torch.equal(logits.cpu(), torch.stack([each.max(0).values for each in products]))
    first = torch.stack([(each == each.max(0).values).int().argmax(0) for each in products])
    first[1] += 20
    assert torch.equal(rows.cpu(), torch.where(logits.cpu() > 0, first, -1).int())


def test_the_lists_have_every_class_once_in_order(device, monkeypatch):
    monkeypatch.setattr(backward, "LIST_BLOCK", 64)
    given = draw((150, 0, 300, 20), 32, 301, SINGLE, device, slack=140)
    hidden, weight, _, ends = given
    _, _, rows = splade_forward(*given, save=True)
    head = backward.Head(hidden, weight, ends)
    lists = torch.full(rows.shape, -1, dtype=torch.int32, device=device)
    tiles = torch.empty((5, head.tiles), dtype=torch.int32, device=device)
    backward._lists_launch(head, rows, lists, tiles).run(on=rows)
    size, used = splade_tile("dhidden", SINGLE)[0].block_m, set()
    for sequence, first, end, start, count in tiles.t().tolist():
        classes = lists[sequence, start : start + count] if sequence < 4 else lists[:0, 0]
        assert 0 <= end - first <= size
        used.update(range(first, end))
        if first == end or sequence == 4:
            assert count == 0
            continue
        assert (first - int(ends[sequence])) % size == 0
        is_inside = (rows[sequence] >= first) & (rows[sequence] < end)
        assert classes.tolist() == is_inside.nonzero().flatten().tolist()
    assert used == set(range(len(hidden)))
    judge(given)


def test_log1p_of_small_and_large_logits(device):
    logits = torch.cat([torch.logspace(-38, 38, 500), torch.tensor([1e-45, 0.0, -0.0, -1.0])])
    logits = torch.cat([logits, torch.tensor([1.0, 2.0, torch.finfo(SINGLE).max])]).to(device)
    one = torch.ones(1, 1, device=device)
    y, *_ = splade_forward(one, logits[:, None], None, ends_of(1, device=device), save=False)
    exact = logits.double().clamp(min=0).log1p()
    error = (y[0].double() - exact).abs() / exact.clamp(min=1e-38)
    # One rounding error of a result is 6e-8.
    assert error.max() < 1.5e-7
    assert (y[0] >= 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinite_and_nan_logits(device):
    hidden = torch.tensor([[1.0], [2.0]], device=device)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], device=device)
    given = (hidden, values[:, None], None, ends_of(2, device=device))
    y, logits, rows = splade_forward(*given, save=True)
    assert y[0, :2].tolist() == [torch.inf, 0]
    assert y[0, 2].isnan()
    assert rows.tolist() == [[0, -1, -1, 1]]
    _, dweight, _ = splade_backward(torch.ones_like(y), *given, logits, rows)
    assert dweight.flatten()[:3].tolist() == [0, 0, 0]


def test_nan_in_a_sequence_stays_in_the_sequence(device):
    given = draw((70, 200, 30), 40, 301, SINGLE, device)
    dy = random_gradient(given)
    clean = run(given, dy)
    given[0][75] = float("nan")
    y, dhidden, *_ = run(given, dy)
    assert y[1].isnan().all()
    others = [0, 2]
    assert torch.equal(y[others], clean[0][others])
    outside = [*range(70), *range(270, 300)]
    assert torch.equal(dhidden[outside], clean[1][outside])
    assert not dhidden[70:270].any()


def test_rows_after_the_last_sequence_are_not_read(device):
    given = draw((20, 30), 40, 130, HALF, device, slack=9)
    dy = random_gradient(given)
    clean = run(given, dy)
    given[0][50:] = float("nan")
    assert same(run(given, dy), clean)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_a_sequence_has_the_same_bits_in_every_batch(dtype, device):
    lengths = (150, 20, 0, 300)
    given = draw(lengths, 40, 301, dtype, device)
    dy = random_gradient(given)
    y, dhidden, *_ = run(given, dy)
    begin = 0
    for number, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        alone = [given[0][rows], *given[1:3], ends_of(length, device=device)]
        own_y, own_dhidden, *_ = run(alone, dy[number : number + 1])
        assert torch.equal(own_y[0], y[number])
        assert torch.equal(own_dhidden, dhidden[rows])
        begin += length


def test_reruns_agree_bitwise(device):
    given = draw(LENGTHS, 40, 301, BRAIN, device)
    dy = random_gradient(given)
    assert same(run(given, dy), run(given, dy))


def test_strided_inputs(device):
    hidden, weight, bias, ends = given = draw((50, 20), 50, 130, SINGLE, device)
    dy = torch.ones(2, 130, device=device)
    dense = run(given, dy)
    wide = torch.full((70, 201), float("nan"), device=device)
    wide[:, 1:101:2] = hidden
    spread = torch.zeros(3, 2, dtype=torch.int32, device=device)
    spread[:, 0] = ends
    views = [wide[:, 1:101:2], weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]]
    dy = torch.ones((), device=device).expand(2, 130)
    assert same(run([*views, spread[:, 0]], dy), dense)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
@pytest.mark.parametrize("slack", [0, 5])
def test_no_tokens(lengths, slack, device):
    given = draw(lengths, 8, 20, SINGLE, device, slack=slack)
    results = run(given, random_gradient(given))
    assert [x.shape for x in results] == [(len(lengths), 20), *(x.shape for x in given[:3])]
    assert all(torch.count_nonzero(x) == 0 for x in results)


def test_nothing_is_kept_without_a_gradient(device):
    given = draw((5, 9), 8, 20, SINGLE, device)
    y, logits, rows = splade_forward(*given, save=False)
    assert logits is rows is None
    assert torch.equal(y, splade_forward(*given, save=True)[0])
