"""`fastbert tune` leaves out what is wrong or hangs, and its table decides on this GPU only."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from fastbert.bench import tune as tuning
from fastbert.cli.info import _times_of_this_gpu, _tuned
from fastbert.config import BertConfig
from fastbert.ops import backend, gpu_times, tuned

HERE = Path(__file__).parent
KEY = {"gpu": "NVIDIA H200", "driver": "580", "fastbert": "0", "torch": "2", "triton": "3"}
NORM = tuning.norm(768)


@pytest.fixture
def of_table(tmp_path, monkeypatch):
    """Return a function that tunes shapes with a worker whose answers are given."""

    def run(shapes, answers, candidates, **options):
        file = tmp_path / "answers.json"
        file.write_text(json.dumps(answers), "utf-8")
        monkeypatch.setattr(tuning, "candidates", lambda shape, dtype, device: candidates)
        worker = (sys.executable, str(HERE / "_tune_table.py"), str(file))
        return tuning.tune(shapes, gpu="NVIDIA H200", arch=90, worker=worker, **options)

    return run


def named(*names: str) -> list[tuning.Candidate]:
    return [tuning.Candidate(name, name.split()[0]) for name in names]


def test_the_fastest_variant_of_each_backend_is_its_time(of_table):
    answers = {"triton a": [3e-5, 5e-5], "triton b": [2e-5, 9e-5], "cuda": [1e-5, 7e-5]}
    result = of_table([NORM], answers, named(*answers))
    (point,) = result.points
    assert point.forward == {"triton": 2e-5, "cuda": 1e-5}
    assert point.backward == {"triton": 5e-5, "cuda": 7e-5}
    assert (point.op, point.width, point.dtype) == ("layer_norm", 768, "16 bits")
    assert [row.candidate for row, is_first in tuning.winners(result) if is_first] == ["cuda"]
    order = gpu_times.order(point, False, backend.ORDER["cuda"])
    assert order == ("cuda", "triton", "reference")


def test_a_candidate_that_is_wrong_hangs_or_dies_is_left_out_and_the_next_one_is_tried(of_table):
    answers = {"reference": [1e-5, 1e-5], "triton": "hang", "cuda": "out is far off"}
    steps: list[tuple[int, int]] = []
    result = of_table(
        [NORM, tuning.norm(384)],
        answers,
        named("triton", "cuda", "reference"),
        limit_s=1.0,
        advance=lambda text, done, total: steps.append((done, total)),
    )
    reasons = {(row.shape, row.candidate): row.left_out for row in result.rows}
    for shape in ("768 columns", "384 columns"):
        assert reasons[shape, "triton"] == "it hangs: no answer after 1 s"
        assert reasons[shape, "cuda"] == "out is far off"
        assert reasons[shape, "reference"] is None
    assert [point.forward for point in result.points] == [{"reference": 1e-5}] * 2
    assert steps[-1] == (8, 8)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    result = of_table([NORM], answers | {"triton": "die"}, named("triton", "reference"))
    assert result.rows[0].left_out == "its process ended with status 3"


def test_a_shape_without_a_candidate_keeps_the_default(of_table):
    result = of_table([NORM], {"triton": "wrong"}, named("triton"))
    assert result.table() == tuned.Tuned()


def test_each_pass_takes_the_choice_that_is_fastest_in_it(of_table):
    shape = tuning.attention(12, 128, 64)
    pytest.importorskip("triton")
    found = tuning.triton_variants(shape, torch.bfloat16)
    assert [c.name for c in found][:2] == [
        "triton short",
        "triton general 128×64, 8 warps, 3 stages",
    ]
    times = {c.name: [9e-5, 9e-5] for c in found}
    times["triton short"] = [4e-5, 8e-5]
    times["triton general 64×64, 4 warps, 3 stages"] = [2e-5, 9e-5]
    result = of_table([shape], times, found)
    assert result.choices == {
        "attention path, forward, D 64": {128: "general"},
        "attention tile, forward, D 64": {128: [64, 64, 4, 3]},
        "attention path, backward, D 64": {128: "short"},
    }


def test_the_kernels_follow_the_choices(of_table):
    tiles = pytest.importorskip("fastbert.kernels.tiles")
    choices = {
        tiles.attention_path_name("forward", 64): {128: "general", 512: "short"},
        tiles.attention_path_name("backward", 64): {128: "general", 512: "short"},
        tiles.attention_tile_name(64): {128: [64, 64, 4, 3]},
        tiles.gemm_path_name(768): {128: "library", 2048: "fused"},
        tiles.gemm_tile_name(3072): {2048: [64, 32, 4, 4]},
    }
    bf16, single = torch.bfloat16, torch.float32

    def paths() -> list[str]:
        path = tiles.attention_path
        return [
            path("forward", 128, 64, bf16),
            path("forward", 300, 64, bf16),
            path("backward", 300, 64, bf16),
            path("forward", 128, 32, bf16),
            path("forward", 128, 64, bf16, has_key_mask=True),
            path("forward", 500, 64, single),
            tiles.gemm_path(200, 3072, 768, bf16, 80).name,
            tiles.gemm_path(3000, 3072, 768, bf16, 90).name,
            tiles.gemm_path(3000, 3072, 768, single, 90).name,
        ]

    default = ["short", "general", "general", "short", "short", "general"]
    default += ["fused", "library", "library"]
    with mock.patch.object(tiles, "IS_INTERPRETED", False):
        assert paths() == default
        with tiles.tuned(choices):
            # The short backward cannot compute 300 keys, whatever was measured.
            measured = ["general", "short", "general", "short", "short", "general"]
            assert paths() == [*measured, "library", "fused", "library"]
            assert tiles.attention_tile("forward", 64, bf16) == (64, 64, 4, 3)
            assert tiles.attention_tile("dq", 64, bf16) != (64, 64, 4, 3)
            assert tiles.gemm_tile(2000, 3072, bf16) == (64, 32, 4, 4)
            assert tiles.gemm_tile(2000, 3072, bf16, "backward") != (64, 32, 4, 4)
        assert paths() == default


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Simulate an H200 whose user's cache is a new folder, and return the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tuned, "key", lambda: dict(KEY))
    for name, value in (
        ("HAS_TRITON", False),
        ("EXTENSION", object()),
        ("EXTENSION_HAS_CUDA", True),
        ("CUDA_ARCHS", "9.0a"),
    ):
        monkeypatch.setattr(backend, name, value)
    with mock.patch.dict(backend._choices, clear=True):
        clear()
        yield tmp_path / "cache"
    clear()


def clear() -> None:
    backend.capability.cache_clear()
    backend.tuned_table.cache_clear()


REQUEST = backend.Request("cuda", torch.bfloat16, columns=768)


def test_the_table_decides_on_this_gpu_with_these_versions(gpu, of_table, monkeypatch):
    result = of_table([NORM], {"cuda": [2e-5, 1e-5], "reference": [1e-5, 9e-5]}, CANDIDATES)
    tuning.save(result, backend.tuned_file(), KEY)
    assert backend.tuned_file().parent == gpu / "fastbert" / "gpu-times"
    clear()
    shown = _tuned()
    assert (shown["table"], shown["times"]) == (str(backend.tuned_file()), 1)
    assert _times_of_this_gpu()[0]["first"] == "reference"
    choice = backend.resolve("layer_norm", None, REQUEST)
    assert choice.backend == "reference"
    assert "measured for NVIDIA H200, 768 columns, 16 bits, forward: reference 10.0" in (
        choice.reason
    )
    trained = backend.resolve("layer_norm", None, REQUEST._replace(trained=True))
    assert trained.backend == "cuda"
    for name in KEY:
        other = {**KEY, name: "another"}
        monkeypatch.setattr(tuned, "key", lambda other=other: other)
        clear()
        assert backend.tuned_table() == tuned.Tuned()
        assert _tuned()["table"] is None


CANDIDATES = named("cuda", "reference")


@pytest.mark.parametrize("content", ["", "{}", '{"key": 3}', '{"key": {}, "points": [], "x": 1}'])
def test_a_damaged_table_is_not_used_and_named(gpu, content):
    file = backend.tuned_file()
    file.parent.mkdir(parents=True)
    file.write_text(content, "utf-8")
    with pytest.warns(UserWarning, match="the table of `fastbert tune` is not used"):
        assert backend.tuned_table() == tuned.Tuned()
    assert backend.resolve("layer_norm", None, REQUEST).backend != "reference"


def run_command(*arguments: str):
    from fastbert.cli import app

    return CliRunner().invoke(app, ["tune", *arguments])


def test_the_command_prints_its_rows_and_keeps_them_if_the_cache_cannot_be_written(
    gpu, of_table, monkeypatch
):
    answers = {"cuda": [2e-5, 1e-5], "reference": "out is far off"}
    shapes = [tuning.norm(96)]
    result = of_table(shapes, answers, CANDIDATES)
    monkeypatch.setattr(tuning, "default_shapes", lambda: shapes)
    monkeypatch.setattr(tuning, "tune", lambda *a, **k: result)
    done = run_command()
    assert done.exit_code == 0, done.output
    assert "cuda*" in done.output
    assert "out is far off" in done.output
    rows = json.loads(run_command("--json").stdout)["rows"]
    assert {row["candidate"]: row["forward"] for row in rows} == {"cuda": 2e-5, "reference": None}
    file = backend.tuned_file()
    assert file.exists()
    assert "deleted" in run_command("--forget").output
    assert not file.exists()
    file.parent.rmdir()
    file.parent.write_text("a file where a folder must be", "utf-8")
    done = run_command()
    assert done.exit_code == 2
    assert "cuda*" in done.output
    assert str(file.parent) in done.output.replace("\n", "")


def test_the_command_needs_a_gpu_and_known_dtypes(gpu, monkeypatch):
    assert "got 'int8', allowed: bfloat16, float32" in run_command("--dtype", "int8").output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clear()
    done = run_command()
    assert done.exit_code == 2
    assert "got a machine without a CUDA GPU" in done.output


def test_the_shapes_of_a_model_are_those_of_its_layers():
    config = BertConfig(
        hidden_size=96, num_attention_heads=3, intermediate_size=160, max_position_embeddings=300
    )
    shapes = tuning.shapes_of(config)
    assert [s.name for s in shapes if s.op == "attention"] == ["S64 D32", "S128 D32", "S256 D32"]
    assert {s.case[1:] for s in shapes if s.op == "feed_forward"} == {(96, 160)}
    assert len({dataclasses.astuple(s) for s in tuning.default_shapes()}) == 22


@pytest.mark.every_case
def test_a_rehearsal_on_the_ptx_machine(tmp_path):
    """The kernels' values are computed from compiled code; one tile is wrong, and another hangs."""
    pytest.importorskip("triton")
    pytest.importorskip("ptxmachine")
    shape = tuning.attention(1, 64, 16, tokens=64)
    with mock.patch.dict(backend._stand_ins, triton="the PTX machine"):
        found = tuning.candidates(shape, torch.bfloat16, "cpu")
    seconds = {c.name: 1e-5 * (1 + i) for i, c in enumerate(reversed(found))}
    file, worker = tmp_path / "seconds.json", HERE / "_tune_rehearsal.py"
    file.write_text(json.dumps(seconds), "utf-8")
    with mock.patch.dict(backend._stand_ins, triton="the PTX machine"):
        result = tuning.tune(
            [shape],
            gpu="NVIDIA H200",
            arch=90,
            # Kernels that are loaded for Triton's interpreter cannot be compiled.
            worker=("env", "TRITON_INTERPRET=0", sys.executable, str(worker), str(file)),
            device="cpu",
            limit_s=90.0,
        )
    left_out = {row.candidate: row.left_out for row in result.rows if row.left_out}
    assert set(left_out) == {
        "triton general 128×64, 4 warps, 3 stages",
        "triton general 128×64, 8 warps, 2 stages",
    }
    wrong, hung = left_out.values()
    assert "parity is red" in wrong
    assert "it hangs" in hung
    assert result.choices["attention path, forward, D 16"] == {64: "general"}
    assert result.choices["attention tile, forward, D 16"] == {64: [64, 64, 4, 3]}
    (point,) = result.points
    assert set(point.forward) == {"triton", "reference"}
