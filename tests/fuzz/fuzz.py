"""Read damaged files in processes with limits, and save each case that ends in a wrong way.

    make fuzz SECONDS=600
    python tests/fuzz/fuzz.py [--seconds 120] [--seed 0] [--targets model ...] [--out out/fuzz]
    python tests/fuzz/fuzz.py --case checkpoint/0/1234    # this case again, in this process

A case is a folder of sound files (``fuzz_targets.py``) of which one or two are damaged
(``fuzz_mutations.py``). The name of the case, TARGET/SEED/NUMBER, decides the damage. A forked
process reads the folder within 10 seconds of processor time and 1 GiB of memory (``fuzz_pool.py``).
A case may succeed, because some damage is harmless, or raise a ValueError, TypeError or OSError
whose message names the folder. Any other end is a failure. The script saves the folder of a failure
in OUT with ``case.txt``, which has the damage and the traceback. Of failures at the same place in
the code, only the first is saved. The exit status is 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_pool import LIMITS, Limits, Outcome, judged
from fuzz_targets import TARGETS, Target

# The folders of the cases are in memory, because access to a disk would be slower than the cases.
MEMORY = Path("/dev/shm")


class Failure(NamedTuple):
    """A case that ended wrongly: its name, its outcome, and the folder in which it is saved."""

    name: str
    outcome: Outcome
    folder: Path


class Fuzz:
    """The folders of sound files, and the counts of all cases' outcomes.

    Attributes:
        counts: Number of outcomes, by target and kind of outcome.
        failures: The first failure at each place in the code.
    """

    def __init__(
        self, targets: Sequence[Target], out: Path, home: Path, limits: Limits = LIMITS
    ) -> None:
        """Make the sound files of all targets.

        Args:
            targets: The kinds of folders to damage and read.
            out: Folder for the saved failures.
            home: Folder for the files of all cases.
            limits: The limits of time and memory for a case.
        """
        self.targets, self.out, self.home, self.limits = targets, out, home, limits
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: dict[str, Failure] = {}
        for target in targets:
            folder = home / "sound" / target.name
            folder.mkdir(parents=True)
            target.build(folder)
            # The first read imports modules, and must accept the undamaged files.
            shutil.copytree(folder, home / "case")
            target.read(home / "case")
            shutil.rmtree(home / "case")
        # After a garbage collection, forked processes copy fewer pages of memory.
        gc.collect()
        gc.freeze()

    def damaged(self, target: Target, seed: int, number: int) -> tuple[Path, str]:
        """Return the folder of a case, and a description of its damage."""
        folder = self.home / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.home / "sound" / target.name, folder)
        return folder, target.damage(folder, random.Random(f"{target.name}/{seed}/{number}"))

    def run(self, target: Target, seed: int, number: int) -> Outcome:
        """Run a case, and save its folder if it fails."""
        folder, damage = self.damaged(target, seed, number)
        named = str(folder) if target.named is None else target.named
        outcome = judged(lambda: target.read(folder), named, self.limits)
        self.counts[target.name, outcome.kind] += 1
        signature = f"{target.name}: {outcome.signature}"
        if outcome.kind == "failure" and signature not in self.failures:
            self._keep(target, seed, number, damage, signature, outcome)
        return outcome

    def _keep(
        self, target: Target, seed: int, number: int, damage: str, signature: str, outcome: Outcome
    ) -> None:
        kept = self.out / f"{target.name}-{seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        # The folder is damaged again, because the process may have changed it, and because pipes
        # and files with holes cannot be copied.
        folder, _ = self.damaged(target, seed, number)
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
                place = kept / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
        name = f"{target.name}/{seed}/{number}"
        again = f"python tests/fuzz/fuzz.py --case {name}"
        text = f"{name}\n{again}\n{damage}\n{signature}\n\n{outcome.reason}\n"
        (kept / "case.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        self.failures[signature] = Failure(name, outcome, kept)

    @property
    def cases(self) -> int:
        """Number of all cases."""
        return sum(self.counts.values())


@contextmanager
def opened(targets: Sequence[Target], out: Path, limits: Limits = LIMITS) -> Iterator[Fuzz]:
    """Make the sound files in a temporary folder, which the end of the block deletes."""
    threads, was_frozen = torch.get_num_threads(), gc.get_freeze_count() > 0
    # A forked process cannot use the threads of its parent.
    torch.set_num_threads(1)
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    home = Path(tempfile.mkdtemp(prefix="fastbert-fuzz-", dir=place))
    try:
        yield Fuzz(targets, out, home, limits)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        if not was_frozen:
            gc.unfreeze()
        torch.set_num_threads(threads)


def fuzz(fuzzing: Fuzz, seed: int, seconds: float, most: int, say: Callable[[str], None]) -> None:
    """Run cases of all targets in turn, until `seconds` are over or `most` cases have run."""
    begun = told = time.monotonic()
    while fuzzing.cases < most and (now := time.monotonic()) - begun < seconds:
        number, place = divmod(fuzzing.cases, len(fuzzing.targets))
        outcome = fuzzing.run(fuzzing.targets[place], seed, number)
        if now - told > 10:
            told = now
            say(_progress(fuzzing, now - begun, seconds))
        if outcome.kind == "failure":
            say(f"failure {fuzzing.targets[place].name}/{seed}/{number}: {outcome.signature}")
    say(_progress(fuzzing, time.monotonic() - begun, seconds))


def _progress(fuzzing: Fuzz, spent: float, seconds: float) -> str:
    kinds: Counter[str] = Counter()
    for (_, kind), count in fuzzing.counts.items():
        kinds[kind] += count
    told = ", ".join(f"{kinds[kind]:,} {kind}" for kind in ("success", "refused", "failure"))
    return (
        f"fastbert: {spent:.0f} of {seconds:.0f} s, {fuzzing.cases:,} cases, "
        f"{fuzzing.cases / max(spent, 1e-9):.0f} per second: {told}"
    )


def _table(fuzzing: Fuzz) -> str:
    rows = [f"{'target':<24}{'success':>10}{'refused':>10}{'failure':>10}"]
    for target in fuzzing.targets:
        counts = (fuzzing.counts[target.name, k] for k in ("success", "refused", "failure"))
        rows.append(f"{target.name:<24}" + "".join(f"{count:>10,}" for count in counts))
    return "\n".join(rows)


def _again(name: str, out: Path) -> int:
    """Run the case `name` in this process, so that its error is raised here."""
    kind, seed, number = name.rsplit("/", 2)
    target = TARGETS[kind]
    with opened([target], out) as fuzzing:
        folder, damage = fuzzing.damaged(target, int(seed), int(number))
        print(f"{folder}: {damage}", flush=True)
        target.read(folder)
    print("success")
    return 0


def tell(text: str) -> None:
    """Print a line immediately, even if the output is a pipe."""
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="duration")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="largest number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder for failures")
    parser.add_argument("--case", help="name of a case, which is run again in this process")
    options = parser.parse_args(arguments)
    if options.case is not None:
        return _again(options.case, options.out)
    with opened([TARGETS[name] for name in options.targets], options.out) as fuzzing:
        fuzz(fuzzing, options.seed, options.seconds, options.cases, tell)
        print(_table(fuzzing))
        for failure in fuzzing.failures.values():
            print(f"FAILED {failure.name}: {failure.outcome.signature}; kept in {failure.folder}")
    return int(bool(fuzzing.failures))


if __name__ == "__main__":
    sys.exit(main())
