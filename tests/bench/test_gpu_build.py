"""A build accepts only useful values of TORCH_CUDA_ARCH_LIST, and names a value that it refuses."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for imports from benchmarks/

from benchmarks.gpu import __main__ as gpu  # noqa: E402
from benchmarks.gpu import sections  # noqa: E402
from fastbert.ops import backend  # noqa: E402

VARIABLE = "TORCH_CUDA_ARCH_LIST"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a CUDA build of torch and GPUs of some capabilities."""

    def pretend(given: str | None, *capabilities: tuple[int, int], cuda: str = "13.0") -> None:
        # monkeypatch sets the variable first, so that it can undo a change by setup.py.
        monkeypatch.setenv(VARIABLE, given or "")
        if given is None:
            monkeypatch.delenv(VARIABLE)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capabilities[i])

    return pretend


def architectures() -> str:
    return runpy.run_path(str(ROOT / "setup.py"))["architectures"]()


@pytest.mark.parametrize(
    ("given", "expected", "has_hopper"),
    [
        (None, "8.0;9.0a;10.0+PTX", True),
        ("", "8.0;9.0a;10.0+PTX", True),
        ("9.0a", "9.0a", True),
        ("8.0 9.0a", "8.0;9.0a", True),
        ("8.0, 9.0a ,10.0", "8.0;9.0a;10.0", True),
        ("9.0a+PTX", "9.0a+PTX", True),
        ("8.0;9.0a+PTX;", "8.0;9.0a+PTX", True),
        ("9.0", "9.0", False),
        ("8.0;9.0+PTX", "8.0;9.0+PTX", False),
        ("Hopper", "9.0+PTX", False),
        ("Ampere", "8.0;8.6+PTX", False),
    ],
)
def test_the_list_is_read_as_torch_accepts_it(machine, capsys, given, expected, has_hopper):
    machine(given)
    assert architectures() == expected
    words = f"CUDA code for {expected}, {'with' if has_hopper else 'without'} the kernels of Hopper"
    assert words in capsys.readouterr().err
    # The environment variable has the list too, because torch compiles for the variable.
    assert os.environ[VARIABLE] == expected
    assert ("9.0a" in expected) == has_hopper


def test_a_toolkit_before_12_8_has_another_default(machine):
    machine(None, cuda="12.6")
    assert architectures() == "8.0+PTX;9.0a"


@pytest.mark.parametrize("given", ["9.9", "sm_90", "hopper", "9.0b"])
def test_an_unknown_architecture_is_refused_by_name(machine, given):
    machine(given)
    with pytest.raises(SystemExit, match=f"{VARIABLE}: got '{given}', allowed: architectures that"):
        architectures()


@pytest.mark.parametrize("given", ["9.0", "8.0;9.0+PTX", "Hopper", "8.0+PTX"])
def test_a_hopper_gpu_refuses_a_list_without_its_kernels(machine, given):
    machine(given, (8, 0), (9, 0))
    with pytest.raises(SystemExit) as refused:
        architectures()
    message = str(refused.value)
    assert f"{VARIABLE}: got {given!r}" in message
    assert "allowed on a GPU of compute capability 9.0: a list with 9.0a" in message
    # On another GPU, the list is allowed.
    machine(given, (8, 0))
    architectures()


@pytest.mark.parametrize("given", [None, "9.0a", "8.0 9.0a+PTX"])
def test_a_hopper_gpu_takes_a_list_with_its_kernels(machine, given):
    machine(given, (9, 0))
    assert "9.0a" in architectures()


def test_the_extension_has_the_list_that_setup_returns(machine, monkeypatch):
    """The choice of a backend reads the list of architectures from the extension."""
    machine("8.0, 9.0a+PTX")
    monkeypatch.setattr(backend, "CUDA_ARCHS", architectures())
    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    assert backend.refuse_missing_code() is None
    monkeypatch.setattr(backend, "capability", lambda: (10, 0))
    assert "built for 8.0;9.0a+PTX" in (backend.refuse_missing_code() or "")


def test_the_gpu_command_refuses_before_the_build(machine, monkeypatch, capsys, tmp_path):
    started = []

    def run(section, folder, seconds):
        started.append(section.name)
        return {"section": section.name, "status": 0, "seconds": 0.0, "commands": []}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.summary, "write", lambda *arguments: None)
    machine("9.0", (9, 0))
    command = ["benchmarks.gpu", "build", "bench-rows", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 2
    assert not started
    assert f"{VARIABLE}: got '9.0'" in capsys.readouterr().err
    # The variable is not checked if the build section is not among the chosen sections.
    monkeypatch.setattr(sys, "argv", [*command[:1], *command[2:]])
    assert gpu.main() == 0
    assert started == ["bench-rows"]


def test_a_build_without_hopper_kernels_fails_on_hopper(monkeypatch):
    """On a Hopper GPU, the check fails if the built extension has no code for 9.0a."""
    for archs, capability, refused in (
        ("8.0;9.0+PTX", (9, 0), True),
        ("8.0;9.0a", (9, 0), False),
        ("8.0+PTX", (8, 0), False),
    ):
        monkeypatch.setattr(backend, "capability", lambda arch=capability: arch)
        monkeypatch.setattr(backend, "CUDA_ARCHS", archs)
        with pytest.raises(SystemExit) as ended:
            exec(sections.HAS_HOPPER)  # a command of the build section runs this
        message = f"the extension has no kernels of Hopper GPUs: it was built for {archs}"
        assert ended.value.code == (message if refused else None)
