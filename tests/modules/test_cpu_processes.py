"""A model on the CPU gives exact results in forked and spawned processes, and never hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _process_matrix import METHODS, PARENTS, SECONDS
from quick_cases import long_case
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.ops import backend as backends

if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

PROGRAM = Path(__file__).with_name("_process_matrix.py")

CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=300,
)


class Encoded(Dataset):
    """A dataset whose item i is the encoding of 200 + i tokens, computed in the worker process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = modules.BertModel(CONFIG).eval()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        ids = (torch.arange(200 + index) % 97).unsqueeze(0)
        with torch.inference_mode():
            return self.model(ids).last_hidden_state[0, :200].clone()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_the_workers_of_a_data_loader(method) -> None:
    encoded = Encoded()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = torch.stack([encoded[i] for i in range(3)])
        loader = DataLoader(
            encoded, batch_size=3, num_workers=1, multiprocessing_context=method, timeout=200
        )
        (actual,) = list(loader)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(actual, expected)


@pytest.fixture(
    scope="module",
    params=[name if name == "the-model" else long_case(name) for name in PARENTS],
)
def parent(request, tmp_path_factory) -> tuple[dict[str, int], Path]:
    """Return the exit statuses of the children by start method, and the folder with the results.

    The parent process first does the action ``param``. An exit status of -14 means that a child
    hung until SIGALRM ended it.
    """
    folder = tmp_path_factory.mktemp(request.param)
    run = subprocess.run(
        [sys.executable, PROGRAM, request.param, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=5 * SECONDS,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    return {method: int(status) for method, status, _ in lines}, folder


@pytest.mark.parametrize("method", METHODS)
def test_a_child_has_the_result_of_its_parent(parent, method) -> None:
    statuses, folder = parent
    assert statuses[method] == 0
    threads, waves, states = torch.load(folder / method)
    expected_threads, expected_waves, expected = torch.load(folder / "parent")
    assert threads == expected_threads == 2
    assert torch.equal(waves, expected_waves)
    assert torch.equal(states, expected)
