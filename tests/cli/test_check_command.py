"""``fastbert check``."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fastbert.ops import backend
from fastbert.testing import parity

REFERENCE = ("--backend", "reference", "--dtype", "float32", "--quick")


def test_table_and_verdict(run):
    result = run("check", "--op", "layer_norm", *REFERENCE)
    assert result.exit_code == 0
    assert "layer_norm" in result.stdout
    assert "ok" in result.stdout
    assert "FAILED" not in result.stdout


def test_json_has_a_row_per_tensor_and_their_worst(run):
    result = run("check", "--op", "layer_norm", *REFERENCE, "--json")
    content = json.loads(result.stdout)
    assert content["passed"] is True
    expected = list(parity.check("layer_norm", "reference", torch.float32, quick=True))
    assert [row["tensor"] for row in content["rows"]] == [row.tensor for row in expected]
    (line,) = content["summary"]
    assert line["ratio"] == max(row["ratio"] for row in content["rows"])
    assert line["cases"] == len({row["case"] for row in content["rows"]})


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_one_bad_tensor_fails_and_says_how_to_reproduce(run, monkeypatch, error):
    honest = parity.check

    def check(*arguments, **options):
        rows = list(honest(*arguments, **options))
        yield from rows[:-1]
        yield replace(rows[-1], error=error, passed=False, detail="off by one")

    monkeypatch.setattr(parity, "check", check)
    result = run("check", "--op", "linear_gelu", *REFERENCE)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "off by one" in result.stdout
    assert "reproduce: fastbert check --op linear_gelu" in result.stdout
    as_json = run("check", "--op", "linear_gelu", *REFERENCE, "--json")
    assert as_json.exit_code == 1
    content = json.loads(as_json.stdout)
    assert content["passed"] is False
    assert content["summary"][0]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--op", "softmax"), "op: got 'softmax', allowed: attention"),
        (("--backend", "rocm"), "--backend: got 'rocm', allowed: reference"),
        (("--dtype", "int8"), "--dtype: got 'int8', allowed: float32"),
        (("--op", "layer_norm", "--case", "huge"), "case: got 'huge', allowed: "),
    ],
)
def test_unknown_names(refused, arguments, named):
    assert named in refused("check", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_backend_that_cannot_serve_here(refused):
    assert "cuda" in refused("check", "--op", "layer_norm", "--backend", "cuda")


@pytest.mark.skipif(not backend.HAS_TRITON, reason="needs triton")
def test_triton_is_checked_without_a_gpu():
    command = [sys.executable, "-m", "fastbert", "check", "--op", "linear_gelu", "--case", "tanh"]
    command += ["--backend", "triton", "--dtype", "float32", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert {row["backend"] for row in content["rows"]} == {"triton"}
