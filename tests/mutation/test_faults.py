"""All faults fit the current sources, and tests catch one of them; ``make mutate`` tries all."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cpp_faults import CPP_FAULTS, CPP_SELECTIONS, UNITS, WITHOUT_FAULTS
from extension import Unit, machine_sources, sources, text_of
from faults import FAULTS, SELECTIONS, Fault
from mutate import ROOT, copy_tree, run_tests, try_fault
from page_faults import PAGE_FAULTS, PAGE_SELECTIONS
from ptx_faults import PTX_FAULTS, PTX_SELECTIONS, PTX_UNITS


def test_there_are_enough_faults_and_each_has_its_own_name():
    assert len(FAULTS) >= 30
    assert len(CPP_FAULTS) >= 60
    assert len(PTX_FAULTS) >= 40
    assert len(PAGE_FAULTS) >= 30
    every = (*FAULTS, *CPP_FAULTS, *PTX_FAULTS, *PAGE_FAULTS)
    assert len({fault.name for fault in every}) == len(every)
    assert {fault.noun for fault in FAULTS} == set(SELECTIONS)
    assert {fault.noun for fault in CPP_FAULTS} == set(CPP_SELECTIONS) == set(UNITS)
    assert {fault.noun for fault in PTX_FAULTS} <= set(PTX_SELECTIONS) == set(PTX_UNITS)
    assert {fault.noun for fault in PAGE_FAULTS} == set(PAGE_SELECTIONS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_the_kernel_and_leaves_it_python(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    broken = fault.broken(text)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", CPP_FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_one_line_of_a_file_that_its_unit_includes(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.broken(text) != text
    assert fault.file in included(UNITS[fault.noun])


@pytest.mark.parametrize("fault", PTX_FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_the_ptx_machine(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.broken(text) != text
    assert fault.file == PTX_UNITS[fault.noun].source


@pytest.mark.parametrize("fault", PAGE_FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_a_source_of_the_page(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.broken(text) != text


def test_every_program_of_the_page_has_faults():
    programs = (ROOT / "fastbert/viewer/web/src").rglob("*.js")
    faulty = {fault.file for fault in PAGE_FAULTS}
    assert {path.relative_to(ROOT).as_posix() for path in programs} <= faulty


@functools.cache
def included(unit: Unit) -> set[str]:
    """Return the files of csrc that the compiler reads to compile ``unit``."""
    paths, texts = {unit.source}, [(Path(unit.source).parent, text_of(ROOT, unit))]
    while texts:
        folder, text = texts.pop()
        for name in re.findall(r'^#include "(.+)"$', text, re.M):
            path = (ROOT / folder / name).resolve().relative_to(ROOT)
            if path.as_posix() not in paths:
                paths.add(path.as_posix())
                texts.append((path.parent, (ROOT / path).read_text(encoding="utf-8")))
    return paths


def test_the_build_with_a_fault_has_every_source_but_those_of_cuda():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp")}
    assert set(sources()) == {name for name in files if not name.startswith("csrc/cuda/")}
    assert len(machine_sources()) > 20


def test_every_kernel_file_has_faults():
    """Every file of kernels/ has faults, including files without a kernel, such as tiles.py."""
    kernels = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kernels/*.py")}
    assert {fault.file for fault in FAULTS} == kernels


def test_every_file_of_the_cpu_kernels_has_faults_or_a_reason():
    paths = (path for path in ROOT.glob("csrc/cpu/**/*") if path.is_file())
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    faulty = {fault.file for fault in CPP_FAULTS}
    assert not faulty & set(WITHOUT_FAULTS)
    others = {f"csrc/{name}.h" for name in ("activations", "checks", "normal_tail")}
    others.add("csrc/unchanged.cpp")
    assert files <= faulty | set(WITHOUT_FAULTS) <= files | others


@pytest.mark.parametrize("old", ["nowhere", "twice"])
def test_a_fault_that_does_not_fit_is_an_error(old):
    with pytest.raises(ValueError, match=f"f: a.py contains '{old}'"):
        Fault("f", "philox", "a.py", old, "").broken("twice twice")


@pytest.mark.every_case
def test_a_fault_is_caught_and_mended(tmp_path):
    tree = copy_tree(tmp_path)
    fault = next(fault for fault in FAULTS if fault.noun == "philox")
    outcome = try_fault(tree, fault, {})
    assert outcome.caught
    assert outcome.quick
    assert outcome.by.startswith("tests/kernels/test_philox.py::")
    assert run_tests(tree, fault.noun, every_case=False) == (True, "")
