"""Run transformers' own tests with every encoder accelerated, and compare with stock.

The source distribution of transformers contains ``test_modeling_common.py``, the tests that every
model of transformers must pass. This script downloads the distribution of the installed version,
unpacks its tests into ``build/conformance``, and runs them for the families that
``fastbert.accelerate`` serves. Each family runs in two processes, with stock and with accelerated
encoders. The script prints a table of the passed tests. The exit status is 1 if a test passes with
stock encoders only.

    python tests/conformance/transformers_suite.py                  # ten families
    python tests/conformance/transformers_suite.py bert mpnet       # two of them

The script needs pytest, parameterized and, once, the package index. It is not part of the test
suite, which needs no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from source_distribution import fetch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "conformance"
FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "albert",
    "electra",
    "mpnet",
    "modernbert",
    "nomic_bert",
)
# The distribution lacks these two modules, which test_modeling_common.py imports. They test export
# and text generation, and encoders do not generate text.
STUBS = {
    "tests/__init__.py": "",
    "tests/exporters/__init__.py": "",
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/generation/__init__.py": "",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--tests", default="", help="expression for pytest's -k that selects tests")
    chosen = parser.parse_args()
    suite = unpacked(importlib.metadata.version("transformers"))
    rows, missing = [], []
    for family in chosen.families or FAMILIES:
        stock, fast = (results(suite, family, mode, chosen.tests) for mode in ("stock", "fast"))
        lost = sorted(set(passed(stock)) - set(passed(fast)))
        missing += [
            f"{family}: {name}: {fast.get(name, {}).get('outcome', 'not run')}" for name in lost
        ]
        fallbacks = Counter(reason for test in fast.values() for reason in test["fallbacks"])
        rows.append(
            (family, len(passed(stock)), len(passed(fast)), len(lost), sum(fallbacks.values()))
        )
        print(line(*rows[-1]), flush=True)
        for reason, times in fallbacks.items():
            print(f"    stock code ran in {times} tests: {reason}")
    print(line("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    print("\n".join(["", "Tests that pass with stock encoders only:", *missing]) if missing else "")
    return 1 if missing else 0


def line(family: str, stock: int, fast: int, lost: int, fallbacks: int) -> str:
    counts = f"stock passed {stock:4}   accelerated passed {fast:4}   missing {lost:3}"
    return f"{family:12} {counts}   tests that ran stock code {fallbacks:3}"


def unpacked(version: str) -> Path:
    """Return the folder with the tests of the distribution and the modules that it lacks."""
    folder = CACHE / f"transformers-{version}"
    if not (folder / "complete").exists():
        archive = fetch("transformers", version, CACHE)
        with tarfile.open(archive) as tar:
            tests = [m for m in tar.getmembers() if m.name.startswith(f"{folder.name}/tests/")]
            tar.extractall(CACHE, tests, filter="data")
        for path, content in STUBS.items():
            stub = folder / path
            stub.parent.mkdir(exist_ok=True)
            if not stub.exists():
                stub.write_text(content)
        (folder / "complete").touch()
    return folder


def results(suite: Path, family: str, mode: str, chosen: str) -> dict[str, dict]:
    """Return the outcome of each test, and the reasons why stock code ran in it."""
    out = CACHE / f"{family}-{mode}.json"
    out.unlink(missing_ok=True)
    environment = os.environ | {
        "CONFORMANCE_FAMILY": family,
        "CONFORMANCE_MODE": mode,
        "CONFORMANCE_OUT": str(out),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(suite), str(ROOT), *inherited("PYTHONPATH")]),
    }
    command = [sys.executable, "-m", "pytest", "--quiet", "--no-header", "--tb=short"]
    command += ["-c", os.devnull, "--rootdir", str(CACHE), "--noconftest", "-p", "no:cacheprovider"]
    command += ["-p", "transformers_recorder", "--timeout", "600", "-k", chosen]
    command += [str(HERE / "transformers_families.py")]
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(command, env=environment, stdout=stream, stderr=stream).returncode
    # pytest exits with 1 if a test failed, and with 5 if no test was selected.
    if code not in (0, 1) or not out.exists():
        sys.exit(f"{family}, {mode}: pytest ended with {code}; see {log}")
    return json.loads(out.read_text(encoding="utf-8"))


def inherited(name: str) -> Iterator[str]:
    if os.environ.get(name):
        yield os.environ[name]


def passed(tests: dict[str, dict]) -> list[str]:
    return [name for name, test in tests.items() if test["outcome"] == "passed"]


if __name__ == "__main__":
    sys.exit(main())
