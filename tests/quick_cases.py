"""Which cases `make test` runs; `make every-case` runs all cases.

Of a test with parameters, `make test` runs cases that contain every pair of values of two
parameters. Most faults show with one or two values, and few need three (Kuhn, Wallace and Gallo
2004, "Software Fault Interactions and Implications for Software Testing"). A test with one or two
parameters therefore runs with all of its values. A test that is marked with `each_value` takes
long, and runs cases that contain every value of each parameter. Cases that are marked with
`every_case` take long or test other tests, and are left out first.

The choice depends on nothing but the order and the parameters of the cases, so every process of a
run makes the same choice.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[Hashable, ...]


def long_case(*values: Any, **options: Any) -> Any:
    """Return the parameters of a case that `make test` leaves to `make every-case`."""
    return pytest.param(*values, marks=pytest.mark.every_case, **options)


def first_of_each(
    cases: Iterable[tuple], group: Callable[..., Hashable], name: Callable[..., str]
) -> list:
    """Return parameters, of which `make test` runs the first of each group.

    Lists of faults are such parameters. They test the tests, and one fault shows that the tests of
    its group judge.

    Args:
        cases: The values of the parameters of each case.
        group: Function of these values that returns the group of the case.
        name: Function of these values that returns the id of the case.
    """
    seen: set[Hashable] = set()
    parameters = []
    for case in cases:
        marks = [pytest.mark.every_case] if group(*case) in seen else []
        seen.add(group(*case))
        parameters.append(pytest.param(*case, id=name(*case), marks=marks))
    return parameters


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items that `make test` runs, in their order."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("every_case"):
            cases[item.nodeid.partition("[")[0]].append(item)
    covering_cases = {case for of_test in cases.values() for case in covering(of_test)}
    return [item for item in items if item in covering_cases]


def covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return cases of one test that contain every pair; each next case adds the most pairs.

    With the mark `each_value`, they contain every value.
    """
    size = 1 if cases[0].get_closest_marker("each_value") else 2
    pairs = [pairs_of(getattr(case, "callspec", None), size) for case in cases]
    left = set().union(*pairs)
    chosen = []
    # A case that adds fewer pairs than when it was last looked at goes back into the heap.
    best = [(-len(of_case), place) for place, of_case in enumerate(pairs)]
    heapq.heapify(best)
    while left:
        expected, place = heapq.heappop(best)
        added = pairs[place] & left
        if len(added) == -expected:
            chosen.append(cases[place])
            left -= added
        elif added:
            heapq.heappush(best, (-len(added), place))
    return chosen


def pairs_of(callspec: Any, size: int) -> set[Pair]:
    """Return the sets of `size` values in a case; a case of fewer parameters is one itself."""
    values = [
        (name, type(value), identity(value))
        for name, value in (callspec.params if callspec else {}).items()
    ]
    return set(combinations(values, min(size, len(values))))


def identity(value: Any) -> Hashable:
    """Return the value itself, or the number of its object if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
