"""``fastbert bench``."""

from __future__ import annotations

import json

import pytest

from fastbert.bench import encoder, operations

QUICK = ("bench", "--quick", "--op")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Take one sample of each call, because these tests check the output and not the times."""
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


def test_files_and_tables(run, tmp_path):
    files = ("--json", tmp_path / "out" / "bench.json", "--plot", tmp_path / "out" / "bench.png")
    result = run(*QUICK, "linear_gelu", "--op", "encoder", *files)
    assert result.exit_code == 0, result.output
    assert "fastbert auto" in result.stdout
    content = json.loads((tmp_path / "out" / "bench.json").read_text())
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
