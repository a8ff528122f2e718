"""``fastbert.bench`` makes the right calls, compares peers, writes rows and refuses bad input."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastbert import reference
from fastbert.bench import encoder, operations, peers
from fastbert.bench.encoder import EncoderShape, bench_encoder, half_padded
from fastbert.bench.limits import BOTH, FORWARD
from fastbert.bench.plots import plot_bench
from fastbert.bench.timing import ROTATION_BYTES, alternate, input_sets, summarize
from fastbert.integrations import stock_models
from fastbert.machine import describe
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, run_sides

SMALL = encoder.SMALL.replace(hidden_size=32, intermediate_size=64, vocab_size=100)
SHAPE = EncoderShape("small", SMALL, half_padded(4, 12))
needs_transformers = pytest.mark.skipif(not stock_models.installed(), reason="needs transformers")


def test_alternate_turns_the_order_and_rotates_the_inputs():
    order: list[str] = []
    indices: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def candidate(name):
        def call(index):
            order.append(name)
            indices[name].append(index)
            time.sleep(3e-3)

        return call

    timings = alternate({name: candidate(name) for name in indices}, seconds=0.0, min_samples=3)
    assert order[-9:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    for name, timing in timings.items():
        assert timing.samples == 3
        assert 3e-3 <= timing.p10 <= timing.median <= timing.p90
        assert indices[name] == [0, 1, 2, 3, 4]


def test_alternate_tells_fast_from_slow():
    calls = {"slow": lambda i: time.sleep(2e-2), "fast": lambda i: time.sleep(2e-3)}
    timings = alternate(calls, seconds=0.1)
    assert timings["slow"].median > timings["fast"].median


def test_summary_is_the_median_and_the_tenths():
    timing = summarize([float(i) for i in range(20, 0, -1)])
    assert (timing.median, timing.p10, timing.p90, timing.samples) == (10.5, 3.0, 18.0, 20)


def test_input_sets_overflow_the_caches():
    assert input_sets(1 << 40) == 2
    assert input_sets(0) == 64
    assert input_sets(10 << 20) * (10 << 20) >= ROTATION_BYTES


@pytest.mark.parametrize(("batch", "longest"), [(8, 128), (4, 512), (8, 64)])
def test_half_padded(batch, longest):
    lengths = half_padded(batch, longest)
    assert len(lengths) == batch
    assert max(lengths) == longest
    assert min(lengths) >= 1
    assert abs(sum(lengths) / (batch * longest) - 0.5) < 0.02


@pytest.mark.parametrize("case", operations.bench_cases(quick=True), ids=lambda case: case.op)
def test_peers_compute_the_same_function(case):
    inputs = case.inputs(torch.float32)
    exact = inputs.map(
        lambda _, v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
    )
    function = getattr(reference, case.op)

    def run(call, arguments):
        return call(*arguments.positional.values(), **arguments.keyword)

    yardstick = Yardstick(lambda: run(function, inputs))
    assert_close(case.op, run(peers.OPS[case.op], inputs), run(function, exact), yardstick)


@needs_transformers
@pytest.mark.parametrize("path", encoder.TRANSFORMERS_PATHS)
def test_transformers_peer_is_the_same_encoder(path):
    weights = encoder.random_weights(SMALL)
    batch = encoder.random_batch(SHAPE, 0, "cpu")
    real = batch["attention_mask"].bool()
    models = [
        stock_models.encoder(SMALL, weights, path, torch.float32, "cpu"),
        encoder.fastbert_encoder(SMALL, weights, "reference", torch.float64, "cpu"),
        encoder.fastbert_encoder(SMALL, weights, "reference", torch.float32, "cpu"),
    ]
    with torch.no_grad():
        runs = run_sides(lambda model: model(**batch).last_hidden_state[real], *models)
        assert_close(path, *runs)


@needs_transformers
def test_flops_are_those_that_torch_counts():
    shape = EncoderShape("full", SMALL, (12,) * 4)
    weights = encoder.random_weights(SMALL)
    model = stock_models.encoder(SMALL, weights, "eager", torch.float32, "cpu")
    model.pooler = None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**encoder.random_batch(shape, 0, "cpu"))
    assert shape.flops == counter.get_total_flops()


def test_rows_of_an_operation():
    rows = operations.bench_ops(
        ["linear_gelu"], quick=True, dtypes=[torch.float32], device="cpu", seconds=0.01
    )
    assert {row.direction for row in rows} == {FORWARD, BOTH}
    assert sum(row.chosen for row in rows) == 2
    for row in rows:
        assert row.seconds > 0
        assert row.p10 <= row.seconds <= row.p90
        assert (row.tflops is not None) == (row.direction == FORWARD)
        stock = next(r for r in rows if r.engine == "torch" and r.direction == row.direction)
        assert row.speedup == pytest.approx(stock.seconds / row.seconds)
        assert not row.engine.endswith("triton")


def test_a_red_operation_is_refused(monkeypatch):
    honest = operations.parity.check

    def check(op, backend, *arguments, **options):
        for row in honest(op, backend, *arguments, **options):
            yield dataclasses.replace(row, passed=False, detail="off")

    monkeypatch.setattr(operations.parity, "check", check)
    rows = operations.bench_ops(
        ["layer_norm"], quick=True, dtypes=[torch.float32], device="cpu", seconds=0.0
    )
    assert {row.engine for row in rows if row.seconds is not None} == {"torch"}
    assert all("parity is red" in row.refused for row in rows if row.engine != "torch")


def test_unknown_operation():
    with pytest.raises(ValueError, match="op: got 'softmax', allowed: attention"):
        operations.bench_ops(["softmax"])


def test_rows_of_the_encoder():
    rows = bench_encoder([SHAPE], dtypes=[torch.float32], device="cpu", seconds=0.0)
    engines = [row.engine for row in rows]
    assert engines == encoder.engine_names("cpu")
    stock = [row.seconds for row in rows if row.engine.startswith("transformers")]
    for row in rows:
        assert (row.batch, row.longest, row.tokens) == (4, 12, sum(SHAPE.lengths))
        assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
        assert row.speedup == (pytest.approx(min(stock) / row.seconds) if stock else None)


def test_a_wrong_encoder_is_refused(monkeypatch):
    honest = encoder.fastbert_encoder

    def scaled(config, weights, request, dtype, device):
        model = honest(config, weights, request, dtype, device)
        if request is None:
            with torch.no_grad():
                model.encoder.layer[-1].output.LayerNorm.weight.mul_(1.001)
        return model

    monkeypatch.setattr(encoder, "fastbert_encoder", scaled)
    rows = bench_encoder([SHAPE], dtypes=[torch.float32], device="cpu", seconds=0.0)
    auto = next(row for row in rows if row.engine == "fastbert auto")
    assert auto.seconds is None
    assert "parity is red" in auto.refused
    assert all(row.seconds for row in rows if row is not auto)


def test_plot_of_whatever_was_timed(tmp_path):
    timed = operations.bench_ops(
        ["layer_norm"], quick=True, dtypes=[torch.float32], device="cpu", seconds=0.0
    )
    for name, rows in (("some.png", timed), ("none.png", [])):
        # matplotlib must not read a "$" in the name of a processor as the start of a formula.
        plot_bench(tmp_path / name, rows, [], dataclasses.replace(describe(), cpu=r"$\frac{$"))
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_header_names_machine_versions_and_date():
    machine = describe()
    text = "\n".join(machine.lines())
    assert machine.cpu in text
    assert f"torch {torch.__version__}" in text
    assert machine.date[:10] in text
    assert f"{torch.get_num_threads()} threads" in text
