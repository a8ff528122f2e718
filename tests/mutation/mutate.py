"""Insert one fault at a time into the kernels or the PTX machine, and check whether a test fails.

    python tests/mutation/mutate.py [--only TEXT] [--workers 2] [--json FILE]    # or: make mutate

Each fault of faults.py, cpp_faults.py and ptx_faults.py is inserted into a copy of the tree, never
into the tree itself. The tests of the fault's noun run in the copy until a test fails: first the
cases that `make test` selects, and then all cases. A fault is caught if a test fails, crashes or
hangs. For C++, the unit of the noun is compiled with the fault; a fault that does not compile, or
that compiles to the same code, is an error. The exit status is 1 if fewer than 95 % of the faults
of a kind are caught, if long_cases.py differs from the outcomes, or if a test fails without a
fault.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from cpp_faults import CPP_FAULTS, CPP_SELECTIONS, UNITS
from extension import ROOT, compile_all, compile_unit, link_unit
from faults import FAULTS, SELECTIONS, Fault
from long_cases import LONG_CASES
from ptx_faults import PTX_FAULTS, PTX_SELECTIONS, PTX_UNITS

NEEDED = 0.95
# The tests have this time limit in seconds, because a fault may cause an endless loop.
LONGEST = 300
COPIED = ("csrc", "fastbert", "kernels", "ptxmachine", "tests", "pyproject.toml")
TESTS = SELECTIONS | CPP_SELECTIONS | PTX_SELECTIONS
COMPILED = UNITS | PTX_UNITS


class Outcome(NamedTuple):
    """The outcome of one fault; ``by`` is the first failed test, or how the test run ended.

    The value ``quick`` says whether the cases that `make test` selects catch the fault.
    """

    fault: Fault
    caught: bool
    quick: bool
    by: str
    seconds: float

    def __str__(self) -> str:
        how = "caught" if self.quick else "caught only with --every-case"
        outcome = f"{how} by {self.by}" if self.caught else "SURVIVED"
        return f"{self.fault.name}: {outcome} ({self.seconds:.0f} s)"


def copy_tree(folder: Path) -> Path:
    """Copy the files that the tests need, including symlinks, and return the folder."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", "build", "_machine*.so")
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, target)
    return folder


def run_tests(tree: Path, noun: str, every_case: bool) -> tuple[bool, str]:
    """Return whether the tests of ``noun`` pass in ``tree``, and the first failure."""
    return run_selection(tree, TESTS[noun] + ["--every-case"] * every_case)


def run_selection(tree: Path, selection: list[str]) -> tuple[bool, str]:
    """Return whether the selected tests pass in ``tree``, and the first failure.

    The tests use the installed ptxmachine, or the ptxmachine of ``tree`` if `build` has linked it.
    """
    machines = {str(library.parents[1]) for library in tree.glob("ptxmachine/src/*/_machine*.so")}
    paths = [str(tree), *machines, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        # With this width, pytest does not shorten the lines of its summary.
        "COLUMNS": "240",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-rfE", "--tb=no", *selection]
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return False, f"running after {LONGEST} s"
    if run.returncode == 0 and " passed" in run.stdout:
        return True, ""
    if run.returncode < 0:
        return False, f"crashed with signal {-run.returncode}"
    if run.returncode != 1:
        # Without a test, or after an internal error of pytest, the outcome of the fault is unknown.
        raise RuntimeError(f"pytest: exit status {run.returncode}\n{run.stdout}\n{run.stderr}")
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return False, failed[0].partition(" ")[2] if failed else "an error"


def apply(tree: Path, fault: Fault) -> str:
    """Write the fault into ``tree`` and return the original text of the file."""
    path = tree / fault.file
    original = path.read_text(encoding="utf-8")
    path.write_text(fault.broken(original), encoding="utf-8")
    return original


def build(tree: Path, noun: str) -> bytes:
    """Compile the noun's unit, link the extension in ``tree``, and return the object's bytes."""
    unit = COMPILED[noun]
    compiled = compile_unit(tree, unit)
    link_unit(compiled, unit, tree / unit.library)
    return compiled.read_bytes()


def try_fault(tree: Path, fault: Fault, clean: dict[str, bytes]) -> Outcome:
    """Run the tests with a fault; ``clean`` maps C++ nouns to objects without a fault."""
    start = time.monotonic()
    original = apply(tree, fault)
    try:
        if fault.noun in COMPILED and build(tree, fault.noun) == clean[fault.noun]:
            raise RuntimeError(f"{fault.name}: compiles to the same code as without the fault")
        quick, by = run_tests(tree, fault.noun, every_case=False)
        passed, by = run_tests(tree, fault.noun, every_case=True) if quick else (quick, by)
    finally:
        (tree / fault.file).write_text(original, encoding="utf-8")
    return Outcome(fault, not passed, not quick, by, time.monotonic() - start)


def try_all(faults: list[Fault], workers: int, clean: dict[str, bytes]) -> list[Outcome]:
    """Return the outcome of each fault; each of the ``workers`` has its own copy of the tree."""
    jobs: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        jobs.put(fault)
    outcomes: list[Outcome] = []
    errors: list[BaseException] = []

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="fastbert-mutate-") as folder:
            tree = copy_tree(Path(folder))
            while not errors:
                try:
                    outcome = try_fault(tree, jobs.get_nowait(), clean)
                except queue.Empty:
                    return
                except BaseException as error:
                    errors.append(error)
                    return
                outcomes.append(outcome)
                print(f"[{len(outcomes)}/{len(faults)}] {outcome}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(faults)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outcomes


def check_unbroken(nouns: set[str], workers: int, every_case: bool) -> dict[str, bytes]:
    """Check that the tests pass without a fault, and return the objects of the C++ nouns.

    Args:
        nouns: The nouns whose tests run.
        workers: The number of nouns that are tested at the same time.
        every_case: Whether all cases run, or only the cases of `make test`.

    Raises:
        RuntimeError: If a test fails without a fault.
    """

    def check(noun: str) -> bytes:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fastbert-mutate-") as folder:
            tree = copy_tree(Path(folder))
            clean = build(tree, noun) if noun in COMPILED else b""
            passed, by = run_tests(tree, noun, every_case)
        if not passed:
            raise RuntimeError(f"{noun}: a test fails without a fault: {by}")
        print(f"{noun}: passes without a fault ({time.monotonic() - start:.0f} s)", flush=True)
        return clean

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(sorted(nouns), pool.map(check, sorted(nouns)), strict=True))


def judge(kind: str, faults: list[Fault], workers: int) -> list[Outcome]:
    """Try the faults of one kind, and print how many faults of each file were caught."""
    start = time.monotonic()
    linked = {n for f in faults if f.noun in COMPILED for n in COMPILED[f.noun].linked}
    if linked:
        compile_all(sorted(linked), workers)
    clean = check_unbroken({fault.noun for fault in faults}, workers, every_case=False)
    outcomes = try_all(faults, workers, clean)
    # The failure of a long case counts only if all long cases pass without a fault.
    long = {outcome.fault.noun for outcome in outcomes if outcome.caught and not outcome.quick}
    check_unbroken(long, workers, every_case=True)
    tried = Counter(outcome.fault.file for outcome in outcomes)
    caught = Counter(outcome.fault.file for outcome in outcomes if outcome.caught)
    quick = sum(outcome.quick for outcome in outcomes)
    for file in sorted(tried):
        print(f"  {file}: {caught[file]} of {tried[file]}")
    share = f"{kind}: {caught.total()} of {len(outcomes)} faults caught, "
    share += f"{caught.total() / len(outcomes):.1%}, {quick} of them by the selection of "
    print(f"{share}`make test`, in {time.monotonic() - start:.0f} s", flush=True)
    for outcome in outcomes:
        if not outcome.caught:
            print(f"  survived: {outcome.fault.name} ({outcome.fault.file})")
        elif not outcome.quick:
            print(f"  caught by the long cases only: {outcome.fault.name} ({outcome.fault.file})")
    return outcomes


def unlisted(outcomes: list[Outcome]) -> list[str]:
    """Return a message for each difference between long_cases.py and the outcomes."""
    return [
        f"{outcome.fault.name}: {'missing in' if outcome.caught else 'too much in'} long_cases.py"
        for outcome in outcomes
        if (outcome.caught and not outcome.quick) != (outcome.fault.name in LONG_CASES)
    ]


def part_of(text: str) -> tuple[int, int]:
    """Parse "K/N", which means the K-th of N parts.

    Raises:
        ValueError: If the text does not have this form, or K is not in 1 to N; argparse prints the
            error.
    """
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file contains this text")
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="the K-th of N parts of them"
    )
    parser.add_argument("--workers", type=int, default=2, help="number of faults tried at a time")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    part, parts = options.part
    kinds = {"Triton": FAULTS, "C++": CPP_FAULTS, "PTX machine": PTX_FAULTS}
    chosen = {
        kind: [f for f in faults if options.only in f.name or options.only in f.file]
        for kind, faults in kinds.items()
    }
    if not any(chosen.values()):
        parser.error(f"--only: got {options.only!r}, allowed: a part of a fault's name or file")
    outcomes, enough = [], True
    for kind, faults in chosen.items():
        # Each part first checks its nouns without a fault. The faults of a noun are adjacent, so
        # that few parts check the same noun.
        first, last = (len(faults) * k // parts for k in (part - 1, part))
        if faults[first:last]:
            judged = judge(kind, faults[first:last], options.workers)
            enough &= sum(outcome.caught for outcome in judged) >= NEEDED * len(judged)
            outcomes += judged
    for line in unlisted(outcomes):
        print(line)
        enough = False
    if options.json:
        rows = [
            {
                "name": o.fault.name,
                "file": o.fault.file,
                "caught": o.caught,
                "quick": o.quick,
                "by": o.by,
            }
            for o in sorted(outcomes, key=lambda o: o.fault.name)
        ]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
