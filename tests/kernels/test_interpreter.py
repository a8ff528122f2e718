"""The changes of tests/_interpreter.py do not change any result of Triton's interpreter.

With these changes, the interpreter replaces Triton's functions once per launch, restores them after
the launch, and shares the descriptions of types.
"""

from __future__ import annotations

import pytest
import torch
from triton import language as tl
from triton.language import core

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
    """Functions are replaced once per launch, and not again for each device function."""
    from triton.runtime import interpreter

    replaced = []
    replace = interpreter._patch_builtin

    def counted(module, *arguments):
        replaced.append(module)
        replace(module, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    launch()
    # A second replacement is for ``tl.sum``, whose file also uses another module of Triton.
    assert 1 <= replaced.count(tl) <= 2


SIZES = (
    [4],
    [4, 8],
    [1, core.constexpr(2)],
    core.tuple([8, 4]),
    core.block_type(core.int8, [2, 4]).shape,
)
ELEMENTS = (
    core.int32,
    core.float32,
    core.pointer_type(core.float16),
    # This type has the same name as the type before it.
    core.pointer_type(core.float16, "shared"),
)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_types_are_described_once(element):
    for size in SIZES:
        expected = [core._unwrap_if_constexpr(x) for x in size]
        for made in (core.block_type(element, size), core.block_type(element, size)):
            assert made.shape.values == expected
            assert made.numel == expected[0] * (expected[1] if len(expected) > 1 else 1)
            assert made.name == f"<{[str(x) for x in expected]}, {element}>"
            assert made.scalar is element
            assert made == core.block_type(element, expected)
            assert all(made != core.block_type(x, size) for x in ELEMENTS if x is not element)
            tensor = core.tensor(None, made)
            assert tensor.dtype is element
            assert tensor.type is made
            assert [type(x) for x in tensor.shape] == [core.constexpr] * len(expected)
            assert [x.value for x in tensor.shape] == expected
            assert tensor.numel.value == made.numel
    number = core.tensor(None, element)
    assert (list(number.shape), number.numel.value, number.type) == ([], 1, element)


def test_types_with_a_wrong_shape_are_refused():
    for shape, error in (([3], ValueError), ([], TypeError), ([2**21], ValueError)):
        for _ in range(2):
            with pytest.raises(error):
                core.block_type(core.int32, shape)
