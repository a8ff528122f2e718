"""The scripts in benchmarks/ start, and refuse what they cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_gpu_dry_run_lists_the_commands_of_the_sections():
    everything = run("benchmarks.gpu", "--dry-run")
    assert everything.returncode == 0
    for section in ("build", "test", "check", "bench"):
        assert f"[{section}] " in everything.stdout
    one = run("benchmarks.gpu", "--dry-run", "check")
    assert [line.split()[0] for line in one.stdout.splitlines()] == ["[check]"]


def test_gpu_unknown_section():
    result = run("benchmarks.gpu", "--dry-run", "profile")
    assert result.returncode == 2
    assert "SECTION: got profile, allowed: build, test, check, bench" in result.stderr


@no_gpu
def test_gpu_says_why_nothing_runs(tmp_path):
    result = run("benchmarks.gpu", "--out", str(tmp_path / "gpu"))
    assert result.returncode == 2
    assert "no CUDA device" in result.stderr
    assert not (tmp_path / "gpu").exists()


@no_gpu
def test_suite_runs_on_small_shapes():
    options = ["-o", "addopts=", "--benchmark-only", "--quick", "--benchmark-min-rounds=1"]
    options += ["--benchmark-max-time=0.01", "-p", "no:cacheprovider", "-q"]
    result = run(
        "pytest", "benchmarks", *options, "-k", "float32 and (layer_norm or (half and fastbert))"
    )
    assert result.returncode == 0, result.stdout
    assert "layer_norm 256×256 torch.float32 forward" in result.stdout
