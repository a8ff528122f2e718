"""Run the numeric tests with the code that torch and fastbert choose on older processors.

    python tests/processors.py [pytest's arguments]    # or: make test-processors

Environment variables of MKL, oneDNN and ATen make torch run its code for an older processor, and
``FASTBERT_CPU_ISA`` chooses the kernels of fastbert. Processors newer than this machine's are left
out, because this machine lacks their instructions. The exit status is 1 if a test fails in one of
the runs.

This file is also the pytest plugin that selects the tests. Torch's code for another processor
affects only tests that compare a result with torch's result by a tolerance. To find these tests,
`reaches_a_tolerance` follows the names in the code of a test, of its fixtures and of their helpers
to a function of `COMPARISONS`. The selected cases of a test function cover each value of the
parameters in `COVERED`: each dtype, backend, operation and instruction set. Lists of sizes ascend,
so cases are selected from the last to the first. Files that need minutes are in `LEFT_OUT`, with
the reasons.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# tests/kernels is left out, because it needs minutes in Triton's interpreter, and because tests/ops
# also compares every operation on every backend.
DIRECTORIES = ["csrc", "ops", "modules", "inference", "integrations"]
LEFT_OUT = [
    # In these tests, the PTX machine runs GPU kernels that nvcc compiles.
    *("csrc/test_cuda_*.py", "csrc/test_hopper_*.py"),
    # These tests run a real model of six layers on hundreds of sentences.
    *("modules/test_real_checkpoint.py", "integrations/test_sentence_embeddings.py"),
    # These tests compile or export operations that other files test.
    *("integrations/test_accelerate_graphs.py", "modules/test_gradients_of_outputs.py"),
]
# The processors are in ascending order of torch's CPU capability.
PROCESSORS = {
    "DEFAULT": {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "FASTBERT_CPU_ISA": "baseline",
    },
    "AVX2": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "FASTBERT_CPU_ISA": "avx2",
    },
    "AVX512": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "FASTBERT_CPU_ISA": "avx512",
    },
}
COMPARISONS = {"compare", "Yardstick", "assert_close", "allclose", "isclose"}
COVERED = {"dtype", "backend", "op", "operation", "isa"}


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code object of a function and of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def reaches_a_tolerance(function: Any, seen: set[Any]) -> bool:
    """Return whether a function calls, in tests or fastbert.testing, one of the `COMPARISONS`."""
    function = getattr(function, "__wrapped__", function)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    tests = Path(getattr(module, "__file__", None) or "/").is_relative_to(HERE)
    if not tests and not getattr(module, "__name__", "").startswith("fastbert.testing."):
        return False
    if isinstance(function, type):
        members = [getattr(member, "__func__", member) for member in vars(function).values()]
        return any(reaches_a_tolerance(m, seen) for m in members if hasattr(m, "__code__"))
    if not hasattr(function, "__code__") or function in seen:
        return False
    seen.add(function)
    names = {name for code in codes(function.__code__) for name in code.co_names}
    if names & COMPARISONS:
        return True
    helpers = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [helper for helper in helpers if isinstance(helper, types.ModuleType)]
    helpers += [getattr(module, name) for module in modules for name in names & set(vars(module))]
    helpers += [cell.cell_contents for cell in function.__closure__ or ()]
    return any(reaches_a_tolerance(helper, seen) for helper in helpers)


def is_numeric(item: pytest.Item, known: dict[Any, bool]) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    for function in (item.function, *(definitions[-1].func for definitions in fixtures)):
        if function not in known:
            known[function] = reaches_a_tolerance(function, set())
        if known[function]:
            return True
    return False


def selection(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return cases of the numeric tests that cover each value of the parameters in `COVERED`."""
    known: dict[Any, bool] = {}
    covered: dict[str, set[tuple[str, str]]] = {}
    chosen = []
    for item in reversed(items):
        if not is_numeric(item, known):
            continue
        parameters = item.callspec.params.items() if hasattr(item, "callspec") else ()
        values = {(name, str(value)) for name, value in parameters if name in COVERED}
        before = covered.setdefault(item.nodeid.partition("[")[0], set())
        # A test without any parameter in `COVERED` gets an empty value, which selects one case.
        if not (values or {("", "")}) <= before:
            before |= values | {("", "")}
            chosen.append(item)
    return chosen[::-1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = selection(items)
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen


def capability() -> str:
    """Return torch's CPU capability on this processor, ignoring the environment's request."""
    asked = ("ATEN_CPU_CAPABILITY",)
    environment = {name: value for name, value in os.environ.items() if name not in asked}
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env=environment, encoding="utf-8").strip()


def main() -> int:
    names, own = list(PROCESSORS), capability()
    reachable = names[: names.index(own) + 1] if own in names else names[:1]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    folders = [str(HERE / name) for name in DIRECTORIES]
    folders += [f"--ignore-glob={HERE / pattern}" for pattern in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "processors", *folders, *sys.argv[1:]]
    failed, began = [], time.monotonic()
    for name in reachable:
        print(f"== {name}: {PROCESSORS[name]}", flush=True)
        environment = os.environ | PROCESSORS[name] | {"PYTHONPATH": paths}
        start = time.monotonic()
        if subprocess.run(command, cwd=HERE.parent, env=environment).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"{time.monotonic() - began:.0f} s; processors: {', '.join(reachable)}", end="; ")
    print(f"failed: {', '.join(failed)}" if failed else "all tests pass")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
