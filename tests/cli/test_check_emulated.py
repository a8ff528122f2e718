"""``fastbert check --emulate`` has the right options, table, JSON and exit status."""

from __future__ import annotations

import json

import _fresh_python
import pytest

from fastbert.testing import emulation
from fastbert.testing.emulation import EmulatedRun
from fastbert.testing.parity import ParityRow

COMMAND = "fastbert check --op rotary --case plain --emulate sm_90 --schedule 1"


def run_of(**changes) -> EmulatedRun:
    row = ParityRow(
        "rotary", "plain", "triton", "float32", "out", 1e-7, 1e-7, 1.25, True, "fine", COMMAND
    )
    values = {
        "arch": "sm_90", "op": "rotary", "case": "plain", "backend": "triton", "dtype": "float32",
        "schedule": 1, "approximate": 0.0, "launches": {"rotary_forward": 3}, "seconds": 0.5,
        "compile_seconds": 2.0, "rows": [row], "fault": "", "command": COMMAND, "number": 1,
        "total": 1,
    }  # fmt: skip
    return EmulatedRun(**{**values, **changes})


@pytest.fixture
def emulated(monkeypatch):
    """Return the list of runs that ``emulate`` yields, and the list of selections it receives."""
    runs, seen = [], []

    def emulate(selections, processes):
        seen.extend(selections)
        yield from runs

    monkeypatch.setattr(emulation, "emulate", emulate)
    monkeypatch.setattr(emulation, "obstacle", lambda backend: None)
    return runs, seen


def test_table_and_json(run, emulated):
    emulated[0].append(run_of())
    result = run("check", "--emulate", "sm_90")
    assert result.exit_code == 0
    (line,) = (line.split() for line in result.stdout.splitlines() if "rotary" in line)
    assert line == [
        "rotary",
        "triton",
        "float32",
        "sm_90",
        "1",
        "3",
        "1.25",
        "0.5",
        "+",
        "2.0",
        "ok",
    ]
    assert "1 runs, 3 launches of compiled kernels: all pass" in result.stdout
    content = json.loads(run("check", "--emulate", "sm_90", "--json").stdout)
    assert content["passed"] is True
    assert content["summary"][0]["launches"] == 3
    assert content["runs"][0]["rows"][0]["ratio"] == 1.25


def test_a_fault_fails_and_says_how_to_reproduce(run, emulated):
    emulated[0].extend([run_of(), run_of(rows=[], fault="PtxFault: race: byte 8 of shared memory")])
    result = run("check", "--emulate", "sm_90")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "rotary, plain, triton, float32, sm_90: PtxFault: race: byte 8" in result.stdout
    assert f"reproduce: {COMMAND}" in result.stdout
    as_json = run("check", "--emulate", "sm_90", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["passed"] is False


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"backends": ("triton", "cuda"), "quick": True, "schedule": 1}),
        (("--backend", "cuda"), {"backends": ("cuda",), "quick": False}),
        (("--case", "plain", "--op", "rotary"), {"case": "plain", "quick": False}),
        (("--cases", "3", "--seed", "4", "--schedule", "0"), {"random": 3, "seed": 4}),
        (("--backend", "triton", "--quick"), {"backends": ("triton",), "quick": True}),
        (("--approximate", "-0.5"), {"approximate": -0.5}),
    ],
)
def test_the_options_choose_what_runs(run, emulated, options, expected):
    emulated[0].append(run_of())
    assert run("check", "--emulate", "sm_80", *options).exit_code == 0
    (selection,) = emulated[1]
    assert selection.arch == "sm_80"
    assert selection.schedule == (0 if "--schedule" in options else 1)
    assert {name: getattr(selection, name) for name in expected} == expected


def test_a_backend_that_cannot_run_is_left_out_with_a_note(run, refused, emulated, monkeypatch):
    emulated[0].append(run_of())
    reasons = {"cuda": "nvcc is not on the path"}
    monkeypatch.setattr(emulation, "obstacle", reasons.get)
    result = run("check", "--emulate", "sm_90")
    assert result.exit_code == 0
    assert "note: the backend cuda is left out: nvcc is not on the path" in result.output
    assert emulated[1][0].backends == ("triton",)
    reasons["triton"] = "triton is not installed"
    assert refused("check", "--emulate", "sm_90").endswith(
        "no backend can run here: triton: triton is not installed; cuda: nvcc is not on the path"
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--emulate", "sm_70"), "--emulate: got 'sm_70', allowed: sm_80, sm_90"),
        (("--emulate", "sm_90", "--backend", "cpu"), "--backend: got 'cpu', allowed: triton, cuda"),
        (("--emulate", "sm_90", "--aot"), "--emulate: got 'sm_90' with --aot"),
        (("--emulate", "sm_90", "--cases", "1", "--quick"), "--quick: got the flag with --cases 1"),
    ],
)
def test_options_that_do_not_fit(refused, arguments, named):
    assert named in refused("check", *arguments)


@pytest.mark.parametrize("command", [["check", "--emulate", "sm_90"], ["bench", "--predict"]])
def test_without_ptxmachine_one_line_says_how_to_install_it(command):
    program = "import sys; sys.modules['ptxmachine'] = None; from fastbert.cli import main; main()"
    run = _fresh_python.run("-c", program, *command, "--op", "layer_norm")
    assert run.returncode == 2
    assert run.stderr == (
        "error: the PTX machine is not installed: pip install ./ptxmachine in a checkout of "
        "fastbert\n"
    )
