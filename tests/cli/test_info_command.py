"""``fastbert info``."""

from __future__ import annotations

import json

import torch

from fastbert.ops import backend


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
