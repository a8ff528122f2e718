"""``fastbert info``."""

from __future__ import annotations

import json

import pytest
import torch

from fastbert.ops import backend
from fastbert.testing import ptxas


def test_json_says_what_is_built_and_what_serves(run):
    content = json.loads(run("info", "--json").stdout)
    assert content["versions"]["torch"] == torch.__version__
    assert content["machine"]["cores"] >= 1
    assert content["extension"]["built"] == (backend.EXTENSION is not None)
    if not content["extension"]["built"]:
        assert "fastbert._C" in content["extension"]["reason"]
    listed = {(row["op"], row["dtype"]) for row in content["backends"]}
    dtypes = ("float32", "bfloat16", "float16")
    assert listed == {(op, dtype) for op in (*backend.TABLES, "encoder") for dtype in dtypes}
    for row in content["backends"]:
        assert row["backend"] in backend.BACKENDS
        assert row["reason"]


def test_text_names_every_operation(run):
    result = run("info")
    assert result.exit_code == 0
    for op in backend.TABLES:
        assert op in result.stdout


def test_missing_extension_is_said(run, monkeypatch):
    monkeypatch.setattr(backend, "EXTENSION", None)
    monkeypatch.setattr(backend, "EXTENSION_STATE", "no compiler here")
    content = json.loads(run("info", "--json").stdout)
    assert content["extension"] == {"built": False, "reason": "no compiler here"}
    row = next(row for row in content["backends"] if row["op"] == "layer_norm")
    if row["device"] == "cpu":
        assert row["backend"] == "reference"
        assert "no compiler here" in row["reason"]


@pytest.mark.skipif(not backend.HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    ("version", "is_affected"), [("12.8", True), ("13.2", True), ("13.3", False)]
)
def test_a_ptxas_that_may_break_wgmma_is_named(run, monkeypatch, version, is_affected):
    found = ptxas.Assembler("/opt/ptxas", version, "TRITON_PTXAS_PATH")
    monkeypatch.setattr(ptxas, "assembler", lambda arch: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiler = json.loads(run("info", "--json").stdout)["compiler"]
    assert compiler["ptxas"] == f"{version}, /opt/ptxas"
    assert (compiler["warning"] is not None) == is_affected
    if is_affected:
        assert "TRITON_PTXAS_PATH names another ptxas" in compiler["warning"]


def test_only_sm_90_is_affected():
    old = ptxas.Assembler("/opt/ptxas", "12.9", "TRITON_PTXAS_PATH")
    assert [arch for arch in (80, 89, 90, 100, 120) if old.warning(arch)] == [90]
