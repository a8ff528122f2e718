"""A model on the CPU in processes that were forked or spawned: it neither hangs nor errs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.ops import backend as backends

if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=300,
)


class Encoded(Dataset):
    """Item i: the encoding of a sequence of 200 + i tokens, made in the worker."""

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


# The parent uses OpenMP in ``parent``'s way before it forks; its child must finish all the same.
FORK = """
import os, sys, torch
from fastbert import BertModel
from fastbert.config import BertConfig
torch.set_num_threads(2)
model = BertModel(BertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=128)).eval()
ids = torch.arange(400).view(2, 200) % 97
with torch.inference_mode():
    {before}
    torch.save(model.state_dict(), sys.argv[1] + "/state")
    child = os.fork()
    if child == 0:
        torch.save(model(ids).last_hidden_state, sys.argv[1] + "/child")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert torch.equal(torch.load(sys.argv[1] + "/child"), model(ids).last_hidden_state)
print("same")
"""


@pytest.mark.parametrize(
    "before", ["model(ids)", "pass"], ids=["after-the-model", "before-anything"]
)
def test_in_a_forked_child(tmp_path, before) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORK.format(before=before), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"
