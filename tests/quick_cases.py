"""Select the cases that `make test` runs; `make every-case` runs all cases.

For a test with parameters, `make test` runs cases that contain every pair of values of two
parameters. Most bugs depend on one or two values, and few need three (Kuhn, Wallace and Gallo 2004,
"Software Fault Interactions and Implications for Software Testing"). A test with one or two
parameters therefore runs all of its cases. A test with the mark `each_value` takes long, and runs
only cases that contain every value of each parameter. Cases with the mark `every_case`, which take
long or check other tests, are left out first.

The selection depends only on the order and the parameters of the cases, so all processes of a run
make the same selection.
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
    """Return the parameters of a case that only `make every-case` runs."""
    return pytest.param(*values, marks=pytest.mark.every_case, **options)


def first_of_each(
    cases: Iterable[tuple], group: Callable[..., Hashable], name: Callable[..., str]
) -> list:
    """Return the parameters of all cases; `make test` runs only the first case of each group.

    This is for lists of mistakes that tests insert. One mistake per group shows that the tests of
    the group can fail.

    Args:
        cases: The values of the parameters of each case.
        group: Function that maps the values of a case to its group.
        name: Function that maps the values of a case to its id.
    """
    seen: set[Hashable] = set()
    parameters = []
    for case in cases:
        marks = [pytest.mark.every_case] if group(*case) in seen else []
        seen.add(group(*case))
        parameters.append(pytest.param(*case, id=name(*case), marks=marks))
    return parameters


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items that `make test` runs, in the original order."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("every_case"):
            cases[item.nodeid.partition("[")[0]].append(item)
    covering_cases = {case for of_test in cases.values() for case in covering(of_test)}
    return [item for item in items if item in covering_cases]


def covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return cases of one test that contain every pair, chosen greedily by the most new pairs.

    For a test with the mark `each_value`, the cases contain every single value instead of every
    pair.
    """
    size = 1 if cases[0].get_closest_marker("each_value") else 2
    pairs = [pairs_of(getattr(case, "callspec", None), size) for case in cases]
    left = set().union(*pairs)
    chosen = []
    # If a case adds fewer pairs than its heap entry says, the case is pushed again.
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
    """Return the combinations of `size` values in a case, or all values if there are fewer."""
    values = [
        (name, type(value), identity(value))
        for name, value in (callspec.params if callspec else {}).items()
    ]
    return set(combinations(values, min(size, len(values))))


def identity(value: Any) -> Hashable:
    """Return the value itself, or its ``id`` if the value is not hashable."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
