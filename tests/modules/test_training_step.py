"""A BertForPreTraining step with dropout has right losses and right gradients.

The tests take several steps, and each step must use the weights from the previous update.
"""

from __future__ import annotations

import copy

import pytest
import torch
from quick_cases import long_case

from fastbert import BertForPreTraining
from fastbert.ops import backend as backends
from fastbert.testing import model_parity
from fastbert.testing.compare import assert_close
from fastbert.testing.model_parity import CONFIG, check_step
from fastbert.testing.yardstick import Yardstick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [
    name
    for name in backends.BACKENDS
    if backends.refusal("layer_norm", name, backends.Request(DEVICE, torch.float32)) is None
]
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="the extension cannot run here")
REASON = "roundings early in the backward pass are shared by every gradient after them"


@pytest.mark.parametrize(
    "backend", [long_case(name) if name == "triton" else name for name in BACKENDS]
)
def test_every_gradient_of_a_training_step(backend):
    rows = check_step(backend, torch.float32, DEVICE, each=True, factor=3.0, reason=REASON)
    assert len(rows) == 48
    failed = [row.detail for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


@needs_cpu
@pytest.mark.parametrize("autocast", [False, True], ids=["model", "autocast"])
def test_every_gradient_of_a_training_step_in_bfloat16(autocast):
    options = {"each": True, "autocast": autocast, "factor": 3.0, "reason": REASON}
    rows = check_step("cpu", torch.bfloat16, **options)
    assert len(rows) == 48
    failed = [row.detail for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


def losses(model, optimizer, batch, autocast, again=False):
    """Return the losses of five training steps.

    With ``again``, also return the losses of a deep copy of the model before each step.
    """
    first, copies = [], []
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if again:
                copies.append(copy.deepcopy(model)(**batch).loss.detach())
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first.append(loss.detach())
    return torch.stack(first), copies


def trained(backend, dtype, make_optimizer, autocast=False, again=False):
    torch.manual_seed(3)
    model = BertForPreTraining(CONFIG, backend=backend).to(dtype).eval()
    optimizer = make_optimizer(model.parameters())
    return losses(model, optimizer, model_parity.batch_of(3), autocast, again)


@needs_cpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_weights_are_packed_again_after_each_step(autocast):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    got, fresh = trained("cpu", torch.float32, adamw, autocast, again=True)
    assert torch.equal(got, torch.stack(fresh))
    assert bool((got.diff() < 0).all())


@needs_cpu
def test_the_loss_falls_as_the_references_does():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    got, _ = trained("cpu", torch.float32, sgd)
    oracle, _ = trained("reference", torch.float64, sgd)
    yardstick = Yardstick(lambda: trained("reference", torch.float32, sgd))
    assert_close("losses", got, oracle, yardstick[0])
    assert float(got[-1]) < float(got[0])


def test_another_dropout_mask_fails(monkeypatch):
    """If only one model uses other dropout seeds, every tensor fails the comparison."""
    seeds = model_parity.dropout_seeds
    monkeypatch.setattr(model_parity, "dropout_seeds", lambda *a: seeds(*a)[::-1])
    rows = check_step(None, torch.float32, DEVICE)
    assert not any(row.passed for row in rows)
