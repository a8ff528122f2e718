"""Triton's interpreter replaces Triton's functions once a launch, and puts them back after it."""

from __future__ import annotations

import pytest
import torch
from triton import language as tl

from fastbert.kernels.layer_norm import layer_norm_forward
from fastbert.ops import backend as backends

pytestmark = pytest.mark.skipif(not backends.interpreted(), reason="the interpreter does not run")


def launch() -> torch.Tensor:
    x, weight = torch.ones(3, 8), torch.ones(8)
    return layer_norm_forward(x, weight, None, eps=1e-5)[0]


def test_a_launch_leaves_the_functions_of_triton():
    before = dict(vars(tl))
    launch()
    launch()
    assert dict(vars(tl)) == before


def test_functions_are_replaced_once_a_launch(monkeypatch):
    """A layer norm calls device functions, each of which would replace them again."""
    from triton.runtime import interpreter

    replaced = []
    replace = interpreter._patch_builtin

    def counted(module, *arguments):
        replaced.append(module)
        replace(module, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    launch()
    # The second time is for ``tl.sum``, whose own file knows Triton by another module, too.
    assert 1 <= replaced.count(tl) <= 2
