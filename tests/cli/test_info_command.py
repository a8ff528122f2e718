"""``fastbert info``."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from fastbert.cli.common import out
from fastbert.cli.info import (
    _calls_without_cuda,
    _extension,
    _facts,
    _gpu_times,
    _products,
    _products_of_cuda,
    _refusals,
    _times_of_this_gpu,
)
from fastbert.kernels import assembler
from fastbert.modules.transformer import Transformer
from fastbert.ops import backend, tuned
from fastbert.transformer_config import TransformerConfig


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


def test_an_extension_without_cuda_says_why(run, monkeypatch):
    reason = "c++ cannot include the headers of CUDA"
    facts = {"torch": "2.15.0", "cuda": False, "cuda_archs": "", "without_cuda": reason}
    extension = SimpleNamespace(build_info=lambda: dict(facts), cpu_isa=lambda: "baseline")
    monkeypatch.setattr(backend, "EXTENSION", extension)
    monkeypatch.setattr(backend, "EXTENSION_HAS_CUDA", False)
    monkeypatch.setattr(backend, "WITHOUT_CUDA", reason)
    monkeypatch.setattr(backend, "_choices", {})
    assert _extension()["without_cuda"] == reason
    with out.capture() as shown:
        out.print(_facts("extension", _extension()))
    assert re.search(f"why no CUDA kernels +{re.escape(reason)}", shown.get())
    refused = {row["reason"] for row in _calls_without_cuda()}
    assert refused == {f"the extension was built without CUDA: {reason}"}
    facts |= {"cuda": True, "cuda_archs": "9.0a", "without_cuda": ""}
    assert "without_cuda" not in _extension()


@pytest.mark.skipif(backend.EXTENSION is None, reason=backend.EXTENSION_STATE)
def test_the_extension_has_cuda_kernels_or_a_reason():
    facts = backend.EXTENSION.build_info()
    assert bool(facts["cuda"]) == (facts["without_cuda"] == "")
    assert facts["without_cuda"] == backend.WITHOUT_CUDA


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
    tool = assembler.Assembler("/opt/ptxas", version, "TRITON_PTXAS_PATH")
    monkeypatch.setattr(assembler, "assembler", lambda arch: tool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiler = json.loads(run("info", "--json").stdout)["compiler"]
    assert compiler["ptxas"] == f"{version}, /opt/ptxas"
    assert (compiler["warning"] is not None) == is_affected
    if is_affected:
        assert "TRITON_PTXAS_PATH names another ptxas" in compiler["warning"]


def test_only_sm_90_is_affected():
    old = assembler.Assembler("/opt/ptxas", "12.9", "TRITON_PTXAS_PATH")
    assert [arch for arch in (80, 89, 90, 100, 120) if old.warning(arch)] == [90]


def test_a_gpu_has_its_times_and_the_calls_that_cuda_refuses(run, monkeypatch):
    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "tuned_table", tuned.Tuned)
    monkeypatch.setattr(backend, "EXTENSION", object())
    monkeypatch.setattr(backend, "EXTENSION_HAS_CUDA", True)
    monkeypatch.setattr(backend, "CUDA_ARCHS", "8.0;9.0a")
    times, refused = _times_of_this_gpu(), _calls_without_cuda()
    assert {row["architecture"] for row in times} == {"sm_90"}
    operations = {"attention", "layer_norm", "linear_gelu", "feed_forward"}
    assert {row["op"] for row in times} == operations
    for row in times:
        assert row["microseconds"].keys() == {"cuda", "triton"}
        assert row["kind"] in ("predicted", "measured")
    reasons = {(row["op"], row["call"]): row["reason"] for row in refused}
    assert reasons == {
        ("attention", "bias"): "the CUDA kernels do not serve bias",
        ("attention", "window"): "the CUDA kernels do not serve window",
        ("attention", "scale"): "the CUDA kernels do not serve scale",
        ("attention", "weights"): "the CUDA kernels do not serve weights",
        ("attention", "head dim 80"): "the head dim is 80, allowed: 32, 64, 128",
        ("attention", "float32"): "the dtype is float32, allowed: float16, bfloat16",
        ("layer_norm", "8192 columns"): "rows have 8192 elements, allowed: up to 6144",
        ("feed_forward", "ReLU"): "it has GELU kernels only, none for relu",
    }
    with out.capture() as shown:
        out.print(_gpu_times(times))
        out.print(_refusals(refused))
    assert "S512 D64" in shown.get()
    monkeypatch.setattr(backend, "CUDA_ARCHS", "8.0+PTX")
    monkeypatch.setattr(backend, "capability", lambda: (7, 5))
    assert all("compute capability 7.5" in row["reason"] for row in _calls_without_cuda())


def test_the_products_of_the_library_have_their_reasons():
    rows = _products_of_cuda()
    by_product = {(row["product"], row["operands"]): (row["by"], row["reason"]) for row in rows}
    not_contiguous = ("library", "the bias is not contiguous")
    for product in ("gelu(x W1ᵀ + b1)", "(dy W2) gelu'(h)"):
        reasons = {operands: row for (name, operands), row in by_product.items() if name == product}
        assert reasons == {
            "bf16 or fp16": ("CUDA C++", "the epilogue saves a pass over the pre-activation"),
            "fp32": ("library", "fp32 products in IEEE have no matrix units"),
            "a width of 770": (
                "library", "the weight has the shape (3072, 770), not of multiples of 8"
            ),
            "a weight by columns": ("library", "the weight has the strides 1 and 3072"),
            **({"a bias of every second element": not_contiguous} if "b1" in product else {}),
        }  # fmt: skip
    without = {row["product"] for row in rows if row["operands"] == "all"}
    assert without == {"gelu(h) W2ᵀ + b2", "dh W1, dhᵀ x, dyᵀ gelu(h)"}
    with out.capture() as shown:
        out.print(_products(rows))
    assert "the bias is not contiguous" in " ".join(shown.get().split())


def test_without_a_gpu_there_are_no_times(run, monkeypatch):
    monkeypatch.setattr(backend, "capability", lambda: None)
    content = json.loads(run("info", "--json").stdout)
    assert content["gpu times"] == []
    assert {row["op"] for row in content["not by cuda"]} > {"attention", "layer_norm"}


@pytest.mark.parametrize(("before", "norms"), [(False, "after each block"), (True, "before each")])
def test_an_encoder_decoder_has_its_facts(run, tmp_path, before, norms):
    config = TransformerConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=48,
        max_position_embeddings=20, normalize_before=before,
    )  # fmt: skip
    model = Transformer(config)
    model.save_pretrained(tmp_path)
    content = json.loads(run("info", str(tmp_path), "--json").stdout)
    facts = content["model"]
    assert facts["class"] == "Transformer"
    assert facts["parameters"] == f"{model.num_parameters():,}"
    assert facts["layers"] == "2 in the encoder, 1 in the decoder"
    assert facts["heads"] == "2 in the encoder, 4 in the decoder"
    assert facts["positions"] == "sinusoids for up to 20 tokens"
    assert norms in facts["layer norms"]
    # transformers has no model of this kind whose layer norms come first.
    served = facts["fastbert.accelerate"]
    assert served == "serves its encoder" if not before else served.startswith("not served: ")
    chosen = {row["op"]: row["backend"] for row in content["backends"] if row["dtype"] == "float32"}
    assert chosen.keys() > {"encoder", "decoder", "attention", "linear_cross_entropy"}


def test_a_damaged_encoder_decoder_names_its_file(run, tmp_path):
    content = {"model_type": "marian", "d_model": 30, "encoder_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = run("info", str(tmp_path))
    assert result.exit_code == 2
    assert "config.json: d_model" in " ".join(result.stderr.split())
