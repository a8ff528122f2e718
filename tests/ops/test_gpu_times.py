"""A call on a GPU chooses its backend by the times in a table, which benchmarks produce."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from fastbert.ops import backend, gpu_times, tuned
from fastbert.ops.gpu_times import MEASURED, PREDICTED, Point

ORDER = backend.ORDER["cuda"]


def point(arch=90, size=512, width=64, op="attention", dtype="16 bits", **times) -> Point:
    seconds = {name: times.get(name, 1.0) for name in ("triton", "cuda")}
    shape = f"S{size} D{width}"
    return Point(op, arch, "H200", dtype, shape, width, size, MEASURED, seconds, seconds)


def test_every_shape_has_one_point_and_both_backends():
    keys = [p[:2] + p[3:4] + p[5:7] for p in gpu_times.POINTS]
    assert len(set(keys)) == len(keys) > 0
    for p in gpu_times.POINTS:
        assert p.kind in (PREDICTED, MEASURED)
        for times in (p.forward, p.backward):
            assert times.keys() == {"cuda", "triton"}
            assert all(0.0 < seconds < 1.0 for seconds in times.values())


def test_the_nearest_shape_counts_by_ratio():
    points = [point(size=size, width=dim) for size in (128, 512) for dim in (32, 128)]
    sizes = {
        (dim, size): gpu_times.nearest(points, "attention", (9, 0), "float16", dim, size)
        for dim, size in itertools.product((16, 63, 64, 300), (0, 255, 256, 9000))
    }
    assert {key: (p.width, p.size) for key, p in sizes.items()} == {
        (dim, size): (32 if dim < 64 else 128, 128 if size < 256 else 512) for dim, size in sizes
    }


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), 80), ((8, 6), 80), ((8, 9), 89), ((9, 0), 90), ((10, 3), None), ((12, 0), None)],
)
def test_the_code_must_run_on_the_gpu(capability, arch):
    points = [point(arch=arch) for arch in (80, 89, 90)]
    nearest = gpu_times.nearest(points, "attention", capability, "bfloat16", 64, 512)
    assert (None if nearest is None else nearest.arch) == arch


def test_other_operations_and_dtypes_have_no_point():
    points = [point()]
    for op, dtype in (("layer_norm", "bfloat16"), ("attention", "float32")):
        assert gpu_times.nearest(points, op, (9, 0), dtype, 64, 512) is None


@pytest.mark.parametrize(
    ("cuda", "triton", "first"),
    [(1.0, 2.0, "cuda"), (2.0, 1.0, "triton"), (1.0, 1.04, "triton"), (1.0, 1.06, "cuda")],
)
def test_a_small_difference_does_not_change_the_order(cuda, triton, first):
    others = {"cuda": "triton", "triton": "cuda"}
    order = gpu_times.order(point(cuda=cuda, triton=triton), False, ORDER)
    assert order == (first, others[first], "reference")


def test_a_prediction_does_not_change_the_order():
    predicted = point(cuda=1.0, triton=2.0)._replace(kind=PREDICTED)
    for trained in (False, True):
        assert gpu_times.order(predicted, trained, ORDER) == ORDER
        assert gpu_times.reason(predicted, trained).startswith("no recorded run decides (predicted")
    assert {row["first"] for row in gpu_times.rows([predicted], ORDER)} == {"triton"}


def test_a_measured_shape_precedes_a_nearer_prediction():
    far, near = point(size=2048), point(size=512)._replace(kind=PREDICTED)
    older = point(arch=80, size=512)
    for points, chosen in (((near, far), far), ((near,), near), ((near, older), near)):
        nearest = gpu_times.nearest(points, "attention", (9, 0), "float16", 64, 512)
        assert nearest == chosen


def test_without_two_times_the_order_stays():
    alone = point()._replace(forward={"cuda": 1.0})
    assert gpu_times.order(alone, False, ORDER) == ORDER
    assert gpu_times.order(None, False, ORDER) == ORDER


def test_a_gradient_adds_the_backward_pass():
    p = point()._replace(
        forward={"cuda": 1.0, "triton": 2.0}, backward={"cuda": 6.0, "triton": 3.0}
    )
    assert gpu_times.order(p, False, ORDER)[0] == "cuda"
    assert gpu_times.order(p, True, ORDER)[0] == "triton"
    assert gpu_times.reason(p, True) == (
        "measured for H200, S512 D64, 16 bits, forward and backward: triton 5000000.0 µs, "
        "cuda 7000000.0 µs"
    )


def test_the_class_of_a_length_is_nearest_by_ratio():
    classes = [64 << i for i in range(6)]
    for length in (0, 1, *range(60, 3000, 7)):
        nearest = min(classes, key=lambda c: max(c / max(length, 1), max(length, 1) / c))
        assert gpu_times.length_class(length) == nearest


def test_the_class_of_rows_is_nearest_by_ratio():
    classes = (128, 2048, gpu_times.MANY_ROWS)
    for rows in (0, 1, *range(60, 40000, 71), 2**62):
        nearest = min(classes, key=lambda c: max(c / max(rows, 1), max(rows, 1) / c))
        assert gpu_times.rows_class(rows) == nearest


def test_the_products_of_the_table_have_rows_of_every_class():
    for op in ("linear_gelu", "feed_forward"):
        points = [p for p in gpu_times.POINTS if p.op == op]
        assert {p.arch for p in points} == {80, 89, 90}
        for p in points:
            assert gpu_times.rows_class(p.size) == p.size
        assert {p.size for p in points} == {128, 2048, gpu_times.MANY_ROWS}


def test_torch_compile_keeps_the_length_symbolic(monkeypatch):
    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "tuned_table", tuned.Tuned)
    monkeypatch.setattr(backend, "EXTENSION", object())
    monkeypatch.setattr(backend, "EXTENSION_HAS_CUDA", True)
    monkeypatch.setattr(backend, "CUDA_ARCHS", "9.0a")
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    times = {128: (2.0, 1.0), 512: (1.0, 2.0)}
    points = tuple(point(size=size, cuda=c, triton=t) for size, (c, t) in times.items())
    monkeypatch.setattr(gpu_times, "POINTS", points)
    frames = []

    def resolved(x):
        length = gpu_times.length_class(x.shape[0])
        request = backend.Request("cuda", torch.float16, 64, length=length)
        return x + (1 if backend.resolve("attention", None, request).backend == "cuda" else 0)

    def count(module, inputs):
        frames.append(1)
        return module.forward

    compiled = torch.compile(resolved, backend=count, fullgraph=True, dynamic=True)
    for length in (130, 140, 170, 400, 500, 600):
        assert compiled(torch.zeros(length))[0] == (length > 256)
    assert len(frames) == 2


def test_the_file_is_written_from_the_records(tmp_path):
    choice = pytest.importorskip("fastbert.bench.choice")
    if not choice.RESULTS.is_dir():
        pytest.skip("the records are in a checkout only")
    written = tmp_path / "gpu_times.json"
    written.write_text("\n".join(choice.lines(choice.points())) + "\n", encoding="utf-8")
    assert written.read_text(encoding="utf-8") == gpu_times.TABLE.read_text(encoding="utf-8"), (
        "python -m fastbert.bench.choice"
    )
    assert gpu_times.load(written) == gpu_times.POINTS


def record(folder: Path, name: str, rows: list[dict], gpu: str = "NVIDIA H200") -> None:
    folder.mkdir(exist_ok=True)
    content = {"toy": False, "machine": {"gpu": gpu}, "rows": rows}
    (folder / name).write_text(json.dumps(content))


def predictions(folder: Path, op: str, cases: tuple[str, ...], bytes_moved: float) -> None:
    """Write predictions: Triton moves `bytes_moved`, and CUDA C++ moves 1.5 times as many."""
    folder.mkdir()
    for name, share in ((op, 1.0), (f"{op}_cuda", 1.5)):
        directions = ("forward", "backward")
        bounds = [
            {"op": op, "case": case, "gpu": gpu, "dtype": "bfloat16", "direction": direction}
            for case in cases for gpu in ("A100", "H200") for direction in directions
        ]  # fmt: skip
        launch = {"name": "library", "blocks": 0, "sampled": 0, "counts": {}}
        launches = {
            f"{op} {case} bfloat16 {direction} sm_{arch}": [
                {**launch, "bytes": share * bytes_moved}
            ]
            for case in cases for direction in directions for arch in (80, 90)
        }  # fmt: skip
        content = {"bounds": bounds, "launches": launches}
        (folder / f"{name}.json").write_text(json.dumps(content))


def seconds_of(bytes_moved: float, bandwidth: float) -> dict[str, float]:
    """Return the times that follow from `predictions` at the measured bandwidth of a copy."""
    seconds = bytes_moved / (bandwidth * 4.3 / 4.8)
    return {"triton": pytest.approx(seconds), "cuda": pytest.approx(1.5 * seconds)}


def test_a_recorded_run_replaces_the_predictions_of_its_architecture(tmp_path):
    from fastbert.bench import choice

    predictions(tmp_path / "2026-01-01-predicted-bounds", "layer_norm", ("16384×768",), 1e9)
    common = {"op": "layer_norm", "dtype": "bfloat16", "label": "65536×768 drop bfloat16"}
    rows = [
        {**common, "series": "layer_norm " + d, "direction": d, "contender": c, "seconds": s}
        for d in ("forward", "backward")
        for c, s in (("fastbert triton*", 9e-5), ("fastbert cuda", 8e-5), ("torch eager", 1e-5))
    ]
    small = [
        {**row, "label": "2048×768 drop bfloat16", "seconds": 1e-6, "contender": "fastbert cuda"}
        for row in rows
    ]
    half = [{**row, "dtype": "float16", "label": "65536×768 float16"} for row in rows]
    record(tmp_path / "2026-02-02-h100", "bench-rows.json", [*rows, *small, *half], "NVIDIA H100")
    points = {p.arch: p for p in choice.points(tmp_path)}
    assert points.keys() == {80, 90}
    assert (points[80].kind, points[80].forward) == (PREDICTED, seconds_of(1e9, 2.039e12))
    assert (points[90].kind, points[90].gpu) == (MEASURED, "H100")
    assert points[90].forward == points[90].backward == {"triton": 9e-5, "cuda": 8e-5}


@pytest.mark.parametrize("op", ["linear_gelu", "feed_forward"])
def test_a_recorded_run_replaces_the_predictions_of_products(tmp_path, op):
    """The time of a measured shape replaces its prediction; other shapes keep their predictions."""
    from fastbert.bench import choice

    old, new = tmp_path / "2026-01-01-predicted-bounds", tmp_path / "2026-01-02-predicted-bounds"
    predictions(old, op, ("128×768×3072", "2048×768×3072"), 1e9)
    predictions(new, op, ("2048×768×3072",), 2e9)
    before = {(p.arch, p.size): p for p in choice.points(tmp_path)}
    assert before.keys() == {(80, 128), (80, 2048), (90, 128), (90, 2048)}
    # The newer folder has only the shape with 2048 rows.
    assert before[80, 128].forward == seconds_of(1e9, 2.039e12)
    assert before[90, 2048].forward == seconds_of(2e9, 4.8e12)
    assert before[90, 2048]._replace(forward={}, backward={}) == Point(
        op, 90, "H200", "16 bits", "2048×768×3072", 768, 2048, PREDICTED, {}, {}
    )
    measured = [
        {"op": op, "dtype": "bfloat16", "label": "2048×768×3072 bfloat16", "direction": d,
         "series": f"{op} {d}", "contender": c, "seconds": s}
        for d in ("forward", "backward")
        for c, s in (("fastbert triton*", 9e-5), ("fastbert cuda", 8e-5), ("torch eager", 1e-5))
    ]  # fmt: skip
    record(tmp_path / "2026-02-02-h200", "bench-gemm.json", measured)
    points = {(p.arch, p.size): p for p in choice.points(tmp_path)}
    assert points.keys() == before.keys()
    assert points[90, 2048].kind == MEASURED
    assert points[90, 2048].forward == {"triton": 9e-5, "cuda": 8e-5}
    for key in before.keys() - {(90, 2048)}:
        assert points[key] == before[key]


def test_measured_attention_has_its_shape(tmp_path):
    from fastbert.bench import choice

    rows = [
        {"op": "attention", "dtype": "bfloat16", "label": "S256 bfloat16", "direction": d,
         "series": f"attention D32{kind} {d}", "contender": f"fastbert {name}", "seconds": 1e-5}
        for d in ("forward", "backward") for name in ("triton", "cuda") for kind in ("", " padding")
    ]  # fmt: skip
    record(tmp_path / "2026-02-02-h200", "bench-attention.json", rows)
    [only] = choice.points(tmp_path)
    assert (only.shape, only.width, only.size, only.kind) == ("S256 D32", 32, 256, MEASURED)
