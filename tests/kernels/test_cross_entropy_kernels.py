"""The linear_cross_entropy launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, normal
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import reference
from fastbert.kernels import cross_entropy, cross_entropy_backward
from fastbert.kernels.cross_entropy import linear_cross_entropy_forward
from fastbert.kernels.cross_entropy_backward import linear_cross_entropy_backward
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

NAMES = ("loss", "dhidden", "dweight", "dbias")


def inputs(rows, depth, vocabulary, dtype, device, *, bias=True, labelled=0.7, logits=1.0):
    """Return random [hidden, weight, bias or None, labels]; the label -100 means no label."""
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    labels[torch.rand(rows, device=device) >= labelled] = -100
    return [
        normal(rows, depth, dtype=dtype, device=device, scale=logits),
        normal(vocabulary, depth, dtype=dtype, device=device, scale=max(depth, 1) ** -0.5),
        normal(vocabulary, dtype=dtype, device=device) if bias else None,
        labels,
    ]


def run(given, *, ignore_index=-100, reduction="mean", dloss=None):
    """Return [loss, dhidden, dweight, (dbias)] for `dloss`, or for a random gradient if None."""
    loss, statistics, order = linear_cross_entropy_forward(
        *given, ignore_index=ignore_index, reduction=reduction
    )
    dloss = torch.randn(loss.shape, device=loss.device) if dloss is None else dloss
    gradients = linear_cross_entropy_backward(dloss, *given, statistics, order, reduction=reduction)
    return [loss, *(g for g in gradients if g is not None)]


def expected(given, dloss, dtype, **options):
    """Return the results of `run`, but from the reference in `dtype` on the CPU."""
    leaves = [None if x is None else x.cpu().to(dtype).requires_grad_() for x in given[:3]]
    labels = given[3].cpu()
    loss = reference.linear_cross_entropy(*leaves, labels, **options)
    leaves = [x for x in leaves if x is not None]
    return [loss.detach(), *torch.autograd.grad(loss, leaves, dloss.cpu().to(loss.dtype))]


def judge(given, **options):
    shape = given[3].shape if options.get("reduction") == "none" else ()
    dloss = torch.randn(shape, device=given[0].device)
    actual = run(given, dloss=dloss, **options)
    oracle = expected(given, dloss, torch.float64, **options)
    yardstick = Yardstick(lambda: expected(given, dloss, given[0].dtype, **options))
    for name, *triple in zip(NAMES[: len(actual)], actual, oracle, yardstick, strict=True):
        assert_close(name, *triple)
    return actual


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("rows", "depth", "vocabulary", "dtype", "bias", "labelled", "reduction"),
    [
        (200, 72, 301, SINGLE, True, 0.7, "mean"),
        (65, 64, 130, SINGLE, False, 1.0, "none"),
        (200, 72, 301, HALF, True, 0.7, "none"),
        (300, 64, 515, HALF, True, 0.2, "sum"),
        (200, 111, 301, BRAIN, True, 0.7, "mean"),
        (140, 64, 129, BRAIN, False, 1.0, "sum"),
        (130, 59, 1, SINGLE, True, 0.5, "mean"),
    ],
)
def test_against_oracle(rows, depth, vocabulary, dtype, bias, labelled, reduction, device):
    given = inputs(rows, depth, vocabulary, dtype, device, bias=bias, labelled=labelled)
    judge(given, reduction=reduction)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_logits_of_ten_thousand(dtype, device):
    judge(inputs(150, 64, 260, dtype, device, logits=1e4, bias=False), reduction="none")


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_the_vocabulary_in_chunks(dtype, device, monkeypatch):
    given = inputs(70, 40, 260, dtype, device)
    dloss = torch.ones((), device=device)
    whole = run(given, dloss=dloss)
    monkeypatch.setattr(cross_entropy_backward, "GRADIENT_BYTES", 0)
    monkeypatch.setattr(cross_entropy_backward, "FEWEST_COLUMNS", 128)
    dhidden = judge(given)[1]
    # Each column of the vocabulary is in one chunk, so the chunks do not change a column's sums.
    assert same(run(given, dloss=dloss)[2:], whole[2:])
    assert torch.count_nonzero(dhidden[given[3] == -100]) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_list_of_rows(dtype, device, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LIST_BLOCK", 64)
    hidden, weight, bias, labels = inputs(200, 16, 20, SINGLE, device, labelled=0.3)
    spread = torch.zeros(200, 3, dtype=dtype, device=device)
    spread[:, 1] = labels
    loss, _, order = linear_cross_entropy_forward(
        hidden, weight, bias, spread[:, 1], ignore_index=-100, reduction="mean"
    )
    labelled, others = (torch.nonzero(m).flatten().tolist() for m in (labels >= 0, labels < 0))
    assert order.tolist() == [*labelled, *reversed(others), len(labelled)]
    assert torch.equal(loss, run([hidden, weight, bias, labels])[0])


@pytest.mark.parametrize("ignore_index", [3, -1, 1, -(2**63), 2**63 - 1])
def test_any_ignore_index(ignore_index, device):
    given = inputs(70, 16, 20, SINGLE, device)
    given[3][given[3] == -100] = ignore_index
    judge(given, ignore_index=ignore_index)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_label(reduction, device):
    """If no row has a label, all results are 0, although hidden is full of NaN."""
    given = inputs(70, 16, 20, SINGLE, device, labelled=0.0)
    given[0].fill_(float("nan"))
    assert all(torch.count_nonzero(x) == 0 for x in run(given, reduction=reduction))


def test_rows_without_a_label_are_not_read(device):
    given = inputs(150, 40, 200, HALF, device)
    dloss = torch.ones((), device=device)
    clean = run(given, dloss=dloss)
    poisoned = given[0].clone()
    poisoned[given[3] == -100] = float("inf")
    assert same(run([poisoned, *given[1:]], dloss=dloss), clean)


def test_nan_in_a_row_stays_in_its_row(device):
    """NaN in the first labelled row, whose copies also pad the last tile, reaches no other row."""
    given = inputs(150, 40, 200, SINGLE, device)
    dloss = torch.ones(150, device=device)
    loss, dhidden, *_ = run(given, reduction="none", dloss=dloss)
    first = int((given[3] != -100).nonzero()[0])
    given[0][first] = float("nan")
    nan_loss, nan_dhidden, *_ = run(given, reduction="none", dloss=dloss)
    assert nan_loss[first].isnan()
    assert nan_dhidden[first].isnan().all()
    others = torch.arange(150, device=device) != first
    assert same([nan_loss[others], nan_dhidden[others]], [loss[others], dhidden[others]])


def test_a_row_has_the_same_bits_in_every_batch(device):
    given = inputs(150, 40, 389, SINGLE, device, labelled=1.0)
    losses = run(given, reduction="none")[0]
    few = [given[0][100:103], *given[1:3], given[3][100:103]]
    assert torch.equal(run(few, reduction="none")[0], losses[100:103])


def test_a_label_outside_the_vocabulary_is_nan_and_harms_no_other_row(device):
    given = inputs(70, 16, 130, SINGLE, device, labelled=1.0)
    dloss = torch.ones(70, device=device)
    clean = run(given, reduction="none", dloss=dloss)
    for row, label in enumerate((130, 131, -1, 2**62, -(2**62))):
        given[3][row] = label
    loss, dhidden, *_ = run(given, reduction="none", dloss=dloss)
    assert loss[:5].isnan().all()
    assert dhidden[:5].isnan().all()
    assert same([loss[5:], dhidden[5:]], [clean[0][5:], clean[1][5:]])
    assert run(given)[0].isnan()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [-float("inf"), torch.finfo(SINGLE).min])
def test_words_that_a_bias_forbids(value, device):
    """Words with a bias of -inf or finfo.min get no gradient, even if they fill the first tile."""
    given = inputs(70, 16, 300, SINGLE, device)
    given[3] = torch.where(given[3] < 0, given[3], given[3] % 20 + 280)
    given[2][:200] = value
    _, _, dweight, dbias = judge(given)
    assert torch.count_nonzero(dweight[:200]) == torch.count_nonzero(dbias[:200]) == 0


def test_strided_inputs(device):
    hidden, weight, bias, labels = inputs(70, 50, 130, SINGLE, device)
    dloss = torch.randn((), device=device)
    dense = run([hidden, weight, bias, labels], reduction="none", dloss=dloss.repeat(70))
    wide = torch.full((70, 201), float("nan"), device=device)
    wide[:, 1:101:2] = hidden
    views = [wide[:, 1:101:2], weight.T.contiguous().T, bias, labels]
    assert same(run(views, reduction="none", dloss=dloss.expand(70)), dense)


def test_reruns_agree_bitwise(device):
    given = inputs(200, 40, 389, BRAIN, device)
    dloss = torch.ones((), device=device)
    assert same(run(given, dloss=dloss), run(given, dloss=dloss))


@pytest.mark.parametrize(
    ("rows", "depth", "vocabulary"), [(0, 8, 4), (0, 8, 0), (5, 0, 4), (5, 8, 0), (0, 0, 0)]
)
def test_empty_sizes(rows, depth, vocabulary, device):
    given = inputs(rows, depth, max(vocabulary, 1), SINGLE, device)
    given[1:3] = given[1][:vocabulary], given[2][:vocabulary]
    if vocabulary == 0:
        given[3].fill_(-100)
    loss, *gradients = run(given)
    assert [g.shape for g in gradients] == [x.shape for x in given[:3]]
    assert all(torch.isfinite(x).all() for x in (loss, *gradients))


class Recorder(TorchDispatchMode):
    """Record the operators that run, and the size in bytes of every returned tensor."""

    def __init__(self):
        super().__init__()
        self.operators, self.bytes = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operators.add(str(function))
        if isinstance(result, torch.Tensor):
            self.bytes.append(result.numel() * result.itemsize)
        return result


def test_nothing_of_logits_size_is_allocated_and_no_other_operator_runs(device, monkeypatch):
    """The only torch operator is an allocation of less than all logits; none computes or waits."""
    monkeypatch.setattr(cross_entropy_backward, "FEWEST_COLUMNS", 128)
    monkeypatch.setattr(cross_entropy_backward, "GRADIENT_BYTES", 256 * 384 * 2)
    launched = []
    # The test runs no kernel, because in the interpreter a launch copies its arguments with torch
    # operators.
    monkeypatch.setattr(
        cross_entropy.Launch, "run", lambda launch, on: launched.append(launch.name)
    )
    given = inputs(256, 16, 1000, HALF, device, labelled=1.0)
    dloss = torch.ones((), device=device)
    with Recorder() as recorder:
        run(given, dloss=dloss)
    assert recorder.operators == {"aten.empty.memory_format"}
    assert max(recorder.bytes) == 256 * 384 * 2
    forward, backward = ("partition", "partials", "combine", "reduce"), (
        "dlogits", "dbias", "dweight", "dhidden",
    )  # fmt: skip
    assert launched == [f"cross_entropy_{name}" for name in (*forward, *backward * 3)]


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("rows", [1, 80, 2458, 8192, 131072])
def test_memory_of_a_bert(rows, dtype):
    """At 30,522 words, the gradient of the logits takes at most 64 MiB or 2,048 columns."""
    hidden, weight = (torch.empty(n, 768, dtype=dtype, device="meta") for n in (rows, 30522))
    given = cross_entropy.Projection(hidden, weight, None, hidden[:, 0])
    columns = cross_entropy_backward.chunk_columns(given)
    padded = given.row_blocks * given.tile[0].block_m
    assert columns >= 2048
    assert padded * columns * dtype.itemsize <= max(2**26, padded * 2048 * dtype.itemsize)
    chunks = list(cross_entropy_backward._chunks(given))
    assert sum(chunk.count for chunk in chunks) == 30522
    assert [c.first for c in chunks[1:]] == [c.first + c.count for c in chunks[:-1]]


def test_errors_name_the_argument(device):
    given = inputs(4, 4, 4, SINGLE, device)
    with pytest.raises(ValueError, match="reduction: got 'max'"):
        run(given, reduction="max")


CHILD = """
import mmap
import torch
from fastbert.kernels.cross_entropy import linear_cross_entropy_forward
from fastbert.kernels.cross_entropy_backward import linear_cross_entropy_backward

FAR = 2**31
torch.manual_seed(0)

def spread(x):
    '''Copy x to its own mapping, with rows FAR apart.'''
    size = 2 * (FAR * (x.shape[0] - 1) + x.shape[1])
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(pages, dtype=torch.float16).as_strided(x.shape, (FAR, 1)).copy_(x)

def run(hidden, weight):
    labels = torch.tensor([2, -100, 0])
    loss, *kept = linear_cross_entropy_forward(
        hidden, weight, None, labels, ignore_index=-100, reduction="sum"
    )
    return loss, *linear_cross_entropy_backward(
        torch.ones(()), hidden, weight, None, labels, *kept, reduction="sum"
    )[:2]

hidden, weight = (torch.randn(3, 32).half() for _ in range(2))
near = run(hidden, weight)
for far in (run(spread(hidden), weight), run(hidden, spread(weight))):
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))
print("same")
"""


@pytest.mark.every_case
@pytest.mark.skipif(torch.cuda.is_available(), reason="the mapping is memory of the CPU")
def test_offsets_beyond_two_to_the_31():
    """Offsets above 2**31 are right; a child runs them, because a wrapped offset is a segfault."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True
    )
    assert child.stdout.strip() == "same", f"exit {child.returncode}: {child.stderr[-2000:]}"
