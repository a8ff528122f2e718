"""``fastbert bench``."""

from __future__ import annotations

import json

import pytest

from fastbert.bench import encoder, operations, predict
from fastbert.gpus import GPUS
from fastbert.testing.ptx.sample import Launched

QUICK = ("bench", "--quick", "--op")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Take one sample per call, because these tests check the output and ignore the times."""
    honest = operations.alternate

    def alternate(calls, *, device, seconds):
        return honest(calls, device=device, seconds=0.0, min_samples=1)

    monkeypatch.setattr(operations, "alternate", alternate)
    monkeypatch.setattr(encoder, "alternate", alternate)


def test_json_on_stdout(run):
    result = run(*QUICK, "layer_norm", "--json", "-")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["machine"]["versions"]["torch"]
    assert content["machine"]["date"]
    assert content["encoder"] == []
    engines = {row["engine"] for row in content["operations"]}
    assert {"torch", "fastbert reference"} <= engines
    assert {row["op"] for row in content["operations"]} == {"layer_norm"}


def test_files_and_tables(drawn, run, tmp_path):
    files = ("--json", tmp_path / "out" / "bench.json", "--plot", tmp_path / "out" / "bench.png")
    result = run(*QUICK, "linear_gelu", "--op", "encoder", *files)
    assert result.exit_code == 0, result.output
    assert "fastbert auto" in result.stdout
    content = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert content["operations"]
    assert content["encoder"]
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_red_is_not_timed(run, monkeypatch):
    monkeypatch.setattr(
        operations, "gate", lambda op, backend, dtype: "parity is red: layer_norm, one: off"
    )
    result = run(*QUICK, "layer_norm")
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "not timed: fastbert reference: parity is red" in result.output


def test_unknown_operation(refused):
    message = refused(*QUICK, "softmax")
    assert "--op: got 'softmax', allowed: attention" in message
    assert message.endswith(", encoder")


def test_unknown_picture(refused):
    assert "--plot: got 'x.txt'" in refused("bench", "--plot", "x.txt")


def bounds(monkeypatch):
    """Make the counting of instructions return one launch with known counts per direction."""
    monkeypatch.setattr(predict.backends, "interpreted", lambda: False)
    launch = Launched("kernel", 132, 24, {"mufu": 132 * 500e3, "tensor_flops": 0})
    launches = {"forward": [launch], "backward": [launch]}
    monkeypatch.setattr(
        predict, "count", lambda case, dtype, arch, multiprocessors, backend: launches
    )


def test_predicted_bounds(run, monkeypatch, tmp_path):
    bounds(monkeypatch)
    path = tmp_path / "bounds.json"
    result = run("bench", "--predict", "--op", "layer_norm", "--json", path)
    assert result.exit_code == 0, result.output
    assert "NOT measurements" in result.stdout
    assert "## layer_norm forward, bfloat16" in result.stdout
    assert "## attention" not in result.stdout
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["kind"] == "lower bounds from counted instructions, not measurements"
    assert {row["gpu"] for row in content["bounds"]} == {gpu.name for gpu in GPUS}
    row = next(row for row in content["bounds"] if row["gpu"] == "H200")
    assert row["seconds"]["mufu"] == pytest.approx(1e6 / 1.83e9)
    assert content["launches"]["layer_norm 16384×1024 bfloat16 forward sm_90"][0]["sampled"] == 24
    on_stdout = run("bench", "--predict", "--op", "layer_norm", "--json", "-")
    assert json.loads(on_stdout.stdout) == content


def test_bounds_take_no_option_of_a_measurement(refused):
    assert "--quick: got True with --predict" in refused("bench", "--predict", "--quick")
    assert "--backend: got 'cuda', allowed: only with" in refused("bench", "--backend", "cuda")
    other = refused("bench", "--predict", "--backend", "cpu")
    assert "--backend: got 'cpu', allowed: triton, cuda" in other
    unknown = refused("bench", "--predict", "--op", "rotary")
    assert "--op: got 'rotary', allowed: attention" in unknown
