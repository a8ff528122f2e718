"""The CPU time and the Python calls of a layer stay below limits, measured on a mocked GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import host
import mocked_cuda
import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has its own CUDA device"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++ is not installed"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mocked_cuda")
    mocked_cuda.build(folder)
    return folder


@pytest.fixture(scope="module")
def figures(libraries: Path) -> dict[str, dict[str, Any]]:
    result = host.child([host.__file__, "--repetitions", "40"], libraries)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {row["kind"]: row for row in rows}


# The limits are a few calls above the measured numbers, because versions of Triton differ.
@pytest.mark.parametrize(
    ("kind", "calls", "launches"),
    [
        ("inference", 190, 4),
        ("training, forward", 217, 4),
        ("training, backward", 260, 9),
        ("training, autocast, forward", 230, 4),
        ("training, autocast, backward", 270, 9),
    ],
)
def test_a_layer_calls_few_functions(figures, kind, calls, launches):
    assert figures[kind]["calls"] <= calls
    assert figures[kind]["launches"] == launches


# This test needs an idle machine, because it measures times; the test above counts calls.
@pytest.mark.parametrize(
    ("kind", "limit"), [("inference", 7), ("training, forward", 10), ("training, backward", 18)]
)
def test_a_layer_takes_little_time(figures, kind, limit):
    """The CPU time of a layer is below a limit, in units of 1,000 calls of an empty function.

    A layer takes 4 units in inference, 6 in the forward of training and 11 in the backward of
    training. The limits leave room for a busy machine.
    """
    row = figures[kind]
    assert row["microseconds"] <= limit * row["yardstick"], row


def test_only_the_removal_of_padding_waits(figures):
    assert figures.pop("inference, whole call")["waits"] == ["copy to the CPU"]
    assert not any(row["waits"] for row in figures.values())


def test_cached_launches_are_the_launches_of_triton(libraries):
    program = Path(__file__).with_name("cached_launches.py")
    result = host.child([str(program)], libraries)
    assert result.returncode == 0, result.stderr
    compared, kept = map(int, result.stdout.split())
    assert kept > compared / 2 > 60


def test_a_training_step_waits_once(libraries):
    program = Path(__file__).with_name("training_step_waits.py")
    result = host.child([str(program)], libraries)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "padded": ["copy to the CPU"],
        "packed": [],
        "graphed, padded": [],
        "graphed, packed": [],
        "inside a graph": [],
    }
