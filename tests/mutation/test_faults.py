"""The faults still fit the kernels, and one of them is caught. ``make mutate`` tries them all."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faults import FAULTS, SELECTIONS, Fault
from mutate import ROOT, copy_tree, run_tests, try_fault


def test_there_are_enough_faults_and_each_has_its_own_name():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.noun for fault in FAULTS} == set(SELECTIONS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_the_kernel_and_leaves_it_python(fault):
    text = (ROOT / "kernels" / fault.file).read_text(encoding="utf-8")
    broken = fault.broken(text)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))


def test_every_kernel_file_has_faults():
    """activation_tile.py and its like hold what the kernels share."""
    assert {fault.file for fault in FAULTS} == {path.name for path in ROOT.glob("kernels/*.py")}


@pytest.mark.parametrize("old", ["nowhere", "twice"])
def test_a_fault_that_does_not_fit_is_an_error(old):
    with pytest.raises(ValueError, match=f"f: a.py contains '{old}'"):
        Fault("f", "philox", "a.py", old, "").broken("twice twice")


def test_a_fault_is_caught_and_mended(tmp_path):
    tree = copy_tree(tmp_path)
    fault = next(fault for fault in FAULTS if fault.noun == "philox")
    outcome = try_fault(tree, fault)
    assert outcome.caught
    assert outcome.by.startswith("tests/kernels/test_philox.py::")
    assert run_tests(tree, fault.noun) == (True, "")
