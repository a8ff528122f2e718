"""`make test` selects cases with every pair of parameter values, and no case marked as long."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
import quick_cases
import torch


class Case:
    """A fake pytest item with the attributes that the selection reads."""

    def __init__(self, test, params=None, mark=None):
        self.nodeid = f"tests/test_a.py::{test}" + (f"[{params}]" if params else "")
        self.mark = mark
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name if name == self.mark else None


def grid(test, mark=None, **values):
    return [Case(test, dict(zip(values, v, strict=True)), mark) for v in product(*values.values())]


def pairs(cases):
    values = [[(name, id(v)) for name, v in case.callspec.params.items()] for case in cases]
    return {pair for of_case in values for pair in combinations(of_case, 2)}


@pytest.mark.parametrize("sizes", [(3, 3, 3), (5, 12, 3, 4), (2, 2, 2, 2, 2)])
def test_every_pair_of_values_occurs_in_few_cases(sizes):
    values = {f"p{i}": [object() for _ in range(size)] for i, size in enumerate(sizes)}
    cases = grid("test", **values)
    selected = quick_cases.chosen(cases)
    assert pairs(selected) == pairs(cases)
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(selected) < 2 * first * second
    assert selected == [case for case in cases if case in selected]


def test_a_test_that_is_marked_has_every_value_in_as_few_cases_as_it_has_values():
    cases = grid("test_a", mark="each_value", x=[1, 2], y=[1, 2, 3, 4, 5], z=[1, 2, 3])
    selected = quick_cases.chosen(cases)
    assert len(selected) == 5
    for name in "xyz":
        values = [{case.callspec.params[name] for case in of} for of in (selected, cases)]
        assert values[0] == values[1]


def test_a_test_of_one_or_two_parameters_has_all_of_its_cases():
    cases = [Case("test_a"), *grid("test_b", x=[1, 2, 3]), *grid("test_c", x=[1, 2], y=[3, 4])]
    assert quick_cases.chosen(cases) == cases


def test_tests_share_no_pairs_and_marked_cases_give_none():
    values = {"x": [0, 1], "y": [0, 1], "z": [0, 1]}
    alone = quick_cases.chosen(grid("test_a", **values))
    together = quick_cases.chosen([*grid("test_a", **values), *grid("test_b", **values)])
    assert len(together) == 2 * len(alone)
    marked = Case("test_a", {"x": 0, "y": 0, "z": 0}, mark="every_case")
    assert quick_cases.chosen([marked]) == []


def test_values_of_different_types_differ_and_need_no_hash():
    cases = grid("test", x=[1, True, 1.0], y=[[1], [1], {}], z=[torch.zeros(2), torch.zeros(2)])
    assert pairs(quick_cases.chosen(cases)) == pairs(cases)


def test_the_option_runs_every_case(pytestconfig, request):
    marked = [i for i in request.session.items if i.get_closest_marker("every_case")]
    assert not marked or pytestconfig.getoption("--every-case")
