"""A kept result is used only while its inputs have the same bytes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fastbert.modules.kept_result import KeptResult


class Counted:
    def __init__(self, *tensors):
        self.tensors, self.calls, self.kept = tensors, 0, KeptResult()

    def __call__(self, settings=None):
        def compute():
            self.calls += 1
            return sum(tensor.sum() for tensor in self.tensors)

        return self.kept.of(self.tensors, settings, compute)


WRITES = {
    "in place": lambda t: t.add_(1.0),
    "data": lambda t: t.data.sub_(3.0),
    "numpy": lambda t: t.numpy().__setitem__(0, 7.0),
    "view": lambda t: t.view(-1)[-1].fill_(5.0),
    "sign of zero": lambda t: t.data.__setitem__(1, -0.0),
    "not a number": lambda t: t.data.__setitem__(2, torch.nan),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_seen(write):
    first, second = torch.zeros(70_000), torch.zeros(8)
    counted = Counted(first, second)
    assert counted() == 0.0
    assert counted() == 0.0
    assert counted.calls == 1
    for place, tensor in enumerate((first, second)):
        WRITES[write](tensor)
        expected = (first.sum() + second.sum()).isnan().item()
        assert counted().isnan().item() == expected
        assert counted.calls == 2 + place
        counted()
        assert counted.calls == 2 + place


def test_settings_autocast_and_shapes_are_compared():
    counted = Counted(torch.ones(6))
    counted("a"), counted("a")
    assert counted.calls == 1
    counted("b")
    assert counted.calls == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        counted("b")
    assert counted.calls == 3
    counted.tensors = (torch.ones(2, 3),)
    counted("b")
    assert counted.calls == 4
    counted.tensors = (torch.ones(2, 3, dtype=torch.float64),)
    counted("b")
    assert counted.calls == 5


def test_nothing_is_kept_with_gradients_or_in_a_copy():
    counted = Counted(torch.ones(6, requires_grad=True))
    counted(), counted()
    assert counted.calls == 2
    with torch.no_grad():
        counted(), counted()
    assert counted.calls == 3
    strided = Counted(torch.ones(6, 6).t()[::2])
    strided(), strided()
    assert strided.calls == 1
    strided.tensors[0][1, 2] = 5.0
    assert strided() == 22.0
    kept = Counted(torch.ones(3))
    kept()
    for other in (copy.deepcopy(kept.kept), pickle.loads(pickle.dumps(kept.kept))):
        assert other._kept is None


def test_a_result_of_inference_mode_serves_other_modes():
    counted = Counted(torch.ones(6))
    with torch.inference_mode():
        counted()
    counted()
    with torch.no_grad():
        counted()
    assert counted.calls == 1


def test_a_write_during_the_computation_is_seen():
    tensor, kept = torch.ones(4), KeptResult()

    def compute():
        tensor.add_(1.0)
        return tensor.sum()

    kept.of([tensor], None, compute)
    assert kept._kept is None
