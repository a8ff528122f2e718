"""The GPU benchmarks have right contenders, results and messages, on the CPU at tiny shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks.gpu import bench, contenders, contest, gemm
from benchmarks.gpu.contest import Deadline, GpuRow, Setting
from benchmarks.gpu.judge import Judge, sample
from benchmarks.gpu.match import Contender, Match
from fastbert.bench import limits, peers
from fastbert.bench.attention_peers import Prepared, of_function
from fastbert.bench.operations import other_values, rotated_inputs
from fastbert.bench.plots import plot_matches
from fastbert.bench.timing import Timing
from fastbert.machine import Machine, describe
from fastbert.testing.cases import Case

ONCE = Setting("toy", 0.0, print, "cpu", limits.H200, limits.H200)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Use two sets of inputs and two samples of one call, because these tests ignore the times."""
    honest = contest.alternate
    monkeypatch.setattr(contest, "MOST_SETS", 2)
    monkeypatch.setattr(
        contest, "alternate", lambda calls, **o: honest(calls, **o, min_samples=2, max_samples=2)
    )
    monkeypatch.setattr("fastbert.bench.timing.SHORTEST_SAMPLE_S", 0.0)


def play(match: Match) -> dict[str, GpuRow]:
    return {row.contender: row for row in contest.play(match, ONCE)}


def first_of(section: str, *, of: int = 2) -> list[Match]:
    return list(itertools.islice(bench.matches_of(section, "cpu", toy=True), of))


@pytest.mark.parametrize("section", list(bench.SECTIONS))
def test_full_size_matches_are_complete(section):
    matches = bench.matches_of(section, "cpu", toy=False)
    places = [(match.series, match.label, match.direction) for match in matches]
    assert len(places) == len(set(places))
    for match in matches:
        names = [contender.name for contender in match.contenders]
        assert len(names) == len(set(names))
        assert any(contender.ours for contender in match.contenders)
        assert match.amount > 0
        assert match.work.floor(limits.H200) > 0


def test_every_goal_is_some_matchs():
    matches = [m for section in bench.SECTIONS for m in bench.matches_of(section, "cpu", toy=False)]
    goals = {m.goal for m in matches}
    assert set(limits.GOALS.values()) <= goals
    wanted = {m.ratio_goal for m in matches}
    assert {v for k, v in limits.RATIO_GOALS.items() if "real" not in k} <= wanted


@pytest.mark.parametrize("section", [name for name in bench.SECTIONS if name != "bench-training"])
def test_toys_run(section):
    for match in first_of(section):
        rows = play(match)
        assert bench.faults(list(rows.values())) == []
        timed = [row for row in rows.values() if row.seconds]
        assert any(row.ours for row in timed)
        for row in timed:
            assert row.rate == pytest.approx(
                row.seconds * 1e3 if row.unit == "ms" else match.amount / row.seconds
            )
            assert row.of_floor == pytest.approx(match.work.floor(limits.H200) / row.seconds)
        if match.case is not None:
            assert all(row.error_ratio is not None for row in timed if row.same_function)
        assert all(row.refused for row in rows.values() if not row.seconds)


def test_all_of_the_products_and_the_loss():
    for match in bench.matches_of("bench-gemm", "cpu", toy=True)[2:4]:
        rows = play(match)
        for name in ("product alone", "tanh epilogue"):
            if match.direction == limits.FORWARD:
                assert rows[name].seconds
                assert rows[name].error_ratio is None


def test_gathered_loss_is_the_loss():
    case = Case("linear_cross_entropy", "toy", (96, 32, 97))
    inputs = case.inputs(torch.float32)
    gathered = gemm._gathered(None, inputs)
    plain = of_function(peers.linear_cross_entropy, inputs)
    for one, other in zip(
        [gathered.run(), *torch.autograd.grad(gathered.run(), gathered.targets)],
        [plain.run(), *torch.autograd.grad(plain.run(), plain.targets)],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def a_match(*contenders: Contender, direction: str = limits.FORWARD) -> Match:
    case = Case("linear_gelu", "toy", (16, 24, 8))
    amount = limits.work(case, torch.float32, direction)
    return Match(
        "series", "label", "linear_gelu", torch.float32, direction, contenders, amount, "TFLOP/s",
        amount.flops / 1e12, case=case, goal=limits.Goal(1.0, "TFLOP/s"), ratio_goal=1.25,
    )  # fmt: skip


def peer(function, name="peer", **options) -> Contender:
    return Contender(name, lambda inputs: of_function(function, inputs), **options)


def scaled(x, weight, bias):
    return peers.linear_gelu(x, weight, bias) * 1.01


@pytest.mark.parametrize("direction", [limits.FORWARD, limits.BACKWARD])
def test_ours_is_refused_when_wrong_and_a_peer_is_noted(direction):
    rows = play(
        a_match(
            peer(scaled, "fastbert wrong", ours=True),
            peer(scaled, "wrong peer"),
            peer(peers.linear_gelu, "fastbert right", ours=True),
            peer(peers.linear_gelu, "right peer"),
            peer(lambda x, w, b: x @ w.t(), "another", same_function=False),
            direction=direction,
        )
    )
    assert "parity is red" in rows["fastbert wrong"].refused
    assert rows["fastbert wrong"].seconds is None
    assert "breaks the tolerance rule" in rows["wrong peer"].note
    assert rows["right peer"].note is None
    assert rows["another"].note is None
    best = min(rows[name].seconds for name in ("wrong peer", "right peer"))
    right = rows["fastbert right"]
    assert right.ratio == pytest.approx(best / right.seconds)
    assert (right.goal, right.ratio_goal) == (1.0, 1.25)
    assert right.of_goal == pytest.approx(right.rate)
    assert len(bench.faults(list(rows.values()))) == 1


def test_who_cannot_run_stays_with_the_reason():
    def unable(x, weight, bias):
        raise RuntimeError("no kernel\n for this")

    def mistaken(x, weight):
        return x

    def choosy(x, weight, bias):
        raise ValueError("path: 'short' cannot serve: too long")

    rows = play(
        a_match(
            peer(unable, "unable"),
            peer(mistaken, "mistaken"),
            peer(choosy, "fastbert path=short", ours=True),
        )
    )
    assert rows["unable"].refused == "RuntimeError: no kernel for this"
    faults = bench.faults(list(rows.values()))
    assert len(faults) == 1
    assert "mistaken: TypeError" in faults[0]


def test_after_the_deadline_everything_is_listed():
    late = dataclasses.replace(ONCE, deadline=Deadline(-1.0))
    rows = contest.play(a_match(peer(peers.linear_gelu, ours=True)), late)
    assert [row.refused for row in rows] == ["left out: the section's time was up"]
    assert bench.faults(rows)


def test_a_backward_of_its_own_is_judged_too():
    def prepare(inputs) -> Prepared:
        honest = of_function(peers.linear_gelu, inputs)
        return honest._replace(
            backward=lambda dout: [
                2 * t for t in torch.autograd.grad(honest.run(), honest.targets, dout)
            ]
        )

    rows = play(a_match(Contender("fastbert x", prepare, ours=True), direction=limits.BACKWARD))
    assert "parity is red" in rows["fastbert x"].refused


def test_other_values_keep_strides_and_shared_buffers():
    inputs = Case("attention", "toy", (2, 2, 8, 8, 16)).inputs(torch.float32)
    other = other_values(inputs, 1)
    for name, value in inputs.items():
        changed = dict(other.items())[name]
        assert changed.stride() == value.stride()
        assert changed.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert not torch.equal(changed, value)
        assert math.isclose(float(changed.std()), float(value.std()), rel_tol=0.1)
    k, v = other.positional["k"], other.positional["v"]
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_samples_are_small_and_spread():
    x = torch.arange(3 << 20)
    assert sample(x).numel() <= 1 << 18
    assert sample(x)[-1] > 0.99 * len(x)
    assert torch.equal(sample(x[:100]), x[:100])


def test_rotated_inputs_differ():
    sets = rotated_inputs(Case("layer_norm", "toy", (8, 32)), torch.float32, "cpu", at_most=2)
    assert len(sets) == 2
    assert not torch.equal(sets[0].positional["x"], sets[1].positional["x"])


def test_the_content_of_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "matches_of", lambda *a, **o: [a_match(peer(peers.linear_gelu))])
    content = bench.run("bench-gemm", toy=True, minutes=1, notify=lambda text: None)
    text = json.dumps(content, allow_nan=False)
    assert "measured_bytes" in text
    plot_matches(tmp_path / "x.png", content["rows"], Machine(**content["machine"]))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    plot_matches(tmp_path / "none.png", [], describe())


def test_variants_are_triton_on_a_gpu():
    assert contenders.attention_variants("cpu") == []
    assert contenders.gemm_variants("linear_gelu", limits.FORWARD, "cpu") == []


@pytest.mark.parametrize("path", contenders.GEMM_PATHS)
@pytest.mark.parametrize(
    ("op", "direction", "prepare"),
    [
        ("linear_gelu", limits.FORWARD, contenders._linear_gelu_path),
        ("feed_forward", limits.BACKWARD, contenders._feed_forward_path),
    ],
)
def test_the_paths_of_a_product_are_right(op, direction, prepare, path):
    """Each path that a benchmark forces on a GPU is right in Triton's interpreter."""
    case = Case(op, "toy", (40, 32, 64))
    contender = Contender(path, functools.partial(prepare, path), ours=True)
    judged_right(case, direction, contender)


def judged_right(case: Case, direction: str, contender: Contender, dtype=torch.float32) -> None:
    match = dataclasses.replace(a_match(contender, direction=direction), op=case.op, case=case)
    inputs = case.inputs(dtype)
    _, comparisons = contest._ready(match, contender, [inputs], Judge(match, inputs))
    assert comparisons
    assert all(comparison.passed for comparison in comparisons), comparisons


@pytest.mark.parametrize("direction", [limits.FORWARD, limits.BACKWARD])
@pytest.mark.parametrize(
    "case",
    [
        Case("attention", "toy", (2, 2, 24, 24, 16), {"mask": "padding"}),
        Case("attention_varlen", "toy", ((20, 7), 2, 16)),
    ],
    ids=lambda case: case.op,
)
def test_the_paths_of_attention_are_right(case, direction):
    for path in contenders.ATTENTION_PATHS:
        prepare = functools.partial(contenders._attention_path, path)
        judged_right(case, direction, Contender(path, prepare, ours=True), torch.float16)


def test_a_row_holds_the_median_of_one_call():
    match = a_match(peer(peers.linear_gelu))
    row = contest.new_row(match, match.contenders[0], ONCE)
    row.fill(Timing(median=6.0, p10=3.0, p90=9.0, samples=5), calls=3)
    assert (row.seconds, row.p10, row.p90, row.samples) == (2.0, 1.0, 3.0, 5)


def test_times_of_a_gpu_are_graph_replays_where_they_can_be(monkeypatch):
    """On a GPU, graph replays are timed where possible; here a fake stopwatch replaces the GPU."""

    class Watch:
        def __init__(self, device):
            assert device == "cuda"

        def measure(self, call, first, calls):
            call(first)
            return 0.5

    def capture(call, calls):
        if call is stubborn:
            raise RuntimeError("it synchronises")
        return lambda index: [call(i) for i in range(calls)]

    def stubborn(index):
        return index

    timed = contest.alternate
    monkeypatch.setattr(contest, "Stopwatch", Watch)
    monkeypatch.setattr(contest, "captured", capture)
    monkeypatch.setattr(contest, "alternate", lambda calls, device, seconds: timed(calls))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[int] = []
    match = a_match(peer(peers.linear_gelu, "a"), peer(peers.linear_gelu, "b"))
    setting = dataclasses.replace(ONCE, device="cuda")
    rows = {c.name: contest.new_row(match, c, setting) for c in match.contenders}
    contest._time({"a": seen.append, "b": stubborn}, rows, 3, setting)
    assert rows["a"].graphed
    assert rows["a"].host_seconds == 0.5
    assert seen[-3:] == [0, 1, 2]
    assert not rows["b"].graphed
    assert rows["b"].note == "not captured in a graph: RuntimeError: it synchronises"
    assert rows["b"].seconds > 0
