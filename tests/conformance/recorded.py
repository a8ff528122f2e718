"""Run tests of another library in a separate process, and read the outcome of each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "conformance"


def results(
    name: str, tests: Sequence[Path], paths: Sequence[Path], plugins: Sequence[str], chosen: str,
    environment: Mapping[str, str],
) -> dict[str, dict]:  # fmt: skip
    """Return the outcome of each test, and the reasons why stock code ran in the test.

    Args:
        name: Name of the run, used for its files in `CACHE`.
        tests: Files with tests.
        paths: Folders for imports, which Python searches before fastbert's and this file's folder.
        plugins: Plugins of pytest.
        chosen: Expression for pytest's option -k.
        environment: Environment variables for the plugins.

    Raises:
        SystemExit: If pytest does not end normally. The message names the log of the run.
    """
    out = CACHE / f"{name}.json"
    out.unlink(missing_ok=True)
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    variables = {
        **os.environ,
        **environment,
        "CONFORMANCE_OUT": str(out),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([*map(str, (*paths, ROOT, HERE)), *inherited]),
    }
    command = [sys.executable, "-m", "pytest", "--quiet", "--no-header", "--tb=short"]
    command += ["-c", os.devnull, "--rootdir", str(CACHE), "--noconftest", "-p", "no:cacheprovider"]
    command += [word for plugin in (*plugins, "recorder") for word in ("-p", plugin)]
    command += ["--timeout", "600", "-k", chosen, *map(str, tests)]
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(command, env=variables, stdout=stream, stderr=stream).returncode
    # pytest exits with 1 if a test failed, and with 5 if no test was selected.
    if code not in (0, 1) or not out.exists():
        sys.exit(f"{name}: pytest ended with {code}; see {log}")
    return json.loads(out.read_text(encoding="utf-8"))


def passed(tests: Mapping[str, dict]) -> list[str]:
    """Return the names of the tests that passed."""
    return [name for name, test in tests.items() if test["outcome"] == "passed"]


def compare(
    name: str, stock: Mapping[str, dict], fast: Mapping[str, dict]
) -> tuple[tuple[int, ...], list[str]]:
    """Print the counts of a comparison, and the reasons why stock code ran.

    Returns:
        The counts of the printed line, and the tests that pass with stock encoders only.
    """
    lost = sorted(set(passed(stock)) - set(passed(fast)))
    fallbacks = Counter(reason for test in fast.values() for reason in test["fallbacks"])
    counts = (len(passed(stock)), len(passed(fast)), len(lost), sum(fallbacks.values()))
    print(line(name, *counts), flush=True)
    for reason, times in fallbacks.items():
        print(f"    stock code ran in {times} tests: {reason}")
    return counts, [
        f"{name}: {test}: {fast.get(test, {}).get('outcome', 'not run')}" for test in lost
    ]


def line(name: str, stock: int, fast: int, lost: int, fallbacks: int) -> str:
    """Return one line of the table of comparisons."""
    counts = f"stock passed {stock:4}   accelerated passed {fast:4}   missing {lost:3}"
    return f"{name:12} {counts}   tests that ran stock code {fallbacks:3}"


def report(missing: Sequence[str]) -> int:
    """Print the tests that pass with stock encoders only, and return the exit status."""
    print("\n".join(["", "Tests that pass with stock encoders only:", *missing]) if missing else "")
    return 1 if missing else 0
