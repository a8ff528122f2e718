"""The PTX machine and the tolerance rule catch mistakes inserted into the compiled kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from compiled_faults import FAULTS, KINDS, UNCAUGHT, CompiledFault

from fastbert.ops import backend as backends

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not backends.HAS_TRITON, reason="needs triton"),
    # Compilation takes most of the time.
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def environment(pytestconfig):
    """Return the environment of a process that compiles; Triton's cache stays between runs."""
    cache = pytestconfig.cache.mkdir("triton")
    path = {"PYTHONPATH": str(HERE.parents[1])}
    return {**backends.compiler_environment(cache), **path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def outcomes(environment, request):
    """Return, by the name of each selected fault, what caught the fault, or "" if nothing did."""
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    faults = {str(spec.params["fault"]) for spec in specs if spec and "fault" in spec.params}
    names = [str(fault) for fault in (*FAULTS, *UNCAUGHT) if str(fault) in faults]
    result = subprocess.run(
        [sys.executable, str(HERE / "try_compiled_faults.py"), *names],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["name"]: line["found"] for line in lines}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_caught(outcomes, fault):
    assert outcomes[str(fault)]


@pytest.mark.every_case
@pytest.mark.parametrize("fault", UNCAUGHT, ids=str)
def test_a_harmless_change_is_not_taken_for_a_fault(outcomes, fault):
    """The machine and the tolerance rule accept the harmless changes in `UNCAUGHT`."""
    assert outcomes[str(fault)] == ""


def test_every_kind_and_both_architectures_have_faults():
    counts = Counter(fault.kind for fault in FAULTS)
    assert set(counts) | {fault.kind for fault in UNCAUGHT} == set(KINDS)
    assert {fault.arch for fault in FAULTS} == {80, 90}
    assert len({str(fault) for fault in (*FAULTS, *UNCAUGHT)}) == len(FAULTS) + len(UNCAUGHT)


def test_a_fault_that_does_not_fit_is_an_error():
    fault = CompiledFault(90, "short", "attention_short_forward", "barrier", "first")
    with pytest.raises(ValueError, match="first barrier: the PTX has no such instruction"):
        fault.broken("ret;\n")
    text = "\tbar.sync \t0;\n\tret;\n\t@%p3 bar.sync 1, 64;\n"
    assert "1, 64" in fault.broken(text)
    assert "bar" not in fault._replace(which="every").broken(text)


@pytest.mark.every_case
@pytest.mark.parametrize("arch", [80, 90])
def test_attention_weights(environment, arch):
    program = [sys.executable, str(HERE / "attention_weights_on_ptx.py"), str(arch)]
    result = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
