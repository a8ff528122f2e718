"""The options for ``fastbert.testing.parity`` select the right cases."""

from __future__ import annotations

import pytest

from fastbert.testing import parity


@pytest.mark.parametrize("function", [parity.plan, lambda *a, **k: list(parity.check(*a, **k))])
@pytest.mark.parametrize(("name", "value"), [("case", "plain"), ("quick", True)])
def test_random_cases_refuse_a_selection_of_registered_cases(function, name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value!r} with random=2, allowed: one of"):
        function("layer_norm", "reference", random=2, **{name: value})


def test_random_cases_stand_alone():
    cases = {case.name for case, *_ in parity.plan("layer_norm", "reference", random=2, seed=3)}
    assert cases == {"random-3-0", "random-3-1"}
