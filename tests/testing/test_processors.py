"""`make test-processors` selects the tests that compare results by a tolerance."""

from __future__ import annotations

from types import SimpleNamespace

import processors
import pytest
import torch

from fastbert.testing import compare as compared


def by_a_module(x: torch.Tensor) -> None:
    compared.assert_close("x", x, x.double(), x)


def by_a_helper(x: torch.Tensor) -> None:
    by_a_module(x)


def by_an_inner_function(x: torch.Tensor) -> None:
    [by_a_helper(y) for y in x]


class Pair:
    def check(self, x: torch.Tensor) -> None:
        torch.testing.assert_close(x, x)


def by_a_class(x: torch.Tensor) -> None:
    Pair().check(x)


def by_bits(x: torch.Tensor) -> None:
    assert torch.equal(x, x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_a_module, True),
        (by_a_helper, True),
        (by_an_inner_function, True),
        (by_a_class, True),
        (by_bits, False),
    ],
)
def test_a_comparison_is_found_through_helpers(function, expected):
    assert processors.reaches_a_tolerance(function, set()) == expected


def item(function, fixtures=(), **parameters):
    name2fixturedefs = {f.__name__: [SimpleNamespace(func=f)] for f in fixtures}
    return SimpleNamespace(
        nodeid=f"{function.__name__}[{parameters}]" if parameters else function.__name__,
        function=function,
        callspec=SimpleNamespace(params=parameters),
        _fixtureinfo=SimpleNamespace(name2fixturedefs=name2fixturedefs),
    )


def test_the_largest_case_of_each_covered_value_is_selected():
    sizes, dtypes = (1, 59, 768), (torch.float32, torch.bfloat16)
    cases = [item(by_a_helper, size=size, dtype=dtype) for size in sizes for dtype in dtypes]
    plain, bits, fixture = item(by_a_class), item(by_bits), item(by_bits, [by_a_module])
    chosen = processors.selection([*cases, plain, bits, fixture])
    assert chosen == [*cases[-2:], plain, fixture]


def test_every_folder_and_every_file_that_is_left_out_exists():
    for name in processors.DIRECTORIES:
        assert (processors.HERE / name).is_dir()
    for pattern in processors.LEFT_OUT:
        assert list(processors.HERE.glob(pattern)), pattern
