"""Importing fastbert changes no global registry; each check runs in a new process."""

from __future__ import annotations

import _fresh_python
import pytest

pytest.importorskip("transformers")

# The snapshot contains the global registries of torch, transformers and the Python interpreter.
SNAPSHOT = """
import sys, os, warnings, torch
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils import _pytree

def snapshot():
    state = {name: len(value) for name, value in vars(module).items()
             if name.startswith("_global_") and hasattr(value, "__len__")}
    state["optimizer"] = sorted(
        hook.__module__ for hooks in (optimizer._global_optimizer_pre_hooks,
                                      optimizer._global_optimizer_post_hooks)
        for hook in hooks.values())
    state["trees"] = set(_pytree.SUPPORTED_NODES)
    state["warnings"] = list(warnings.filters)
    state["environment"] = dict(os.environ)
    if "transformers" in sys.modules:
        from transformers import AttentionInterface, AttentionMaskInterface
        state["attention"] = sorted(AttentionInterface().keys())
        state["masks"] = sorted(AttentionMaskInterface().keys())
    return state
"""
MODEL = """
import transformers
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40)
model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
ids = torch.ones(2, 5, dtype=torch.int64)
with torch.no_grad():
    model(ids)
"""


def run(code: str, after: str) -> str:
    result = _fresh_python.run("-c", SNAPSHOT + code, after=after)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_fastbert_registers_nothing():
    run("before = snapshot()\nimport fastbert\nassert snapshot() == before", "torch")


@pytest.mark.every_case
def test_accelerate_and_a_step_of_an_optimizer_register_nothing():
    run(
        MODEL + "before = snapshot()\n"
        "import fastbert\n"
        "with torch.no_grad():\n"
        "    fastbert.restore(fastbert.accelerate(model))(ids)\n"
        "    fastbert.accelerate(model)(ids)\n"
        "model.train()(ids).last_hidden_state.sum().backward()\n"
        "torch.optim.SGD(model.parameters(), lr=0.1).step()\n"
        "after = snapshot()\n"
        "assert before['optimizer'] == []\n"
        "changed = {name for name in before if before[name] != after[name]}\n"
        "assert not changed, changed",
        "transformers",
    )


def test_the_attention_interface_is_registered_by_importing_it():
    told = run(
        MODEL + "assert 'fastbert' not in snapshot()['attention']\n"
        "import fastbert.integrations.attention_interface\n"
        "assert 'fastbert' in snapshot()['attention']\n"
        "assert 'fastbert' in snapshot()['masks']\n"
        "print('registered')",
        "transformers",
    )
    assert told.strip() == "registered"
