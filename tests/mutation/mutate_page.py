"""Insert one fault at a time into the page of ``fastbert view``, and check whether a test fails.

    python tests/mutation/mutate_page.py [--only TEXT]    # or: make mutate-viewer

Each fault of page_faults.py is inserted into a copy of the tree, and node builds the page. The
tests of the fault's noun run in the copy until a test fails. A fault that does not change the built
page is an error. The exit status is 1 if no test fails for a fault, or if a test fails without a
fault.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from faults import Fault
from mutate import Outcome, apply, copy_tree, run_selection
from page_faults import PAGE_FAULTS, PAGE_SELECTIONS


def build(tree: Path) -> bytes:
    """Build the page of ``tree`` and return its bytes."""
    web = tree / "fastbert" / "viewer" / "web"
    subprocess.run(["node", "build.mjs"], cwd=web, check=True, capture_output=True)
    return (web.parent / "page.html").read_bytes()


def try_fault(tree: Path, fault: Fault, clean: bytes) -> Outcome:
    """Run the tests with a fault; ``clean`` is the page without a fault."""
    start = time.monotonic()
    original = apply(tree, fault)
    try:
        if build(tree) == clean:
            raise RuntimeError(f"{fault.name}: the page is the same as without the fault")
        passed, by = run_tests(tree, fault.noun)
    finally:
        (tree / fault.file).write_text(original, encoding="utf-8")
    return Outcome(fault, not passed, not passed, by, time.monotonic() - start)


def run_tests(tree: Path, noun: str) -> tuple[bool, str]:
    """Return whether the tests of ``noun`` pass in ``tree``, and the first failure."""
    return run_selection(tree, [*PAGE_SELECTIONS[noun], "--every-case"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file contains this text")
    options = parser.parse_args()
    faults = [f for f in PAGE_FAULTS if options.only in f.name or options.only in f.file]
    if not faults:
        parser.error(f"--only: got {options.only!r}, allowed: a part of a fault's name or file")
    survived = []
    with tempfile.TemporaryDirectory(prefix="fastbert-mutate-page-") as folder:
        tree = copy_tree(Path(folder))
        clean = build(tree)
        for noun in sorted({fault.noun for fault in faults}):
            passed, by = run_tests(tree, noun)
            if not passed:
                raise RuntimeError(f"{noun}: a test fails without a fault: {by}")
            print(f"{noun}: passes without a fault", flush=True)
        for number, fault in enumerate(faults, 1):
            outcome = try_fault(tree, fault, clean)
            print(f"[{number}/{len(faults)}] {outcome}", flush=True)
            if not outcome.caught:
                survived.append(fault)
    print(f"{len(faults) - len(survived)} of {len(faults)} faults caught", flush=True)
    for fault in survived:
        print(f"  survived: {fault.name} ({fault.file})")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
